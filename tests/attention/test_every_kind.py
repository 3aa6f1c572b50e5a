"""Every exact kind beside the dot product over every mask that it supports: values and gradients in float64's light.

The dot product's implementations are held against the same masks in `test_blockwise` and `test_kernels`, low-rank
attention, which sees all or nothing, in `test_low_rank`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import exact_cases as cases
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

MASKS = cases.COMMON | cases.FURTHER
KEYS = [key for key in VARIANTS if key[0] in ('additive', 'concat', 'general', 'linear')]
CONFIG = AttentionConfig(
    num_heads=cases.N, num_kv_heads=cases.K, head_dim=cases.H, value_dim=cases.U, score_dim=11, block_size=7
)
QUICK = {('additive/blockwise', 'prefix and window'), ('general/blockwise', 'globals'), ('linear/chunked', 'causal'),
         ('concat/dense', 'cross padded')}  # fmt: skip
QUICK_IN_BFLOAT16 = {('additive/blockwise', 'cross padded'), ('general/dense', 'causal packed'),
                     ('linear/chunked', 'causal packed'), ('concat/dense', 'cross padded')}  # fmt: skip


def supports(key: tuple[str, str], mask: Mask) -> bool:
    asked = {'window': mask.window is not None, 'globals': mask.num_global > 0, 'prefix': mask.k_prefix is not None}
    asked['weights'] = mask.allowed is not None  # key by key: what never holds a weight of a single key has none
    supported = VARIANTS[key].supports | ({'weights'} if key[0] != 'linear' else set())
    return all(feature in supported for feature, is_asked in asked.items() if is_asked)


def make_arrays(key: tuple[str, str], mask: Mask) -> dict[str, np.ndarray]:
    """The arrays of `cases` and the parameters of the kind; no bias where none is supported."""
    own, rng = VARIANTS[key].parameters, np.random.default_rng(11)
    drawn = {name: rng.normal(size=one.shape) * 0.7 for name, one in own(CONFIG, 32).items()} if own else {}
    arrays = cases.make_arrays(mask) | drawn
    return {name: array for name, array in arrays.items() if name != 'bias' or 'bias' in VARIANTS[key].supports}


def equation(kind: str, a: dict[str, Any], seen: Any) -> Any:
    """The output by the kind's equation, whole matrices, heads not grouped."""
    groups = cases.N // cases.K
    q, k, v = a['q'], jnp.repeat(a['k'], groups, axis=2), jnp.repeat(a['v'], groups, axis=2)
    if kind == 'linear':
        q, k = (jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))) for x in (q, k))
        powers = jnp.einsum('BTNH,BSNH->BNTS', q, k)
    else:
        if kind == 'general':
            scores = jnp.einsum('BTNH,NHG,BSNG->BNTS', q, a['query_map'], k) / math.sqrt(cases.H)
        else:
            joint = a['joint_map'] if kind == 'concat' else None
            of_q = a['query_map'] if joint is None else joint[:, : cases.H]
            of_k = jnp.repeat(a['key_map'], groups, axis=0) if joint is None else joint[:, cases.H :]
            left, right = jnp.einsum('BTNH,NHA->BTNA', q, of_q), jnp.einsum('BSNH,NHA->BSNA', k, of_k)
            scores = jnp.einsum('BTSNA,NA->BNTS', jnp.tanh(left[:, :, None] + right[:, None]), a['score'])
        scores += a['bias']
        powers = jnp.exp(scores - scores.max())
    powers *= seen[:, None]
    total = powers.sum(axis=-1, keepdims=True)
    return jnp.einsum('BNTS,BSNU->BTNU', powers / jnp.where(total == 0, 1, total), v)


@functools.partial(jax.jit, static_argnums=0, compiler_options={'xla_backend_optimization_level': 0})
def run(key: tuple[str, str], arrays: dict[str, Any], mask: Mask, probe: Any) -> Any:
    """Gradients and output."""

    def loss(arrays: dict[str, Any]) -> Any:
        options = Options(CONFIG, cases.H**-0.5, arrays, bias=arrays.get('bias'))
        output = VARIANTS[key].function(arrays['q'], arrays['k'], arrays['v'], mask, options)[0]
        return (output.astype(jnp.float32) * probe).sum(), output

    return jax.grad(loss, has_aux=True)(arrays)


def assert_equals_equation(key: tuple[str, str], name: str, dtype: Any, limit: float) -> None:
    mask = MASKS[name]()
    arrays, seen = make_arrays(key, mask), cases.visible(mask)
    probe = arrays.pop('d_output')
    gradients, output = run(key, {one: jnp.asarray(array, dtype) for one, array in arrays.items()}, mask, probe)
    with jax.enable_x64(True):

        def loss(arrays: dict[str, Any]) -> Any:
            found = equation(key[0], arrays, seen)
            return (found * probe).sum(), found

        wide = {one: jnp.asarray(jnp.asarray(array, dtype), jnp.float64) for one, array in arrays.items()}
        expected_gradients, expected = jax.tree.map(np.asarray, jax.jit(jax.grad(loss, has_aux=True))(wide))
    assert output.dtype == dtype
    oracles.assert_close(np.asarray(output, np.float64), expected, limit)
    assert (np.asarray(output, np.float64)[~seen.any(2)] == 0).all()
    for one, gradient in gradients.items():
        oracles.assert_close(np.asarray(gradient, np.float64), expected_gradients[one], limit)


def marked(key: tuple[str, str], name: str, quick: set[tuple[str, str]] = QUICK) -> Any:
    label = '/'.join(key)
    marks = [] if (label, name) in quick else pytest.mark.slow
    return pytest.param(key, name, marks=marks, id=f'{label}, {name}')


@pytest.mark.parametrize(
    ('key', 'name'), [marked(key, name) for key in KEYS for name, make in MASKS.items() if supports(key, make())]
)
def test_values_and_gradients_equal_the_equation(key: tuple[str, str], name: str) -> None:
    assert_equals_equation(key, name, jnp.float32, 5e-6)


@pytest.mark.parametrize(
    ('key', 'name'),
    [marked(key, name, QUICK_IN_BFLOAT16) for key in KEYS for name in ('causal packed', 'cross padded')],
)
def test_bfloat16_stays_near(key: tuple[str, str], name: str) -> None:
    assert_equals_equation(key, name, jnp.bfloat16, 2e-2)


@pytest.mark.parametrize(
    'key',
    [pytest.param(k, marks=[] if k == ('general', 'blockwise') else pytest.mark.slow, id='/'.join(k)) for k in KEYS],
)
def test_a_huge_value_in_the_future_does_not_reach_the_past(key: tuple[str, str]) -> None:
    mask, now = MASKS['causal'](), 10
    clean = {name: jnp.float32(array) for name, array in make_arrays(key, mask).items()}
    probe = np.array(clean.pop('d_output'))
    probe[:, now:] = 0
    dirty = clean | {name: clean[name].at[:, now:].set(1e30) for name in 'kv'}
    (gradients, output), (expected_gradients, expected) = (run(key, arrays, mask, probe) for arrays in (dirty, clean))
    np.testing.assert_array_equal(output[:, :now], expected[:, :now])
    for name, gradient in gradients.items():
        past = (slice(None), slice(None), slice(now)) if name == 'bias' else (slice(None), slice(now))
        own = name in ('q', 'k', 'v', 'bias')
        ours, other = (x[past] if own else x for x in (gradient, expected_gradients[name]))
        assert np.abs(other).max() > 0
        np.testing.assert_array_equal(ours, other, err_msg=name)
