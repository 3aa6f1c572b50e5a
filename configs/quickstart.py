"""The built-in English-German task, small enough to train while you watch.

Model:     the paper's encoder-decoder (section 3) in the size `tiny`: 2+2 layers, d_model 128
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/quickstart.py --run runs/quickstart
           (or launch/quickstart.sh, which also makes the environment and shows translations)
Hardware:  2 CPU cores
Time:      2 min 5 s for 800 updates, compiling included
Score:     96.7 % exact match on 1,200 held-out lines (95.4 % after 800 updates)
Full:      --config=configs/quickstart.py:level=full takes the whole grammar; not yet measured
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, size='tiny', recipe='paper', level='quickstart')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))

    config.data.source = 'grammar'
    config.data.grammar.level = arguments.level
    config.data.batching = 'packing'  # one shape, so one program to compile
    config.data.max_length = 32
    config.data.batch_tokens = 2048
    config.vocabulary.size = 1200

    config.model.max_length = 128
    config.optimizer.schedule.name = 'cosine'  # down to 0: the paper's formula would still be high after 900 updates
    config.optimizer.schedule.peak = 3e-3
    config.optimizer.schedule.warmup_steps = 150
    config.train.steps = 900

    config.evaluation.every_steps = 450
    config.evaluation.max_pairs = 200
    config.evaluation.bleu = False  # translations come after training
    config.evaluation.score = 'loss'
    config.checkpoint.every_steps = 450
    if arguments.level == 'full':  # a larger lexicon, longer sentences and more constructions at once
        config.data.grammar.num_train = 200_000
        config.data.max_length = 64
        config.data.batch_tokens = 4096
        config.vocabulary.size = 2000
        config.train.steps = 4000
        config.evaluation.every_steps = config.checkpoint.every_steps = 1000
    return config
