"""The built-in English-German task by a convolutional encoder-decoder.

Model:     gated convolutions, attention in each decoder layer (Gehring et al. 2017); 2+2 layers, d_model 128
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/convolutional.py --run runs/convolutional
           transformer-jax train --config=configs/convolutional.py:kernel=separable --run runs/separable
Choices:   kernel=plain or separable (depth-wise, then point-wise)
Hardware:  2 CPU cores
Time:      minutes; not yet measured
Score:     not yet measured
Full:      --config=configs/convolutional.py:level=full takes the whole grammar
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, kernel='plain', size='tiny', recipe='paper', level='quickstart')
    if arguments.kernel not in ('plain', 'separable'):
        raise ConfigError(f"kernel is {arguments.kernel!r}; it must be one of 'plain', 'separable'")
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))

    config.model.family = 'convolutional'
    config.model.convolution.kernel_width = 5  # two layers see 9 subwords
    config.model.convolution.separable = arguments.kernel == 'separable'
    config.model.positions = 'learned'  # Gehring et al., section 3.1
    config.model.attention.use_bias = False  # recipes set it for the Transformer
    config.model.max_length = 128

    config.data.source = 'grammar'
    config.data.grammar.level = arguments.level
    config.data.batching = 'packing'
    config.data.max_length = 32
    config.data.batch_tokens = 2048
    config.vocabulary.size = 1200

    config.optimizer.clip_norm = 1.0
    config.optimizer.schedule.name = 'cosine'
    config.optimizer.schedule.peak = 3e-3
    config.optimizer.schedule.warmup_steps = 150
    config.train.steps = 1200

    config.evaluation.every_steps = 600
    config.evaluation.max_pairs = 200
    config.evaluation.bleu = False  # translations come after training
    config.evaluation.score = 'loss'
    config.checkpoint.every_steps = 600
    if arguments.level == 'full':
        config.data.grammar.num_train = 200_000
        config.data.max_length = 64
        config.data.batch_tokens = 4096
        config.vocabulary.size = 2000
        config.train.steps = 4000
        config.evaluation.every_steps = config.checkpoint.every_steps = 1000
    return config
