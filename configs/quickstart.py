"""The built-in English-German task, small enough to train while you watch.

Model:     the paper's encoder-decoder (section 3) in the size `tiny`: 2+2 layers, d_model 128
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/quickstart.py --run runs/quickstart
           (or launch/quickstart.sh, which also makes the environment and shows translations)
Hardware:  2 CPU cores
Time:      aims at 2 minutes from the first compile; not yet measured
Score:     not yet measured (exact match on the test split)
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, size='tiny', recipe='paper')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))

    config.data.source = 'grammar'
    config.data.grammar.level = 'quickstart'
    config.data.max_length = 64
    config.data.batch_tokens = 4096
    config.data.num_buckets = 4
    config.vocabulary.size = 1000

    config.model.max_length = 128
    config.optimizer.schedule.factor = 0.5
    config.optimizer.schedule.warmup_steps = 200
    config.train.steps = 1000

    config.evaluation.every_steps = 250
    config.evaluation.max_pairs = 200
    config.checkpoint.every_steps = 250
    config.logging.every_steps = 50
    return config
