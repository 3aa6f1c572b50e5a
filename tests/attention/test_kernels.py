"""The fused implementations against float64 loops: our GPU kernels and the shipped TPU kernels interpreted on CPU, and
cuDNN's call by what it asks of `jax.nn.dot_product_attention`, computed by XLA.
"""  # fmt: skip

import contextlib
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import oracles
from tests.attention import exact_cases as cases
from transformer_jax.attention import VARIANTS, variant
from transformer_jax.attention.cudnn import CUDNN, attend
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.pallas import PALLAS, by_rows, fits_rows, splash
from transformer_jax.attention.preference import order_of_preference
from transformer_jax.attention.variant import Options, Use
from transformer_jax.config import AttentionConfig
from transformer_jax.positions.alibi import AlibiTerms

pallas = PALLAS.function


def interpreted_splash(q: Any, k: Any, v: Any, mask: Mask, options: Options) -> tuple[jax.Array, None]:
    """What `pallas_attention` hands to the TPU kernels."""
    left, right = mask.window or (None, None)
    segments = mask.q_segments, jnp.where(mask.k_segments > 0, mask.k_segments, -1)
    reach = left, 0 if mask.causal else right
    return splash(q, k, v, *segments, reach=reach, options=options, interpret=True), None


def interpreted_rows(q: Any, k: Any, v: Any, mask: Mask, options: Options) -> tuple[jax.Array, None]:
    """What `pallas_attention` hands to our own TPU kernels; slots that meet nothing count as padding."""
    assert fits_rows(q, k, v)
    seen = mask.materialize()
    segments = jnp.where(seen.any(2), mask.q_segments, 0), jnp.where(seen.any(1), mask.k_segments, -1)
    left, right = mask.window or (None, None)
    reach = left, 0 if mask.causal else right
    options = options._replace(scale=q.shape[-1] ** -0.5)
    return by_rows(q, k, v, *segments, reach=reach, options=options, interpret=True), None


def fill_lanes(arrays: dict[str, np.ndarray], num_heads: int, width: int) -> dict[str, np.ndarray]:
    """Random arrays with heads that fill whole groups of 128 lanes, in the place of the oracle's small ones."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(*arrays[name].shape[:2], num_heads, width)) for name in arrays}


def cudnn_by_xla(q: Any, k: Any, v: Any, mask: Mask, options: Options) -> tuple[jax.Array, None]:
    return attend(q, k, v, mask, options, 'xla'), None


def without_bias(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name != 'bias'}


@pytest.mark.parametrize('name', cases.COMMON)
def test_gpu_kernels_equal_the_loops(name: str) -> None:
    mask = cases.COMMON[name]()
    arrays, seen = without_bias(cases.make_arrays(mask)), cases.visible(mask)
    cases.assert_equal_loops(cases.compute(pallas, mask, arrays, block_size=16), arrays, seen)


@pytest.mark.parametrize('name', cases.COMMON)
def test_tpu_kernels_equal_the_loops(name: str) -> None:
    """Lengths are padded to 128 there, so rows of T and S are far from whole."""
    mask = cases.COMMON[name]()
    arrays, seen = without_bias(cases.make_arrays(mask)), cases.visible(mask)
    cases.assert_equal_loops(cases.compute(interpreted_splash, mask, arrays), arrays, seen)


@pytest.mark.parametrize(
    ('name', 'num_heads', 'width'),
    [('causal packed', 4, 64), ('cross padded', 4, 32), ('window', 1, 128),
     ('causal window', 2, 64), ('self all', 1, 256)],
)  # fmt: skip
def test_tpu_kernels_of_short_rows_equal_the_loops(name: str, num_heads: int, width: int) -> None:
    """Whatever stands where nobody looks."""
    mask = cases.COMMON[name]()
    arrays, seen = fill_lanes(without_bias(cases.make_arrays(mask)), num_heads, width), cases.visible(mask)
    computed = cases.compute(interpreted_rows, mask, cases.dirty(mask, seen, arrays, float('nan')))
    cases.assert_equal_loops(computed, arrays, seen)


def test_which_rows_fit_the_kernels() -> None:
    def fits(length: int, num_heads: int, width: int, num_kv_heads: int | None = None) -> bool:
        x = jnp.zeros((1, length, num_heads, width))
        return fits_rows(x, k := jnp.zeros((1, length, num_kv_heads or num_heads, width)), k)

    assert fits(512, 8, 64)
    assert fits(48, 16, 64)
    assert fits(128, 3, 128)
    assert fits(7, 4, 32)
    assert not fits(513, 8, 64)  # too long
    assert not fits(128, 3, 64)
    assert not fits(128, 8, 48)
    assert not fits(128, 8, 64, 2)


@pytest.mark.parametrize('name', [*cases.COMMON, *cases.FURTHER])
def test_cudnn_is_asked_for_what_the_loops_compute(name: str) -> None:
    mask = (cases.COMMON | cases.FURTHER)[name]()
    arrays, seen = cases.make_arrays(mask, value_width=cases.H), cases.visible(mask)
    cases.assert_equal_loops(cases.compute(cudnn_by_xla, mask, arrays), arrays, seen)


@pytest.mark.parametrize('shape', [(cases.B, 1, 1, cases.S), (1, cases.N, 1, cases.S), (1, 1, cases.T, cases.S)])
def test_cudnn_takes_a_bias_that_is_to_be_broadcast(shape: tuple[int, ...]) -> None:
    mask = cases.cross_mask('packed')
    arrays, bias = cases.make_arrays(mask, value_width=cases.H), np.random.default_rng(3).normal(size=shape)
    whole = np.broadcast_to(bias, (cases.B, cases.N, cases.T, cases.S))
    ours, expected = (cases.compute(cudnn_by_xla, mask, arrays | {'bias': one}) for one in (bias, whole))
    oracles.assert_close(ours.output, expected.output, 1e-6)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    oracles.assert_close(ours.gradients['bias'], expected.gradients['bias'].sum(axes, keepdims=True), 1e-5)


@pytest.mark.parametrize('function', [pallas, interpreted_splash, cudnn_by_xla])
def test_bfloat16_stays_near(function: Any) -> None:
    mask = cases.self_mask('padded', causal=True, aligned=True)
    arrays = without_bias(cases.make_arrays(mask, value_width=cases.H))
    computed = cases.compute(function, mask, arrays, jnp.bfloat16)
    assert {x.dtype for x in (computed.output, *computed.gradients.values())} == {jnp.dtype('bfloat16')}
    cases.assert_equal_loops(computed, arrays, cases.visible(mask), 2e-2)


@pytest.mark.parametrize('function', [pallas, cudnn_by_xla])
@pytest.mark.parametrize('name', ['cross packed', 'causal left-padded'])
def test_what_nobody_looks_at_never_leaks(function: Any, name: str) -> None:
    mask = cases.COMMON[name]()
    arrays, seen = without_bias(cases.make_arrays(mask, value_width=cases.H)), cases.visible(mask)
    clean = cases.compute(function, mask, arrays)
    for poison in (math.nan, 1e30):
        poisoned = cases.compute(function, mask, cases.dirty(mask, seen, arrays, poison))
        jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.parametrize('length', [1, 63, 64, 65, 127, 128, 192, 320])
def test_lengths_around_whole_tiles_with_padding(length: int) -> None:
    segments = jnp.asarray((np.arange(length) < max(1, length - 3)).astype(np.int32))[None]
    positions = jnp.arange(length)[None]
    mask = Mask(segments, segments, positions, positions, causal=True, window=(40, 0), aligned=True)
    arrays = without_bias(cases.make_arrays(mask, num_kv_heads=1))
    computed = cases.compute(pallas, mask, arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(computed))
    if 63 <= length <= 65:  # one key alone has no gradient to compare; beyond, the loops would take long
        cases.assert_equal_loops(computed, arrays, cases.visible(mask))


def test_kernels_run_on_each_shard_of_the_batch() -> None:
    mask = jax.tree.map(lambda x: jnp.concatenate([x] * 4), cases.self_mask('packed', causal=True, aligned=True))
    arrays = without_bias(cases.make_arrays(mask))
    expected = cases.compute(pallas, mask, arrays, block_size=16)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        rows = jax.device_put((mask, arrays), jax.NamedSharding(mesh, jax.P('data')))
        ours = cases.compute(pallas, *rows, block_size=16)
        probe = rows[1].pop('d_output')
        program = cases.run.lower(pallas, AttentionConfig(block_size=16), rows[1], rows[0], probe).compile()
    assert len(ours.output.sharding.device_set) == 8
    assert 'all-gather' not in program.as_text()
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        oracles.assert_close(one, np.asarray(other), 1e-6)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_the_product_that_follows_is_taken_along(num_devices: int) -> None:
    mask = jax.tree.map(lambda x: jnp.concatenate([x] * 4), cases.self_mask('packed', causal=True, aligned=True))
    arrays = cases.make_arrays(mask)
    q, k, v = (jnp.float32(arrays[name]) for name in ('q', 'k', 'v'))
    num_rows = q.shape[2] * v.shape[3]
    matrix = jnp.float32(np.random.default_rng(1).normal(size=(num_rows, 11)))
    options = Options(AttentionConfig(block_size=16), 0.3)
    expected = pallas(q, k, v, mask, options)[0].reshape(*q.shape[:2], num_rows) @ matrix

    def run(*arrays: jax.Array) -> jax.Array:
        return pallas(*arrays, mask, options._replace(projection=matrix))[0]

    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh) if num_devices > 1 else contextlib.nullcontext():
        oracles.assert_close(jax.jit(run)(q, k, v), np.asarray(expected), 1e-6)


def test_a_block_beyond_reach_is_not_visited() -> None:
    """NaN in keys and values that no query reaches by index, and that nothing empties beforehand."""
    from transformer_jax.attention.pallas_gpu import Kernel, flash_attention

    ones = jnp.ones((1, 64), jnp.int32)
    x = jnp.ones((1, 64, 1, 16))
    kernel = Kernel(1.0, (8, 0), 16, 16, interpret=True)
    early, late = x.at[:, :16].set(jnp.nan), x.at[:, 48:].set(jnp.nan)
    assert np.isfinite(flash_attention(kernel, x, early, early, ones, ones)[:, 32:]).all()
    assert np.isfinite(flash_attention(kernel, x, late, late, ones, ones)[:, :48]).all()


def make_use(**changes: Any) -> Use:
    config = AttentionConfig(**{name: changes.pop(name) for name in list(changes) if hasattr(AttentionConfig, name)})
    use = Use(
        name='decoder_self', config=config, causal=True, cross=False, packed=False, terms=False,
        compute_dtype='bfloat16', platform='gpu', decodes=True, max_length=2048,
    )  # fmt: skip
    return use._replace(**changes)


@pytest.mark.parametrize(
    'changes, reason',
    [
        ({'platform': 'cpu'}, "not on cpu; impl='blockwise'"),
        ({'compute_dtype': 'float32'}, "set compute_dtype='bfloat16' or impl='blockwise'"),
        ({'value_dim': 32}, "they are 32 and 64; set value_dim=None or impl='blockwise'"),
        ({'head_dim': 60}, "multiple of 8, and it is 60; impl='blockwise'"),
        ({'head_dim': 136}, 'at most 128'),
    ],
)
def test_cudnn_says_what_would_work(changes: dict[str, Any], reason: str) -> None:
    assert CUDNN.check is not None
    assert CUDNN.check(make_use()) is None
    assert reason in (CUDNN.check(make_use(**changes)) or '')


def test_pallas_says_what_would_work() -> None:
    assert PALLAS.check is not None
    assert PALLAS.check(make_use(block_size=64)) is None
    assert "impl='blockwise'" in (PALLAS.check(make_use(platform='cpu')) or '')
    assert 'must be 16, 32, 64 or 128' in (PALLAS.check(make_use(block_size=48)) or '')
    assert 'multiple of 128' in (PALLAS.check(make_use(platform='tpu', block_size=64)) or '')


@pytest.mark.parametrize(
    'mask, settings, missing',
    [
        (cases.self_mask('all', causal=True), {}, 'not aligned'),
        (cases.self_mask('all', window=(1, 1), num_global=1, aligned=True), {}, 'globals'),
        (cases.self_mask('all', causal=True, prefix=True, aligned=True), {}, 'prefix'),
        (cases.self_mask('all'), {'return_weights': True}, 'weights'),
        (cases.self_mask('all'), {'dropout_rng': jax.random.key(0)}, 'dropout'),
    ],
)
def test_pallas_refuses_what_it_would_get_wrong(mask: Mask, settings: dict[str, Any], missing: str) -> None:
    x = jnp.zeros((cases.B, cases.T, 1, 16))
    with pytest.raises(ValueError, match=f"{missing}.*: impl='blockwise'"):
        pallas(x, x, x, mask, Options(AttentionConfig(), **settings))


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ({'return_weights': True}, "weights.*: impl='dense'"),
        ({'terms': AlibiTerms(1)}, "positions.*: impl='dense'"),
    ],
)
def test_cudnn_refuses_what_it_has_not(options: dict[str, Any], words: str) -> None:
    x = jnp.zeros((cases.B, cases.T, 1, 16))
    with pytest.raises(ValueError, match=words):
        attend(x, x, x, cases.self_mask('all'), Options(AttentionConfig(), **options), 'xla')


def test_the_best_comes_first_and_every_implementation_is_ranked() -> None:
    assert order_of_preference(make_use(platform='cpu', max_length=128))[0] == 'dense'
    assert order_of_preference(make_use(platform='cpu', max_length=4096))[0] == 'blockwise'
    assert order_of_preference(make_use(platform='gpu'))[0] == 'cudnn'
    assert order_of_preference(make_use(platform='tpu'))[0] == 'pallas'
    for platform in ('cpu', 'gpu', 'tpu'):
        order = order_of_preference(make_use(platform=platform))
        own = {impl: one for (kind, impl), one in VARIANTS.items() if kind == 'dot' and platform in one.supports}
        assert set(own) <= set(order)
        assert all(one.supports <= set(variant.FEATURES) for one in own.values())


def test_gpu_kernels_lower_without_a_gpu() -> None:
    """To Triton's language; what NVIDIA's compiler makes of it shows on a GPU alone."""
    if jax.__version_info__ < (0, 11):
        pytest.skip('jax 0.10 knows no GPU by name alone')
    device = jax.sharding.AbstractDevice(device_kind='NVIDIA H100 80GB HBM3', num_cores=None, platform='gpu')
    mask = cases.self_mask('packed', causal=True, window=(9, 0), aligned=True)
    arrays = {name: jnp.bfloat16(array) for name, array in without_bias(cases.make_arrays(mask)).items()}
    probe = arrays.pop('d_output')
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = cases.run.trace(pallas, AttentionConfig(), arrays, mask, probe)
        with pytest.warns(DeprecationWarning, match='Triton'):
            lowered = traced.lower(lowering_platforms=('cuda',))
    assert lowered.as_text().count('xla.gpu.triton') >= 3  # output, gradient of the queries, gradient of the keys


def test_importing_attention_loads_no_kernel() -> None:
    import subprocess

    code = 'import sys, transformer_jax.attention.pallas as _; print([m for m in sys.modules if "pallas.ops" in m])'
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == '[]'
