"""The built-in English-German task by a recurrent encoder-decoder, with or without attention.

Model:     bidirectional encoder and decoder of one layer each, d_model 128 (see transformer_jax/models/recurrent.py)
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/recurrent.py --run runs/recurrent
           transformer-jax train --config=configs/recurrent.py:attention=none,cell=lstm --run runs/fixed_vector
Choices:   attention=none (a fixed vector), bahdanau or luong; cell=gru, lstm or rnn
Hardware:  2 CPU cores
Time:      minutes; not yet measured
Score:     not yet measured
Full:      --config=configs/recurrent.py:level=full takes the whole grammar, whose longer sentences need attention
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, attention='bahdanau', cell='gru', size='tiny', recipe='paper', level='quickstart')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))

    config.model.family = 'recurrent'
    config.model.recurrence.attention = arguments.attention
    config.model.recurrence.cell = arguments.cell
    config.model.num_encoder_layers = 1
    config.model.num_decoder_layers = 1
    config.model.positions = 'none'
    config.model.attention.dropout_rate = 0.0  # recipes set this and the next for the Transformer
    config.model.attention.use_bias = False
    config.model.max_length = 128

    config.data.source = 'grammar'
    config.data.grammar.level = arguments.level
    config.data.batching = 'packing'
    config.data.max_length = 32
    config.data.batch_tokens = 2048
    config.vocabulary.size = 1200

    config.optimizer.clip_norm = 1.0  # gradients through time explode: Pascanu et al. 2013
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
