"""Low-rank attention against loops over its definition."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import comparing
from tests.attention.comparing import make_arrays, make_mask
from transformer_jax.attention.low_rank import LOW_RANK
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Use
from transformer_jax.config import AttentionConfig

N, K, H, U, R, LONGEST = 4, 2, 3, 5, 3, 11
CONFIG = AttentionConfig(kind='low_rank', num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, rank=R)
SCALE = H**-0.5

LAYOUTS = {
    'self': make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED),
    'left padding': make_mask(comparing.LEFT_PADDED, comparing.LEFT_PADDED),
    'cross, a row of padding': make_mask(comparing.NOBODY, comparing.RIGHT_PADDED),
    'cross, no keys': make_mask(comparing.RIGHT_PADDED, comparing.NOBODY),
}


def loops(arrays: comparing.Arrays, mask: Mask) -> np.ndarray:
    """softmax(q (E^T k)^T scale) (F^T v); E and F by the position of each key, over real keys alone."""
    q, k, v, e, f = (arrays[name] for name in ('q', 'k', 'v', 'key_projection', 'value_projection'))
    q_segments, k_segments, positions = (np.asarray(x) for x in (mask.q_segments, mask.k_segments, mask.k_positions))
    output = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        real = [s for s in range(k.shape[1]) if k_segments[b, s] > 0]
        if not real or q_segments[b, t] == 0:
            continue
        keys = [sum(e[positions[b, s], r] * k[b, s, head] for s in real) for r in range(e.shape[1])]
        values = [sum(f[positions[b, s], r] * v[b, s, head] for s in real) for r in range(f.shape[1])]
        powers = [math.exp(np.dot(q[b, t, n], key) * SCALE) for key in keys]
        for power, value in zip(powers, values, strict=True):
            output[b, t, n] += power / sum(powers) * value
    return output


def with_projections(seed: int, mask: Mask) -> comparing.Arrays:
    rng = np.random.default_rng(seed + 100)
    projections = {name: rng.normal(size=(LONGEST, R)) for name in ('key_projection', 'value_projection')}
    return {**make_arrays(seed, mask, N, K, H, U), **projections}


def attend(arrays: dict[str, Any], mask: Mask, config: AttentionConfig = CONFIG, **options: Any) -> jax.Array:
    params = {name: arrays[name] for name in ('key_projection', 'value_projection')}
    q, k, v = (arrays[name] for name in 'qkv')
    return LOW_RANK.function(q, k, v, mask, Options(config, SCALE, params, **options))[0]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_values_and_gradients_equal_the_loops(layout: str) -> None:
    mask = LAYOUTS[layout]
    real_q, real_k = (np.asarray(segments > 0) for segments in (mask.q_segments, mask.k_segments))
    comparing.assert_equals_loops(
        lambda a: attend(a, mask), lambda a: loops(a, mask), with_projections(0, mask),
        real_q[:, :, None] & real_k[:, None, :],
    )  # fmt: skip


def test_bfloat16_stays_near() -> None:
    """Of the arrays as rounded, in values and gradients."""
    mask = LAYOUTS['cross, a row of padding']
    arrays = {name: np.float64(jnp.bfloat16(array)) for name, array in with_projections(0, mask).items()}
    expected = loops(arrays, mask)
    probe = np.random.default_rng(1).normal(size=expected.shape)

    @jax.jit
    def compute(arrays: Any) -> Any:
        def loss(arrays: Any) -> Any:
            output = attend(arrays, mask)
            return (output.astype(jnp.float32) * probe).sum(), output

        return jax.grad(loss, has_aux=True)(arrays)

    gradients, output = compute({name: jnp.bfloat16(array) for name, array in arrays.items()})
    assert output.dtype == jnp.bfloat16
    oracles.assert_close(np.float32(output), expected, 2e-2)
    for name, gradient in gradients.items():

        def moved(at: np.ndarray, name: str = name) -> float:
            return float((loops({**arrays, name: at}, mask) * probe).sum())

        oracles.assert_close(np.float32(gradient), oracles.numeric_gradient(moved, arrays[name]), 2e-2)


def test_the_same_rows_with_padding_before_or_behind_give_the_same() -> None:
    q, k, v, *projections = (
        jnp.float32(array) for array in with_projections(0, make_mask([[1] * 5], [[1] * 5])).values()
    )
    outputs = []
    for before, behind in ((0, 0), (0, 3), (3, 0)):
        segments = [[0] * before + [1] * 5 + [0] * behind]
        padded = [jnp.pad(x, ((0, 0), (before, behind), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (q, k, v)]
        names = ('q', 'k', 'v', 'key_projection', 'value_projection')
        mask = make_mask(segments, segments)
        output = jax.jit(functools.partial(attend, mask=mask))(dict(zip(names, (*padded, *projections), strict=True)))
        outputs.append(output[:, before : before + 5])
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-5, atol=1e-6)


def test_parameters_have_a_row_for_each_position() -> None:
    assert LOW_RANK.parameters is not None
    for parameter in LOW_RANK.parameters(CONFIG, LONGEST).values():
        assert parameter.shape == (LONGEST, R)
    assert LOW_RANK.parameters(AttentionConfig(rank=64), 4000)['key_projection'].shape == (4000, 64)
    drawn = LOW_RANK.parameters(AttentionConfig(rank=64), 4000)['key_projection']
    values = drawn.initializer(jax.random.key(0), drawn.shape, jnp.float32)
    assert float(values.std()) == pytest.approx(1 / 8, rel=0.02)


def test_keys_beyond_the_table_are_never_read_silently() -> None:
    segments = [[1] * (LONGEST + 1)]
    mask = make_mask(segments, segments)
    arrays = {name: jnp.float32(array) for name, array in with_projections(0, mask).items()}
    with pytest.raises(ValueError, match='12 keys.*max_length 11'):
        attend(arrays, mask)
    # Fewer keys, one at a position beyond: only the device knows, and it must not read another position's row.
    mask = make_mask([[1] * 5], [[1] * 5])
    arrays = {name: jnp.float32(array) for name, array in with_projections(0, mask).items()}
    beyond = Mask(mask.q_segments, mask.k_segments, mask.q_positions, mask.k_positions.at[0, 4].set(LONGEST))
    assert np.isnan(attend(arrays, beyond)).all()
    padded = Mask(mask.q_segments, mask.k_segments.at[0, 4].set(0), mask.q_positions, beyond.k_positions)
    assert np.isfinite(attend(arrays, padded)).all()


def test_what_it_can_not_do_is_refused() -> None:
    use = {
        'config': CONFIG, 'cross': False, 'packed': False, 'terms': False, 'compute_dtype': 'float32',
        'platform': 'cpu', 'decodes': False, 'max_length': LONGEST,
    }  # fmt: skip
    assert LOW_RANK.check is not None
    assert LOW_RANK.check(Use('encoder_self', causal=False, **use)) is None
    message = LOW_RANK.check(Use('decoder_self', causal=True, **use))
    assert message is not None
    assert 'bidirectional and cross only' in message
    assert not {'causal', 'segments', 'window', 'globals', 'prefix', 'bias', 'positions', 'weights'} & LOW_RANK.supports
    mask = make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED, causal=True)
    arrays = {name: jnp.float32(array) for name, array in with_projections(0, mask).items()}
    with pytest.raises(ValueError, match='does not support causal'):
        attend(arrays, mask)
    with pytest.raises(ValueError, match='does not support weights'):
        attend(arrays, LAYOUTS['self'], return_weights=True)


def test_dropout_falls_on_the_weights_of_the_projected_rows() -> None:
    mask = LAYOUTS['self']
    arrays = {name: jnp.float32(array) for name, array in with_projections(0, mask).items()}
    config = AttentionConfig(kind='low_rank', rank=R, dropout_rate=0.4)
    draw = jax.jit(jax.vmap(lambda key: attend(arrays, mask, config, dropout_rng=key)))
    drawn = draw(jax.random.split(jax.random.key(0), 2000))
    whole = loops(with_projections(0, mask), mask)
    assert np.abs(drawn[0] - whole).max() > 0.01
    error = np.abs(drawn.mean(axis=0) - whole)
    assert (error <= 5 * drawn.std(axis=0) / math.sqrt(2000) + 1e-6).all()
