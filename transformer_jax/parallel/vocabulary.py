"""The vocabulary split over the mesh axis `model`: each device has some of its rows, and nobody gathers them all.

The width of a table is split over `fsdp`; only that is ever made whole.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer_jax.parallel.mesh import FSDP, MODEL, ROWS, SEQUENCE, num_data_shards
from transformer_jax.parallel.rules import ambient_mesh
from transformer_jax.shapes import Array, Bool, Float, Int


def look_up(table: Float[Array, 'V D'], ids: Int[Array, 'B T'], dtype: jnp.dtype) -> Float[Array, 'B T D']:
    """The rows of a table at these ids, which must lie in it.

    On a mesh every device looks up, in its own slice of the table, the ids of all devices that split the width with
    it; then rows cross `model` as a sum and change from split widths to split batches. The table stays where it is, and
    so does its gradient.
    """
    mesh = ambient_mesh()
    if mesh is None or ids.shape[0] % num_data_shards(mesh):  # the rows of a decode, which the compiler lays out
        return table.at[ids].get(mode='promise_in_bounds').astype(dtype)

    def by_shard(table: Array, ids: Array) -> Array:
        ids = jax.lax.all_gather(ids, FSDP, axis=0, tiled=True)
        own = ids - jax.lax.axis_index(MODEL) * table.shape[0]
        is_own = (own >= 0) & (own < table.shape[0])
        found = table.at[jnp.where(is_own, own, 0)].get(mode='promise_in_bounds').astype(dtype)
        found = jax.lax.psum(jnp.where(is_own[..., None], found, 0), MODEL)
        return jax.lax.all_to_all(found, FSDP, split_axis=0, concat_axis=2, tiled=True)

    length = None if ids.shape[1] % mesh.shape[SEQUENCE] else SEQUENCE
    return jax.shard_map(
        by_shard, in_specs=(P(MODEL, FSDP), P(ROWS, length)), out_specs=P(ROWS, length, None)
    )(table, ids)  # fmt: skip


class VocabularySlice(NamedTuple):
    """The rows of a table `[V, D]` that one device projects onto, and how what devices find becomes one result.

    The methods that cross devices are to be called inside `shard_map`; of the whole vocabulary they change nothing.
    """

    num_rows: int  # of this device
    vocab_size: int  # of all; rows behind are padding
    is_split: bool = False

    def entries(self) -> Int[Array, 'V']:
        """The ids of the rows."""
        first = jax.lax.axis_index(MODEL) * self.num_rows if self.is_split else 0
        return first + jnp.arange(self.num_rows)

    def is_entry(self) -> Bool[Array, 'V']:
        """Which rows are not padding."""
        return self.entries() < self.vocab_size

    def pick(self, logits: Float[Array, 'x V'], ids: Int[Array, 'x']) -> Float[Array, 'x']:
        """The logit of each id on the device that has its row, 0 on others."""
        row, is_own = self.locate(ids)
        return jnp.where(is_own, jnp.take_along_axis(logits, row[:, None], axis=1)[:, 0], 0)

    def locate(self, ids: Int[Array, 'x']) -> tuple[Int[Array, 'x'], Bool[Array, 'x']]:
        """The row of each id on this device, and whether it has it (where not, the row is any other)."""
        if not self.is_split:
            return ids, jnp.ones(ids.shape, bool)
        own = ids - jax.lax.axis_index(MODEL) * self.num_rows
        return jnp.clip(own, 0, self.num_rows - 1), (own >= 0) & (own < self.num_rows)

    def sum(self, partial: Array) -> Array:
        """Of the devices' parts."""
        return jax.lax.psum(partial, MODEL) if self.is_split else partial

    def max(self, partial: Array) -> Array:
        """Of the devices' parts."""
        return jax.lax.pmax(partial, MODEL) if self.is_split else partial

    def once(self, whole: Array) -> Array:
        """What all devices know, as parts that sum to it: on the first device alone."""
        return jnp.where(jax.lax.axis_index(MODEL) == 0, whole, 0) if self.is_split else whole

    def gather_width(self, table: Float[Array, 'V d']) -> Float[Array, 'V D']:
        """The rows in full width."""
        return jax.lax.all_gather(table, FSDP, axis=1, tiled=True) if self.is_split else table

    def scatter_width(self, table: Float[Array, 'V D']) -> Float[Array, 'V d']:
        """The sum over the devices that split the width, to each its own part."""
        return jax.lax.psum_scatter(table, FSDP, scatter_dimension=1, tiled=True) if self.is_split else table
