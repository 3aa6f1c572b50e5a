"""A search is the same one operation at a time: nothing in it hangs on what was known when it was traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.toy_models import BOS, PAD, TableModel, make_translator


def as_arrays(function):
    """The function of numpy arguments as a program is given them, for the checks of shapes."""

    def convert(value):
        return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value

    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*map(convert, arguments), **{name: convert(value) for name, value in named.items()})

    return call


def translate(model, params, method):
    translator = make_translator(model, params, longest=8, method=method, min_length=4, beam_size=2, max_extra_length=2)
    searcher = translator._searcher(1)
    for name in ('_begin', '_advance', '_shrink', '_grow'):
        setattr(searcher, name, as_arrays(getattr(searcher, name)))
    found = translator.translate_n_best(
        ['w4 w5', 'w6', 'w7 w4 w5'], 1, prefixes=['', 'w5 w6', 'w4'], rng=jax.random.key(5, impl='unsafe_rbg')
    )
    return [best[0] for best in found]


@pytest.mark.slow
@pytest.mark.parametrize('method', ['greedy', 'beam', 'sampling'])
def test_decoding_outside_a_program_is_as_inside(method):
    """With a least length, prefixes, and ids that the model wants most and may not have."""
    model = TableModel(vocab_size=11, num_sentences=31)
    params = model.init(jax.random.key(1))
    params = dict(params, table=params['table'].at[..., [PAD, BOS]].add(4.0))
    inside = translate(model, params, method)
    num_traced = len(model.traced)
    before = jax.config.jax_disable_jit
    jax.config.update('jax_disable_jit', True)  # in the threads of the search as well
    try:
        outside = translate(model, params, method)
    finally:
        jax.config.update('jax_disable_jit', before)
    assert len(model.traced) > 2 * num_traced  # once for each step, not for each program
    assert [one.ids for one in inside] == [one.ids for one in outside]
    assert [one.finished for one in inside] == [one.finished for one in outside]
    np.testing.assert_allclose([one.score for one in inside], [one.score for one in outside], atol=1e-5)
    for one in inside:
        assert {PAD, BOS}.isdisjoint(one.ids)
        assert len(one.ids) >= 4
