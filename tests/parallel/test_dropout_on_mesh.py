"""Dropout of a generator that can't be split: each shard draws its own bits, and copies of a shard the same."""

from collections import defaultdict

import jax
import numpy as np
import pytest

from transformer_jax.config import MeshConfig
from transformer_jax.layers.dropout import dropout
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import constrain

SHAPE = (8, 6, 514)


@pytest.mark.parametrize(
    ('config', 'axes', 'parts'),
    [
        (MeshConfig(fsdp=2, model=2), ('batch', 'length'), 4),
        (MeshConfig(fsdp=2, model=2), ('batch', 'length', 'mlp'), 8),
        (MeshConfig(data=2, model=2, sequence=2), ('batch', 'length', 'mlp'), 8),
        (MeshConfig(data=1, model=2, sequence=4), ('batch', 'length', None), 1),  # 4 does not divide 6
    ],
)
def test_shards_draw_their_own_and_copies_draw_alike(config: MeshConfig, axes: tuple, parts: int) -> None:
    mesh = make_mesh(config, jax.devices())
    whole = (*axes, None)[:3]

    @jax.jit
    def drop(x: jax.Array) -> jax.Array:
        return constrain(dropout(x, 0.4, jax.random.key(3, impl='rbg'), axes), *whole)

    with jax.set_mesh(mesh):
        dropped = drop(np.ones(SHAPE, np.float32))
    by_place = defaultdict(list)
    for shard in dropped.addressable_shards:
        by_place[str(shard.index)].append(np.asarray(shard.data))
    assert len(by_place) == parts
    for first, *copies in by_place.values():
        for copy in copies:
            np.testing.assert_array_equal(copy, first)
    kept = [shards[0] != 0 for shards in by_place.values()]
    for index, one in enumerate(kept):
        assert one.mean() == pytest.approx(0.6, abs=5.5 * (0.24 / one.size) ** 0.5)
        for other in kept[:index]:  # they agree by chance alone
            assert (one == other).mean() == pytest.approx(0.52, abs=5.5 * (0.25 / one.size) ** 0.5)
