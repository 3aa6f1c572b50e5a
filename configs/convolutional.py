"""The built-in English-German task by a convolutional encoder-decoder.

Model:     gated convolutions, attention in each decoder layer (Gehring et al. 2017); 2+2 layers, d_model 128
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/convolutional.py --run runs/convolutional
           transformer-jax train --config=configs/convolutional.py:kernel=separable --run runs/separable
Choices:   kernel=plain or separable (depth-wise, then point-wise)
Hardware:  2 CPU cores
Time:      minutes
Score:     after 500 updates (one seed) 71.4 % exact match of 1,200 held-out lines; after 900 not yet measured
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
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe, level=arguments.level))

    config.model.family = 'convolutional'
    config.model.convolution.kernel_width = 5  # two layers see 9 subwords
    config.model.convolution.separable = arguments.kernel == 'separable'
    config.model.positions = 'learned'  # Gehring et al., section 3.1
    config.model.scale_embedding = False  # small embeddings, and scores that are bare products
    config.model.attention.scale = None
    config.model.attention.use_bias = False  # recipes set it for the Transformer

    config.optimizer.clip_norm = 1.0

    return config
