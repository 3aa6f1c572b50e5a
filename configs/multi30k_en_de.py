"""Multi30k, English to German: 29,000 image captions, a real task that a laptop can train.

Model:     the paper's encoder-decoder in the size `mini`: 3+3 layers, d_model 256, 4 heads, d_ff 1024
Data:      a folder with the raw text of task 1: {train,val,test_2016_flickr}.{en,de}.gz
Command:   transformer-jax train --config=configs/multi30k_en_de.py:folder=PATH --run runs/multi30k
           transformer-jax evaluate --run runs/multi30k --split test
           (length=short for 2,330 updates instead of 6,000)
Hardware:  2 CPU cores
Time:      about 36 minutes at 2,470 target tokens/s; length=short about 14
Score:     sacreBLEU 38.52 on test_2016_flickr (beam 4), 39.78 on validation; length=short: 35.83
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, required=('folder',), size='mini', recipe='paper', length='long')
    if arguments.length not in ('short', 'long'):
        raise ConfigError(f"length is {arguments.length!r}; it must be one of 'short', 'long'")
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))

    config.data.source = 'text_files'
    files = config.data.text_files
    for split, name in (('train', 'train'), ('validation', 'val'), ('test', 'test_2016_flickr')):
        files[f'{split}_source'] = f'{arguments.folder}/{name}.en.gz'
        files[f'{split}_target'] = f'{arguments.folder}/{name}.de.gz'
    config.data.batch_tokens = 1024  # small: 29,000 pairs reward many updates
    config.data.max_length = 64
    config.vocabulary.size = 8000

    config.model.init_scale = 0.25  # post-norm starts faster from small sublayers
    config.optimizer.schedule.name = 'cosine'
    config.optimizer.schedule.peak = 1.5e-3
    config.optimizer.schedule.warmup_steps = 200
    config.optimizer.clip_norm = 1.0
    config.model.dropout_rate = 0.2
    config.train.steps = 6000  # 5.3 million target tokens, 12 epochs
    config.evaluation.every_steps = config.checkpoint.every_steps = 1000
    if arguments.length == 'short':
        config.model.dropout_rate = 0.1
        config.train.steps = 2330  # 2.1 million target tokens
    config.logging.every_steps = 50
    return config
