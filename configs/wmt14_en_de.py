"""WMT 2014 English to German, the paper's main result. Sections 5 and 6.1.

Model:     size=base (65M parameters in the paper, 63,045,632 here) or size=big (213M, 214,171,648);
           size=billion is not in the paper: 1,485,553,664 with 12 + 12 layers of width 2048
Data:      the TFDS set wmt14_translate/de-en, 4.5M pairs; prepared once, under --config.data.tfds.data_dir
Command:   transformer-jax train --config=configs/wmt14_en_de.py:size=base --run runs/wmt14_en_de_base
           transformer-jax average --run runs/wmt14_en_de_base --last 5 --out runs/wmt14_en_de_base/averaged
           transformer-jax evaluate --run runs/wmt14_en_de_base --checkpoint runs/wmt14_en_de_base/averaged
Hardware:  the paper: 8 P100; base 100,000 steps of 0.4 s (12 hours), big 300,000 of 1.0 s (3.5 days)
           here: not yet measured
Score:     the paper: 27.3 (base, last 5 averaged) and 28.4 (big, last 20 averaged), tokenised and compound-split
           here: not yet measured
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, size='base', recipe='paper', attention='auto')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))
    big = arguments.size == 'big'

    config.data.source = 'tfds'
    config.data.tfds.name = 'wmt14_translate/de-en'
    config.data.batch_tokens = 25_000  # target side; as many source tokens, section 5.1
    config.vocabulary.size = 37_000
    config.model.attention.impl = arguments.attention

    config.train.steps = 300_000 if big else 100_000
    config.train.loss_block_tokens = 2048  # table and its gradient pass through memory once a block
    config.evaluation.every_steps = 5000
    config.checkpoint.every_steps = 3000
    config.checkpoint.average_every_steps = 600 if big else 1500  # ten minutes at the paper's step times
    config.checkpoint.average_keep = 20 if big else 5
    return config
