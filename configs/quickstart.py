"""The built-in English-German task, small enough to train while you watch.

Model:     the paper's encoder-decoder (section 3) in the size `tiny`: 2+2 layers, d_model 128
Data:      sentence pairs that a grammar of our own makes up; nothing is downloaded
Command:   transformer-jax train --config=configs/quickstart.py --run runs/quickstart
           (or launch/quickstart.sh, which also makes the environment and shows translations)
Hardware:  2 CPU cores
Time:      2 min 23 s, compiling and evaluation included
Score:     96.8 % exact match on 1,200 held-out lines
Full:      configs/full_grammar.py takes the whole grammar
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, size='tiny', recipe='paper', level='quickstart')
    return to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe, level=arguments.level))
