"""What a decode keeps of the target read so far, for a beam of hypotheses that share ancestors."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.shapes import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Past:
    """Which slots hold what W hypotheses a sentence have read, L slots each: the same for every layer.

    A beam search lets hypothesis w continue another one, w'. The keys and values stay where they were written and only
    `ancestors` is permuted: `ancestors[b, w, s]` names the hypothesis whose slot s belongs to w's past. A query attends
    to the W * L slots of its sentence with all but its own ancestors hidden, so that a step moves no keys or values.
    """

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


class Reading(NamedTuple):
    """The new rows that a step or a prefill reads: T = W hypotheses with one each, or W = 1 with several."""

    positions: Int[Array, 'B T']
    holds: Bool[Array, 'B P']  # which of each hypothesis's P new slots hold a token
    mask: Mask  # what each new row may see of the slots, its own included
    first_slot: Int[Array, '']
    num_hypotheses: int

    def by_hypothesis(self, rows: Float[Array, 'B T ...']) -> Float[Array, 'BW P ...']:
        """The new rows of each hypothesis as a sequence of its own."""
        width = self.num_hypotheses
        return rows.reshape(rows.shape[0] * width, rows.shape[1] // width, *rows.shape[2:])

    def holds_by_hypothesis(self) -> Bool[Array, 'BW P']:
        """Which of those hold a token."""
        return jnp.repeat(self.holds, self.num_hypotheses, axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValues:
    """One layer's keys and values: W * L slots a sentence, slot-major: index s * W + w."""

    keys: Float[Array, 'B WL K H']
    values: Float[Array, 'B WL K U']

    def write(self, k: Float[Array, 'B T K H'], v: Float[Array, 'B T K U'], reading: Reading) -> 'KeyValues':
        """Puts the new rows into their slots, and zeros where they hold no token."""
        first = reading.first_slot * reading.num_hypotheses
        holds = jnp.broadcast_to(reading.holds, k.shape[:2])[:, :, None, None]

        def put(stored: Array, new: Array) -> Array:
            new = jnp.where(holds, new, 0)
            return jax.lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), first, axis=1)

        return KeyValues(put(self.keys, k), put(self.values, v))

    def broadcast(self, width: int) -> 'KeyValues':
        """Room for `width` hypotheses; what is there is hypothesis 0's."""

        def spread(stored: Array) -> Array:
            batch, slots, *rest = stored.shape
            padding = [(0, 0), (0, 0), (0, width - 1)] + [(0, 0)] * len(rest)
            return jnp.pad(stored[:, :, None], padding).reshape(batch, slots * width, *rest)

        return jax.tree.map(spread, self)

    def reorder(self, parents: Int[Array, 'B W']) -> 'KeyValues':
        """Nothing moves: the table of ancestors says whose slots are whose."""
        return self

    def grow(self, more: int, width: int) -> 'KeyValues':
        """Room for `more` slots behind those there are."""
        return jax.tree.map(lambda stored: _lengthen(stored, 1, more * width), self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningState:
    """One layer's state of constant size: `[B, W, ...]` leaves that belong to a hypothesis each."""

    leaves: Any

    @staticmethod
    def of(one_a_sentence: Any) -> 'RunningState':
        """From leaves `[B, ...]`, W = 1."""
        return RunningState(jax.tree.map(lambda leaf: leaf[:, None], one_a_sentence))

    def flat(self) -> Any:
        """Leaves `[B * W, ...]`: each hypothesis a sequence of its own."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self.leaves)

    def renew(self, flat: Any) -> 'RunningState':
        """The same shape with new contents, as `flat` gives them."""
        return RunningState(jax.tree.map(lambda old, new: new.astype(old.dtype).reshape(old.shape), self.leaves, flat))

    def broadcast(self, width: int) -> 'RunningState':
        """`width` equal hypotheses."""
        return RunningState(jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=1), self.leaves))

    def reorder(self, parents: Int[Array, 'B W']) -> 'RunningState':
        """Hypothesis w takes the state of hypothesis `parents[b, w]`."""
        rows = jnp.arange(parents.shape[0])[:, None]
        return RunningState(jax.tree.map(lambda leaf: leaf[rows, parents], self.leaves))

    def grow(self, more: int, width: int) -> 'RunningState':
        """The size does not depend on the number of slots."""
        return self


LayerState = KeyValues | RunningState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All that depends on the hypotheses: the past, and each layer's share of it."""

    past: Past
    layers: tuple[LayerState, ...]


def empty_key_values(
    batch: int, num_slots: int, num_heads: int, head_dim: int, value_dim: int, dtype: jnp.dtype
) -> KeyValues:
    """One layer that has read nothing, W = 1."""
    return KeyValues(
        jnp.zeros((batch, num_slots, num_heads, head_dim), dtype),
        jnp.zeros((batch, num_slots, num_heads, value_dim), dtype),
    )


def empty_past(batch: int, num_slots: int) -> Past:
    """Nothing read, W = 1."""
    return Past(
        ancestors=jnp.zeros((batch, 1, num_slots), jnp.int32),
        written=jnp.zeros((batch, num_slots), bool),
        slot_positions=jnp.zeros((batch, num_slots), jnp.int32),
        next_position=jnp.zeros((batch,), jnp.int32),
        next_slot=jnp.zeros((), jnp.int32),
    )


def read(
    past: Past, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, max_length: int
) -> tuple[Past, Reading]:
    """Takes the next `num_new` slots of each hypothesis for these tokens: row b's first `lengths[b]` hold tokens.

    Only rows of sentences that have ended ever ask for positions from `max_length` on; they get the last one.
    """
    offsets = jnp.arange(num_new, dtype=jnp.int32)[None]
    new_positions = past.next_position[:, None] + offsets
    holds = offsets < lengths[:, None]
    own = jnp.broadcast_to(jnp.arange(past.num_hypotheses)[None, :, None], (*past.ancestors.shape[:2], num_new))
    start = past.next_slot
    past = dataclasses.replace(
        past,
        ancestors=jax.lax.dynamic_update_slice_in_dim(past.ancestors, own.astype(jnp.int32), start, 2),
        written=jax.lax.dynamic_update_slice_in_dim(past.written, holds, start, 1),
        slot_positions=jax.lax.dynamic_update_slice_in_dim(past.slot_positions, new_positions, start, 1),
        next_position=past.next_position + lengths,
        next_slot=start + num_new,
    )
    positions = jnp.minimum(jnp.broadcast_to(new_positions, tokens.shape), max_length - 1)
    return past, Reading(positions, holds, _visible_past(past, positions), start, past.num_hypotheses)


def _visible_past(past: Past, positions: Int[Array, 'B T']) -> Mask:
    """What the newest rows may see. T is the number of new rows: W hypotheses with one each, or W = 1 with several."""
    batch, width, slots = past.ancestors.shape
    hypothesis = jnp.arange(width)[None, None, None]
    allowed = (past.ancestors[..., None] == hypothesis) & past.written[:, None, :, None]  # B W L W'
    num_new = positions.shape[1]
    return Mask(
        q_segments=jnp.ones((batch, num_new), jnp.int32),
        k_segments=jnp.repeat(past.written, width, axis=1).astype(jnp.int32),
        q_positions=positions,
        k_positions=jnp.repeat(past.slot_positions, width, axis=1),
        allowed=jnp.broadcast_to(allowed.reshape(batch, width, slots * width), (batch, num_new, slots * width)),
        causal=True,
    )


def broadcast(state: DecodeState, width: int) -> DecodeState:
    """From one hypothesis a sentence to `width` equal ones: all continue hypothesis 0."""
    past = state.past
    if past.num_hypotheses != 1:
        raise ValueError(f'a cache of {past.num_hypotheses} hypotheses a sentence is broadcast already')
    ancestors = jnp.broadcast_to(past.ancestors, (past.ancestors.shape[0], width, past.num_slots))
    return DecodeState(
        dataclasses.replace(past, ancestors=ancestors), tuple(layer.broadcast(width) for layer in state.layers)
    )


def reorder(state: DecodeState, parents: Int[Array, 'B W']) -> DecodeState:
    """Hypothesis w continues what hypothesis `parents[b, w]` was: the table of ancestors and running states move."""
    past = state.past
    ancestors = jnp.take_along_axis(past.ancestors, parents[:, :, None], axis=1)
    return DecodeState(
        dataclasses.replace(past, ancestors=ancestors), tuple(layer.reorder(parents) for layer in state.layers)
    )


def grow(state: DecodeState, num_slots: int) -> DecodeState:
    """The same past with room for `num_slots` slots."""
    past = state.past
    more = num_slots - past.num_slots
    if more < 0:
        raise ValueError(f'a cache of {past.num_slots} slots cannot grow to {num_slots}')
    past = dataclasses.replace(
        past,
        ancestors=_lengthen(past.ancestors, 2, more),
        written=_lengthen(past.written, 1, more),
        slot_positions=_lengthen(past.slot_positions, 1, more),
    )
    return DecodeState(past, tuple(layer.grow(more, past.num_hypotheses) for layer in state.layers))


def _lengthen(array: Array, axis: int, more: int) -> Array:
    padding: Sequence[tuple[int, int]] = [(0, more if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, padding)
