"""Attention with linear biases (Press et al. 2022): each head loses a fixed slope of logit per position of distance."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AlibiTerms:
    """The slopes of `num_heads` heads; nothing is learned. The same to both sides where the attention is not causal."""

    num_heads: int = dataclasses.field(metadata={'static': True})

    def bias(self, q_positions: Int[Array, '#B T'], k_positions: Int[Array, '#B S']) -> Float[Array, '#B N T S']:
        """-slope |j - i|, added to the scaled logits."""
        distances = jnp.abs(q_positions[:, None, :, None] - k_positions[:, None, None, :]).astype(jnp.float32)
        return -jnp.asarray(slopes(self.num_heads), jnp.float32)[None, :, None, None] * distances

    def score_term(self, q: Array, q_positions: Array, k_positions: Array) -> None:
        """None: the bias does not depend on the query."""

    def output_term(self, weights: Array, q_positions: Array, k_positions: Array) -> None:
        """None: the values have no positions."""


def slopes(num_heads: int) -> np.ndarray:
    """2^(-8/n), 2^(-16/n), ... 2^-8 for n heads, a power of two.

    For another count, those of the greatest power of two below, then every other one of twice that power.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    own = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([own, between[: num_heads - power]])


def terms(config: ModelConfig, attention: AttentionConfig, params: Mapping[str, Array], causal: bool) -> AlibiTerms:
    """The terms of every self-attention layer."""
    return AlibiTerms(attention.num_heads)
