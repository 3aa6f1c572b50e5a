"""The paper's Transformer and its update in plain Flax, as one would write them from the documentation: a peer.

Post-norm, shared embeddings, sinusoids, no biases in attention, dropout on sublayer outputs and on the sums of
embeddings and positions, label smoothing 0.1, Adam; bfloat16 compute. Layers are unrolled, attention is Flax's own
module, and the loss is of all logits at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class Sublayers(nn.Module):
    """One encoder layer, or with `memory` one decoder layer."""

    sizes: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        sizes = self.sizes
        drop = nn.Dropout(sizes['dropout'], deterministic=False)
        kind = {'dtype': jnp.bfloat16, 'use_bias': False, 'num_heads': sizes['heads']}

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            return nn.LayerNorm(dtype=jnp.bfloat16)(x + drop(y))

        x = add(x, nn.MultiHeadDotProductAttention(**kind)(x, x, mask=mask))
        if memory is not None:
            x = add(x, nn.MultiHeadDotProductAttention(**kind)(x, memory))
        hidden = nn.relu(nn.Dense(sizes['d_ff'], dtype=jnp.bfloat16)(x))
        return add(x, nn.Dense(sizes['d_model'], dtype=jnp.bfloat16)(hidden))


class Transformer(nn.Module):
    sizes: dict[str, Any]

    @nn.compact
    def __call__(self, inputs: jax.Array, decoder_inputs: jax.Array) -> jax.Array:
        """Logits of every target."""
        sizes = self.sizes
        table = nn.Embed(
            sizes['vocab'],
            sizes['d_model'],
            dtype=jnp.bfloat16,
            embedding_init=nn.initializers.normal(sizes['d_model'] ** -0.5),
        )
        drop = nn.Dropout(sizes['dropout'], deterministic=False)

        def embed(ids: jax.Array) -> jax.Array:
            return drop(table(ids) * sizes['d_model'] ** 0.5 + sinusoids(ids.shape[1], sizes['d_model']))

        memory = embed(inputs)
        for _ in range(sizes['layers']):
            memory = Sublayers(sizes)(memory, None, None)
        x, mask = embed(decoder_inputs), nn.make_causal_mask(decoder_inputs)
        for _ in range(sizes['layers']):
            x = Sublayers(sizes)(x, memory, mask)
        return table.attend(x)


def sinusoids(length: int, width: int) -> jax.Array:
    """Section 3.5."""
    angles = jnp.arange(length)[:, None] / 10_000.0 ** (jnp.arange(0, width, 2) / width)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, width).astype(jnp.bfloat16)


def make_update(sizes: dict[str, Any]) -> tuple[Callable, Callable]:
    """`start() -> state` and `update(state, inputs, targets) -> (state, loss)`, not yet jitted."""
    model = Transformer(sizes)
    adam = optax.adam(5e-4, b1=0.9, b2=0.98, eps=1e-9)

    def start() -> Any:
        ids = jnp.zeros((1, 4), jnp.int32)
        rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
        params = model.init(rngs, ids, ids)['params']
        return params, adam.init(params), jnp.int32(0)

    def update(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        params, moments, step = state
        rng = jax.random.fold_in(jax.random.key(0, impl='rbg'), step)

        def loss(params: Any) -> jax.Array:
            shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=1)
            logits = model.apply({'params': params}, inputs, shifted, rngs={'dropout': rng}).astype(jnp.float32)
            labels = optax.smooth_labels(jax.nn.one_hot(targets, sizes['vocab']), 0.1)
            return optax.softmax_cross_entropy(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, step + 1), value

    return start, update
