"""The length penalty by its formulas, the bound that the exact stop stands on, and the range of single precision."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.config import ConfigError
from transformer_jax.decoding.length_penalty import LengthPenalty

ALPHAS = (-1.0, 0.0, 0.6, 1.0, 2.0)


@pytest.mark.parametrize('alpha', ALPHAS)
def test_the_formulas_of_the_documentation(alpha):
    lengths = np.arange(1, 300)
    for kind, expected in (('gnmt', ((5 + lengths) / 6) ** alpha), ('power', lengths.astype(float) ** alpha)):
        penalty = LengthPenalty(kind, alpha)
        np.testing.assert_allclose(penalty(jnp.asarray(lengths, jnp.int32)), expected, rtol=1e-5)
        assert [float(penalty(int(length))) for length in lengths] == pytest.approx(expected.tolist(), rel=1e-12)
        assert float(penalty(1)) == 1.0  # both leave a single subword as it is


def test_values_by_hand():
    assert float(LengthPenalty('gnmt', 0.6)(7)) == pytest.approx(2**0.6)
    assert float(LengthPenalty('gnmt', -1.0)(13)) == pytest.approx(1 / 3)
    assert float(LengthPenalty('power', 2.0)(7)) == 49.0


@given(
    kind=st.sampled_from(['gnmt', 'power']),
    alpha=st.sampled_from(ALPHAS),
    shortest=st.integers(1, 60),
    more=st.integers(0, 60),
    log_probability=st.floats(-200.0, 0.0),
)
def test_no_length_between_the_bounds_gives_a_better_score(kind, alpha, shortest, more, log_probability):
    penalty = LengthPenalty(kind, alpha)
    bound = log_probability / float(penalty.best(shortest, shortest + more))
    scores = [log_probability / float(penalty(length)) for length in range(shortest, shortest + more + 1)]
    assert max(scores) == bound  # and one of them reaches it


@pytest.mark.parametrize('alpha', [40.0, -40.0, 1e6, math.inf, math.nan])
def test_divisors_outside_single_precision_are_refused(alpha):
    with pytest.raises(ConfigError, match='config.decoding.alpha is .*penalty of length 256'):
        LengthPenalty('power', alpha).check(256)


def test_divisors_inside_single_precision_are_taken():
    for alpha in ALPHAS:
        for kind in ('gnmt', 'power'):
            LengthPenalty(kind, alpha).check(4096)
