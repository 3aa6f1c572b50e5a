"""Attention's programs compiled ahead of time for TPUs that this machine has not; needs libtpu (the extra `tpu`)."""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.pallas import PALLAS
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'),
]
VARIANTS = {'dense': DENSE, 'blockwise': BLOCKWISE, 'pallas': PALLAS}
BATCH, LENGTH, HEADS, WIDTH = 4, 2048, 8, 64  # base, at a long text


@functools.cache
def make_mesh(topology: str, num_devices: int) -> Mesh:
    devices = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    return Mesh(np.array(devices[:num_devices]), ('data',), axis_types=(AxisType.Auto,))


@functools.cache
def compile_attention(name: str, topology: str, *, causal: bool, backward: bool, num_devices: int = 1) -> Any:
    mesh = make_mesh(topology, num_devices)
    rows = NamedSharding(mesh, PartitionSpec('data'))
    heads = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, WIDTH), jnp.bfloat16, sharding=rows)
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=rows)

    def attend(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> Any:
        mask = Mask(segments, segments, positions, positions, causal=causal, aligned=True)
        return VARIANTS[name].function(q, k, v, mask, Options(AttentionConfig(), scale=WIDTH**-0.5))[0]

    def loss(*arrays: Any) -> Any:
        return attend(*arrays).astype(jnp.float32).sum()

    program = jax.grad(loss, argnums=(0, 1, 2)) if backward else attend
    with jax.set_mesh(mesh):
        return jax.jit(program).lower(heads, heads, heads, ids, ids).compile()


@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize('backward', [False, True])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('name', ['blockwise', 'pallas'])
def test_memory_beside_dense(name: str, topology: str, causal: bool, backward: bool) -> None:
    ours, dense = (
        compile_attention(one, topology, causal=causal, backward=backward).memory_analysis().temp_size_in_bytes
        for one in (name, 'dense')
    )
    assert ours <= dense / 10


@pytest.mark.parametrize('name', ['blockwise', 'pallas'])
def test_rows_lie_over_four_chips_without_a_collective(name: str) -> None:
    program = compile_attention(name, 'v5e:2x2', causal=True, backward=True, num_devices=4).as_text()
    for collective in ('all-reduce', 'all-gather', 'all-to-all', 'collective-permute', 'reduce-scatter'):
        assert f' {collective}(' not in program
        assert f' {collective}-start(' not in program


def test_pallas_is_a_kernel_there() -> None:
    assert compile_attention('pallas', 'v5e:2x2', causal=True, backward=False).as_text().count('tpu_custom_call') == 1
