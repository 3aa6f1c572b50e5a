"""WMT 2014 English to French. Sections 5 and 6.1.

Model:     size=base or size=big; big with dropout 0.1 instead of 0.3 (section 6.1)
Data:      the TFDS set wmt14_translate/fr-en. It has 40.8M pairs; the paper used 36M and doesn't say which
Command:   transformer-jax train --config=configs/wmt14_en_fr.py:size=big --run runs/wmt14_en_fr_big
           transformer-jax average --run runs/wmt14_en_fr_big --last 20 --out runs/wmt14_en_fr_big/averaged
           transformer-jax evaluate --run runs/wmt14_en_fr_big --checkpoint runs/wmt14_en_fr_big/averaged
Hardware:  the paper: 8 P100, 3.5 days for big; here: not yet measured
Score:     the paper: 38.1 (base) and 41.8 (big, table 2; its text says 41.0)
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
    config.target_language = 'fr'

    config.data.source = 'tfds'
    config.data.tfds.name = 'wmt14_translate/fr-en'
    config.data.batch_tokens = 25_000  # target side; as many source tokens, section 5.1
    config.vocabulary.size = 32_000
    config.model.attention.impl = arguments.attention
    config.model.dropout_rate = 0.1

    config.train.steps = 300_000 if big else 100_000  # the paper doesn't say for this pair; those of English-German
    config.train.loss_block_tokens = 2048  # table and its gradient pass through memory once a block
    config.evaluation.every_steps = 5000
    config.checkpoint.every_steps = 3000
    config.checkpoint.average_every_steps = 600 if big else 1500  # ten minutes at the paper's step times
    config.checkpoint.average_keep = 20 if big else 5
    return config
