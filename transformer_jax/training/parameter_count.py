"""How many parameters a model has: those it computes with, without the rows that only fill up its vocabulary."""

import dataclasses

import jax

from transformer_jax import models
from transformer_jax.config import ModelConfig
from transformer_jax.models.interface import abstract_params


def count_parameters(config: ModelConfig, *, vocab_size: int) -> int:
    """The number of scalars in the tree of parameters, as papers count them. Draws none."""
    unpadded = dataclasses.replace(config, vocab_pad_multiple=1)
    model = models.build(unpadded, vocab_size=vocab_size, start_id=0)  # which start id makes no difference to shapes
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model)))
