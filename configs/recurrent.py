"""The built-in English-German task by a recurrent encoder-decoder, with or without attention.

Model:     bidirectional encoder and decoder of one layer each, d_model 128 (see transformer_jax/models/recurrent.py)
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/recurrent.py --run runs/recurrent
           transformer-jax train --config=configs/recurrent.py:attention=none,cell=lstm --run runs/fixed_vector
Choices:   attention=none (a fixed vector), bahdanau or luong; cell=gru, lstm or rnn
Hardware:  2 CPU cores
Time:      minutes
Score:     after 500 updates (one seed) 83.8 % exact match of 1,200 held-out lines, attention=none 11.4 %; after the
           page's 900 not yet measured
Lengths:   --config=configs/recurrent.py:level=lengths has sentences of 3 to 24 words: after 5,000 updates (18 to 32
           minutes on one core that other work shared) 99.2 % exact match, attention=none 63.1 %: 95 % up to 7 words,
           2 % above 16
Full:      --config=configs/recurrent.py:level=full takes the whole grammar
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, attention='bahdanau', cell='gru', size='tiny', recipe='paper', level='quickstart')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe, level=arguments.level))

    config.model.family = 'recurrent'
    config.model.recurrence.attention = arguments.attention
    config.model.recurrence.cell = arguments.cell
    config.model.num_encoder_layers = 1
    config.model.num_decoder_layers = 1
    config.model.positions = 'none'
    config.model.attention.dropout_rate = 0.0  # recipes set this and the next for the Transformer
    config.model.attention.use_bias = False

    config.optimizer.clip_norm = 1.0  # gradients through time explode: Pascanu et al. 2013

    return config
