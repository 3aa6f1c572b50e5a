"""Attention round a ring of devices against float64 loops and against one device: values, gradients, memory."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.attention import exact_cases as cases
from transformer_jax.attention.block_pairs import Blocks, find_seen_pairs
from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.ring import num_sequence_shards
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

AXES = ('data', 'fsdp', 'model', 'sequence')
CASES = cases.COMMON | cases.FURTHER
FAST = ('causal left-padded', 'cross packed', 'globals', 'prefix and window')
blockwise = BLOCKWISE.function


def make_ring(*sizes: int, devices: Any = None) -> Mesh:
    """A mesh of `data`, `fsdp`, `model` and `sequence`."""
    devices = np.array((devices or jax.devices())[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize(
    'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_values_and_gradients_equal_the_loops(name: str) -> None:
    """Four devices and blocks of 3 divide neither length: shards are padded, and so are their blocks."""
    mask = CASES[name]()
    arrays = cases.make_arrays(mask)
    if not name.startswith(('cross', 'globals', 'key')):
        del arrays['bias']
    with jax.set_mesh(make_ring(1, 1, 1, 4)):
        computed = cases.compute(blockwise, mask, arrays, block_size=3)
    assert len(computed.output.sharding.device_set) == 4
    cases.assert_equal_loops(computed, arrays, cases.visible(mask))


def compute_with_everything(mask: Mask, dtype: Any, num_kv_heads: int, bias_shape: tuple[int, int]) -> Any:
    """Output and gradients with dropout, a bias and position terms on the current mesh, if any."""
    rng = np.random.default_rng(3)
    tables = {'keys': cases.H, 'values': cases.U, 'biases': cases.N}
    arrays = cases.make_arrays(mask, num_kv_heads=num_kv_heads)
    arrays |= {name: rng.normal(size=(7, width)) for name, width in tables.items()}
    arrays['bias'] = rng.normal(size=(*bias_shape, *arrays['bias'].shape[2:]))
    probe = jnp.float32(arrays.pop('d_output'))
    config = AttentionConfig(dropout_rate=0.3, block_size=5)

    def loss(arrays: dict[str, Any]) -> Any:
        terms = cases.ToyTerms(*(arrays[name] for name in tables), jnp.int32(3))
        key = jax.random.key(5, impl='threefry2x32')
        options = Options(config, scale=0.3, bias=arrays['bias'], terms=terms, dropout_rng=key)
        output = blockwise(arrays['q'], arrays['k'], arrays['v'], mask, options)[0]
        return (output.astype(jnp.float32) * probe).sum(), output

    return jax.jit(jax.grad(loss, has_aux=True))({name: jnp.asarray(x, dtype) for name, x in arrays.items()})


def assert_equal_one_device(mesh: Mesh, mask: Mask, *choices: Any, dtype: Any = jnp.float32) -> None:
    expected = compute_with_everything(mask, dtype, *choices)
    with jax.set_mesh(mesh):
        ours = compute_with_everything(mask, dtype, *choices)
    assert len(ours[1].sharding.device_set) == mesh.size
    limit = 5e-6 if dtype == jnp.float32 else 2e-2
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)


def test_a_mixed_mesh_changes_nothing() -> None:
    """Rows, heads and lengths split at once; the one key-value head is repeated; dropout, a bias and position terms."""
    assert_equal_one_device(make_ring(2, 1, 2, 2), CASES['causal packed'](), 1, (1, cases.N))


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(1, 1, 1, 8), (1, 2, 1, 4), (2, 2, 1, 2), (1, 1, 3, 2), (1, 1, 1, 2), (4, 1, 1, 2)])
@pytest.mark.parametrize('name', ['causal packed', 'cross padded', 'globals', 'key by key'])
def test_no_mesh_changes_anything(sizes: tuple[int, ...], name: str) -> None:
    """Two rows over four shards of rows are padded, too."""
    bias_shape = (cases.B, 1) if name == 'cross padded' else (1, cases.N)
    assert_equal_one_device(make_ring(*sizes), CASES[name](), cases.K, bias_shape)


@pytest.mark.slow
def test_bfloat16_stays_near() -> None:
    assert_equal_one_device(make_ring(1, 1, 1, 4), CASES['cross padded'](), cases.K, (1, cases.N), dtype=jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cross packed', 'causal left-padded', 'globals'])
def test_what_nobody_looks_at_never_leaks(name: str) -> None:
    mask = CASES[name]()
    arrays, seen = cases.make_arrays(mask), cases.visible(mask)
    with jax.set_mesh(make_ring(1, 1, 1, 4)):
        clean = cases.compute(blockwise, mask, arrays, block_size=3)
        for poison in (math.nan, math.inf, 1e30):
            poisoned = cases.compute(blockwise, mask, cases.dirty(mask, seen, arrays, poison), block_size=3)
            jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


def test_whole_hops_that_a_mask_empties_run_nothing() -> None:
    """Shards of 6 of causal rows of 24 and 17; then a window that reaches one shard back."""
    segments = jnp.asarray([[1] * 24, [1] * 17 + [0] * 7])
    positions = jnp.asarray([range(24)] * 2)
    mask = Mask(segments, segments, positions, positions, causal=True)

    def hops(mask: Mask) -> list[list[bool]]:
        def count(q: int, k: int) -> int:
            return find_seen_pairs(mask.block(6 * q, 6, 6 * k, 6), Blocks(6, 6)).count

        return [[bool(count(q, k)) for k in range(4)] for q in range(4)]

    assert hops(mask) == np.tri(4, dtype=bool).tolist()
    near = np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool)
    assert hops(dataclasses.replace(mask, window=(4, 0))) == near.tolist()


def test_heads_that_do_not_split_are_refused_with_what_fits() -> None:
    x, ones = jnp.zeros((1, 4, 6, 8)), jnp.ones((1, 4), jnp.int32)
    with jax.set_mesh(make_ring(1, 1, 4, 2)), pytest.raises(ValueError, match=r'6 heads.*4 ways.*1 or 2 ways fit'):
        blockwise(x, x, x, Mask(ones, ones, ones, ones), Options(AttentionConfig()))


def test_without_a_split_length_there_is_no_ring() -> None:
    assert num_sequence_shards() == 1
    with jax.set_mesh(make_ring(4, 2, 1, 1)):
        assert num_sequence_shards() == 1
    with jax.set_mesh(make_ring(1, 1, 2, 4)):
        assert num_sequence_shards() == 4


def make_program(mesh: Mesh, length: int, dtype: Any, *, gradients: bool) -> Any:
    """Attention of one row of 8 heads of width 64, compiled and not run; arguments and results lie over the mesh."""
    where = NamedSharding(mesh, PartitionSpec(None, 'sequence'))
    heads = jax.ShapeDtypeStruct((1, length, 8, 64), dtype, sharding=where)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=where)

    def attend(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> Any:
        mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
        return blockwise(q, k, v, mask, Options(AttentionConfig(), scale=0.125))[0]

    def with_gradients(q: Any, k: Any, v: Any, segments: Any, positions: Any, d_output: Any) -> Any:
        output, pull = jax.vjp(lambda *arrays: attend(*arrays, segments, positions), q, k, v)
        return output, *pull(d_output)

    with jax.set_mesh(mesh):
        if gradients:
            program = jax.jit(with_gradients, out_shardings=where).lower(heads, heads, heads, ids, ids, heads)
        else:
            program = jax.jit(attend, out_shardings=where).lower(heads, heads, heads, ids, ids)
        return program.compile()


def memory(program: Any) -> tuple[int, int]:
    """Bytes a device: temporary ones, and with arguments and results."""
    sizes = program.memory_analysis()
    temporary = sizes.temp_size_in_bytes
    return temporary, temporary + sizes.argument_size_in_bytes + sizes.output_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize('gradients', [False, True])
def test_eight_devices_need_a_sixth_of_the_memory_each(gradients: bool) -> None:
    one, ring = (
        memory(make_program(make_ring(1, 1, 1, ways), 2**15, jnp.float32, gradients=gradients)) for ways in (1, 8)
    )
    assert ring[0] <= one[0] / 6
    assert ring[1] <= one[1] / 6


@pytest.mark.slow
def test_twice_the_length_on_twice_the_devices_needs_no_more_memory() -> None:
    sizes = [
        memory(make_program(make_ring(1, 1, 1, ways), 2**11 * ways, jnp.float32, gradients=True))[1]
        for ways in (2, 4, 8)
    ]
    assert max(sizes) <= 1.05 * min(sizes)


@pytest.mark.slow
def test_the_ring_compiles_for_tpu() -> None:
    pytest.importorskip('libtpu')
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4')
    ring = make_program(make_ring(1, 1, 1, 8, devices=list(topology.devices)), 2**15, jnp.bfloat16, gradients=True)
    one = make_program(make_ring(1, 1, 1, 1, devices=list(topology.devices)), 2**15, jnp.bfloat16, gradients=True)
    sent = re.findall(r'collective-permute(?:-start)?\(', ring.as_text())
    assert len(sent) >= 6  # keys and values of the forward pass, and with their gradients of the backward pass
    assert memory(ring)[1] <= memory(one)[1] / 6
