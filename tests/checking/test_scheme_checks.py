"""What position schemes and prefixes do inside attention is compared with their equations."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from tests.checking.small import broken, first_findings, make_config, names_of_failed
from transformer_jax import positions
from transformer_jax.attention import VARIANTS


def scaled(function, factor):
    return lambda *args, **more: factor * function(*args, **more)


def clip_later(function):
    return lambda q_positions, k_positions, clip: jnp.minimum(function(q_positions, k_positions, clip + 1), 2 * clip)


def give_buckets_away(function):
    return lambda num_buckets, max_distance, *, causal: function(num_buckets, 2 * max_distance, causal=causal)[
        max_distance : 3 * max_distance + 1
    ]


def turn_neighbours(function):
    """Pairs (0, 1), (2, 3), ... as in the paper."""

    def on_heads(config, x, positions):
        order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
        return function(config, x[..., order], positions)[..., jnp.argsort(jnp.array(order))]

    return on_heads


@pytest.mark.parametrize(
    ('scheme', 'place', 'change'),
    [
        ('shaw', 'shaw.ShawTerms.score_term', functools.partial(scaled, factor=-3)),
        ('shaw', 'shaw.ShawTerms.output_term', functools.partial(scaled, factor=2)),
        ('shaw', 'shaw.clipped_offsets', clip_later),
        ('t5', 't5.T5Terms.bias', functools.partial(scaled, factor=0.99)),
        ('t5', 't5.offset_buckets', give_buckets_away),
        ('alibi', 'alibi.slopes', functools.partial(scaled, factor=2)),
    ],
)
@pytest.mark.parametrize('is_right', [False, True])
def test_what_a_scheme_adds_is_compared(scheme, place, change, is_right, monkeypatch):
    config = make_config(positions=scheme, attention__impl='dense')
    if not is_right:
        *path, name = place.split('.')
        owner = functools.reduce(getattr, path, __import__('transformer_jax.positions').positions)
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert (names_of_failed(first_findings(config)) == []) == is_right


@pytest.mark.parametrize('change', [None, turn_neighbours])
def test_how_a_scheme_turns_heads_is_compared(change, monkeypatch):
    scheme = positions.SCHEMES['rope']
    if change:
        monkeypatch.setitem(positions.SCHEMES, 'rope', scheme._replace(on_heads=change(scheme.on_heads)))
    found = first_findings(make_config(positions='rope'))
    assert names_of_failed(found) == (['values', 'gradients'] if change else [])


def test_a_scheme_without_an_equation_is_not_compared(monkeypatch):
    monkeypatch.setitem(positions.SCHEMES, 'mine', positions.SCHEMES['rope'])
    config = make_config(positions='mine')
    monkeypatch.setattr(positions.rope, 'check', lambda config, use: None)
    assert ["'mine'" in one.note for one in first_findings(config)] == [True, True]


def forget_prefix(q, k, v, mask, options):
    return q, k, v, dataclasses.replace(mask, k_prefix=None), options


def test_a_prefix_is_in_the_mask(monkeypatch):
    config = make_config(family='decoder_only', positions='t5', attention__impl='dense')
    assert names_of_failed(first_findings(config)) == []
    monkeypatch.setitem(VARIANTS, ('dot', 'dense'), broken(forget_prefix))
    assert names_of_failed(first_findings(config)) == ['values', 'gradients']
