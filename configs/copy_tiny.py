"""Copying or reversing strings of symbols: the smallest task that needs attention over the source.

Model:     2+2 layers, d_model 64
Command:   transformer-jax train --config=configs/copy_tiny.py --run runs/copy
           transformer-jax train --config=configs/copy_tiny.py:task=reverse --run runs/reverse
Hardware:  1 CPU core
Time:      about a minute; not yet measured
Score:     not yet measured
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, task='copy')
    config = to_config_dict(apply(Config(), size='tiny'))

    config.data.source = 'copying'
    config.data.copying.task = arguments.task
    config.data.max_length = 32
    config.data.batch_tokens = 1024
    config.data.num_buckets = 2
    config.vocabulary.size = 45  # 20 symbols, each with and without a space before it, and the specials
    config.vocabulary.byte_fallback = False
    config.source_language = config.target_language = 'symbols'

    config.model.d_model = 64
    config.model.d_ff = 256
    config.model.attention.head_dim = 16
    config.model.max_length = 96
    config.optimizer.schedule.factor = 0.5
    config.optimizer.schedule.warmup_steps = 200
    config.train.steps = 600

    config.evaluation.score = 'loss'
    config.evaluation.every_steps = 200
    config.checkpoint.every_steps = 200
    return config
