"""One causal stack: translation with the source as a prefix (prefix-LM), or a language model of the target side.

Model:     as many layers in one stack as the paper's encoder and decoder have together, in the size `tiny`: 4 layers,
           d_model 128; task=language_model: 2 layers
Data:      sentence pairs that a grammar of our own makes up; task=language_model reads their German side alone
Command:   transformer-jax train --config=configs/decoder_only.py --run runs/prefix
           transformer-jax translate --run runs/prefix
           transformer-jax train --config=configs/decoder_only.py:task=language_model --run runs/language_model
           transformer-jax generate --run runs/language_model
Hardware:  2 CPU cores
Time:      not yet measured
Score:     prefix-LM after 500 updates (one seed) 80.3 % exact match of 1,200 held-out lines; after 900 not yet measured
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, task='translation', size='tiny', recipe='paper')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe, level='quickstart'))

    config.model.family = 'decoder_only'
    config.model.decoder_only.task = arguments.task

    if arguments.task == 'translation':
        config.model.num_decoder_layers *= 2
    else:
        config.train.label_smoothing = 0.0
        config.decoding.method = 'sampling'
    return config
