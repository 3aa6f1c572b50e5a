"""The small model that the tests of the oracle suite check, and what they read of its findings."""

import itertools

from transformer_jax.attention.dense import DENSE, dense_attention
from transformer_jax.checking import check_config
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.overlay import overlay

SMALL = AttentionConfig(num_heads=2, head_dim=3)
SMALL_MODEL = {
    'model.d_model': 8,
    'model.attention.num_heads': 3,
    'model.attention.head_dim': 4,
    'model.num_encoder_layers': 2,
    'model.num_decoder_layers': 2,
}


def make_config(**changes):
    """A small model; double underscores are dots, of the model's own fields."""
    return overlay(Config(), SMALL_MODEL | {f'model.{name.replace("__", ".")}': v for name, v in changes.items()})


def first_findings(config, count=2):
    """Of the first use: values and gradients. The others are not even computed."""
    return list(itertools.islice(check_config(config), count))


def names_of_failed(findings):
    return [one.check for one in findings if not one.passed]


def broken(change):
    """Dense attention whose arguments `change` spoils."""

    def attend(q, k, v, mask, options):
        return dense_attention(*change(q, k, v, mask, options))

    return DENSE._replace(function=attend)
