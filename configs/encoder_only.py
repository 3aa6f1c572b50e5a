"""An encoder alone, trained to restore masked subwords (BERT), small enough for a CPU or in the shape of BERT-base.

Model:     `tiny`: 2 layers, d_model 128; size=bert_base: 12 layers, d_model 768, 12 heads, d_ff 3072, 512 positions, as
           Devlin et al. 2019 without the prediction of the next sentence
Data:      the English side of the pairs that a grammar of our own makes up; with folder=DATA,source=en,target=de the
           side `source` of your own text (see configs/text_files.py), which size=bert_base needs: its vocabulary has
           30,522 entries. --config.model.encoder_only.side=target takes the other side
Command:   transformer-jax train --config=configs/encoder_only.py --run runs/masked
           transformer-jax evaluate --run runs/masked
Hardware:  2 CPU cores (tiny)
Time:      5 min 35 s of a busy machine, 2 min 29 s of CPU time
Score:     60.6 % of the masked subwords of 1,200 held-out lines restored, perplexity 4.44; BERT-base not yet measured
"""

from typing import Any

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, size='tiny', recipe='paper', folder=None, source='en', target='de')
    is_bert = arguments.size == 'bert_base'
    config = to_config_dict(
        apply(Config(), size='base' if is_bert else arguments.size, recipe=arguments.recipe, level='quickstart')
    )

    config.model.family = 'encoder_only'
    config.model.positions = 'learned'
    config.model.activation = 'gelu'
    config.model.attention.use_bias = True
    config.model.output_bias = True
    config.model.scale_embedding = False

    config.source_language = arguments.source
    config.target_language = arguments.target
    if arguments.folder is not None:
        config.data.source = 'text_files'
        for split, name in (('train', 'train'), ('validation', 'valid'), ('test', 'test')):
            for side in ('source', 'target'):
                config.data.text_files[f'{split}_{side}'] = f'{arguments.folder}/{name}.{getattr(arguments, side)}'

    config.optimizer.schedule.peak = 2e-3
    config.train.label_smoothing = 0.0

    if is_bert:
        _as_bert_base(config)
    return config


def _as_bert_base(config: Any) -> None:
    """Appendix A.2 and the released shape. Deviation: the learning rate falls as a cosine, not linearly."""
    config.model.num_encoder_layers = 12
    config.model.d_model = 768
    config.model.d_ff = 3072
    config.model.attention.num_heads = 12
    config.model.attention.dropout_rate = 0.1
    config.model.norm_epsilon = 1e-12
    config.model.max_length = 512
    config.vocabulary.size = 30_522
    config.data.max_length = 512
    config.data.batch_tokens = 256 * 512
    config.optimizer.name = 'adamw'
    config.optimizer.weight_decay = 0.01
    config.optimizer.beta2 = 0.999
    config.optimizer.epsilon = 1e-6
    config.optimizer.clip_norm = 1.0
    config.optimizer.schedule.peak = 1e-4
    config.optimizer.schedule.warmup_steps = 10_000
    config.train.steps = 1_000_000
    config.evaluation.every_steps = config.checkpoint.every_steps = 10_000
