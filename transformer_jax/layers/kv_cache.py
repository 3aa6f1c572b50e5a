"""Keys and values of the target read so far, for a beam of hypotheses that share ancestors."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.shapes import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """W hypotheses a sentence, L slots each. Slot s of hypothesis w holds what w read at step s.

    A beam search lets hypothesis w continue another one, w'. The keys and values stay where they were written and only
    `ancestors` is permuted: `ancestors[b, w, s]` names the hypothesis whose slot s belongs to w's past. A query attends
    to the W * L slots of its sentence with all but its own ancestors hidden, so that a step moves no keys or values.
    """

    keys: tuple[Float[Array, 'B WL N H'], ...]  # one a layer, W * L slots, slot-major: index s * W + w
    values: tuple[Float[Array, 'B WL N U'], ...]
    ancestors: Int[Array, 'B W L']
    written: Bool[Array, 'B L']  # slots that hold a token
    slot_positions: Int[Array, 'B L']  # the target position of each slot
    next_position: Int[Array, 'B']
    next_slot: Int[Array, '']

    @property
    def num_hypotheses(self) -> int:
        """W."""
        return self.ancestors.shape[1]

    @property
    def num_slots(self) -> int:
        """L."""
        return self.ancestors.shape[2]


def empty_cache(
    num_layers: int, batch: int, num_slots: int, num_heads: int, head_dim: int, value_dim: int, dtype: jnp.dtype
) -> KVCache:
    """A cache that has read nothing, W = 1."""
    return KVCache(
        keys=tuple(jnp.zeros((batch, num_slots, num_heads, head_dim), dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros((batch, num_slots, num_heads, value_dim), dtype) for _ in range(num_layers)),
        ancestors=jnp.zeros((batch, 1, num_slots), jnp.int32),
        written=jnp.zeros((batch, num_slots), bool),
        slot_positions=jnp.zeros((batch, num_slots), jnp.int32),
        next_position=jnp.zeros((batch,), jnp.int32),
        next_slot=jnp.zeros((), jnp.int32),
    )


def open_slots(cache: KVCache, lengths: Int[Array, 'B'], num_new: int) -> tuple[KVCache, Int[Array, 'B P']]:
    """Takes the next `num_new` slots: row b's first `lengths[b]` of them hold tokens. Returns the rows' positions."""
    offsets = jnp.arange(num_new, dtype=jnp.int32)[None]
    positions = cache.next_position[:, None] + offsets
    holds = offsets < lengths[:, None]
    own = jnp.broadcast_to(jnp.arange(cache.num_hypotheses)[None, :, None], (*cache.ancestors.shape[:2], num_new))
    start = cache.next_slot
    cache = dataclasses.replace(
        cache,
        ancestors=jax.lax.dynamic_update_slice_in_dim(cache.ancestors, own.astype(jnp.int32), start, 2),
        written=jax.lax.dynamic_update_slice_in_dim(cache.written, holds, start, 1),
        slot_positions=jax.lax.dynamic_update_slice_in_dim(cache.slot_positions, positions, start, 1),
        next_position=cache.next_position + lengths,
        next_slot=start + num_new,
    )
    return cache, positions


def visible_past(cache: KVCache, positions: Int[Array, 'B T']) -> Mask:
    """What the newest rows may see. T is the number of new rows: W hypotheses with one each, or W = 1 with several."""
    batch, width, slots = cache.ancestors.shape
    hypothesis = jnp.arange(width)[None, None, None]
    allowed = (cache.ancestors[..., None] == hypothesis) & cache.written[:, None, :, None]  # B W L W'
    num_new = positions.shape[1]
    return Mask(
        q_segments=jnp.ones((batch, num_new), jnp.int32),
        k_segments=jnp.repeat(cache.written, width, axis=1).astype(jnp.int32),
        q_positions=positions,
        k_positions=jnp.repeat(cache.slot_positions, width, axis=1),
        allowed=jnp.broadcast_to(allowed.reshape(batch, width, slots * width), (batch, num_new, slots * width)),
        causal=True,
    )


def write(stored: Float[Array, 'B WL N H'], new: Float[Array, 'B T N H'], first_slot: Array, width: int) -> Array:
    """Puts the new rows, W a slot, behind `first_slot` slots."""
    return jax.lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), first_slot * width, axis=1)


def broadcast(cache: KVCache, width: int) -> KVCache:
    """From one hypothesis a sentence to `width` equal ones: all continue hypothesis 0."""
    if cache.num_hypotheses != 1:
        raise ValueError(f'a cache of {cache.num_hypotheses} hypotheses a sentence is broadcast already')

    def spread(stored: Array) -> Array:
        batch, slots, *rest = stored.shape
        padding = [(0, 0), (0, 0), (0, width - 1)] + [(0, 0)] * len(rest)
        return jnp.pad(stored[:, :, None], padding).reshape(batch, slots * width, *rest)

    return dataclasses.replace(
        cache,
        keys=tuple(map(spread, cache.keys)),
        values=tuple(map(spread, cache.values)),
        ancestors=jnp.broadcast_to(cache.ancestors, (cache.ancestors.shape[0], width, cache.num_slots)),
    )


def reorder(cache: KVCache, parents: Int[Array, 'B W']) -> KVCache:
    """Hypothesis w continues what hypothesis `parents[b, w]` was: only the table of ancestors moves."""
    return dataclasses.replace(cache, ancestors=jnp.take_along_axis(cache.ancestors, parents[:, :, None], axis=1))


def grow(cache: KVCache, num_slots: int) -> KVCache:
    """The same past with room for `num_slots` slots."""
    more = num_slots - cache.num_slots
    if more < 0:
        raise ValueError(f'a cache of {cache.num_slots} slots cannot grow to {num_slots}')

    def lengthen(array: Array, axis: int, factor: int = 1) -> Array:
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, more * factor)
        return jnp.pad(array, padding)

    width = cache.num_hypotheses
    return dataclasses.replace(
        cache,
        keys=tuple(lengthen(k, 1, width) for k in cache.keys),
        values=tuple(lengthen(v, 1, width) for v in cache.values),
        ancestors=lengthen(cache.ancestors, 2),
        written=lengthen(cache.written, 1),
        slot_positions=lengthen(cache.slot_positions, 1),
    )
