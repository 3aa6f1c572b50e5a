"""Every scheme of the table at toy size with random parameters, and all that it contributes, in one place."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import positions as position_schemes
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.position_terms import PositionTerms

B, T, S, N, H, U, D = 2, 7, 11, 3, 10, 5, 14
ATTENTION = AttentionConfig(num_heads=N, head_dim=H, value_dim=U)
# Distances of a few dozen positions reach beyond every limit.
CONFIG = ModelConfig(
    d_model=D, max_length=61, attention=ATTENTION, relative_clip=3, t5_buckets=10, t5_max_distance=23, rope_base=997.0
)


class Toy(NamedTuple):
    """A scheme with parameters of its own: of one side, and of one self-attention layer."""

    config: ModelConfig
    embedding: dict[str, Any]
    terms: PositionTerms | None


def make(name: str, *, causal: bool = False, seed: int = 0, **changes: Any) -> Toy:
    """The scheme of this name; `changes` are of the model config."""
    config = dataclasses.replace(CONFIG, positions=name, **changes)
    scheme, rng = position_schemes.SCHEMES[name], np.random.default_rng(seed)

    def draw(described: dict[str, Any]) -> dict[str, Any]:
        return {key: jnp.asarray(rng.normal(size=one.shape), jnp.float32) for key, one in described.items()}

    embedding = draw(scheme.embedding_parameters(config)) if scheme.embedding_parameters else {}
    params = draw(scheme.terms_parameters(config, config.attention)) if scheme.terms_parameters else {}
    return Toy(config, embedding, position_schemes.make_terms(config, config.attention, params, causal=causal))


def scores(toy: Toy, q: Any, k: Any, q_positions: Any, k_positions: Any) -> Any:
    """The logits `[B, N, T, S]` of self-attention under a scheme."""
    q, k, q_positions, k_positions = map(jnp.asarray, (q, k, q_positions, k_positions))
    q = position_schemes.on_heads(toy.config, q, q_positions)
    k = position_schemes.on_heads(toy.config, k, k_positions)
    logits = jnp.einsum('BTNH,BSNH->BNTS', q, k)
    if toy.terms is None:
        return logits * H**-0.5
    logits = add(logits, toy.terms.score_term(q, q_positions, k_positions)) * H**-0.5
    return add(logits, toy.terms.bias(q_positions, k_positions))


def outputs(toy: Toy, weights: Any, v: Any, q_positions: Any, k_positions: Any) -> Any:
    """The weighted sum of values `[B, T, N, U]` of self-attention under a scheme."""
    weights, q_positions, k_positions = map(jnp.asarray, (weights, q_positions, k_positions))
    summed = jnp.einsum('BNTS,BSNU->BTNU', weights, v)
    return summed if toy.terms is None else add(summed, toy.terms.output_term(weights, q_positions, k_positions))


def attend(toy: Toy, q: Any, k: Any, v: Any, q_positions: Any, k_positions: Any, visible: Any) -> Any:
    """Self-attention under a scheme where `visible` `[B, T, S]` lets each query see something."""
    logits = jnp.where(visible[:, None], scores(toy, q, k, q_positions, k_positions), -jnp.inf)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return outputs(toy, weights / weights.sum(-1, keepdims=True), v, q_positions, k_positions)


def add(a: Any, b: Any) -> Any:
    """The sum, where one of the terms may be absent."""
    return a if b is None else a + b


def random_heads(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random q, k and v."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, N, H), (B, S, N, U)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return q, k, v
