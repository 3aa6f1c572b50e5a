"""What holds for every scheme in the table, whoever adds one: offsets, blocks, caches, order; names and errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests import oracles
from tests.positions import toy_schemes
from tests.positions.toy_schemes import B, D, H, N, S, T, U, make, random_heads
from transformer_jax import positions as position_schemes
from transformer_jax.config import AttentionConfig, AttentionOverlayConfig, ConfigError, ModelConfig
from transformer_jax.position_terms import PositionTerms

EVERY = pytest.mark.parametrize('name', position_schemes.SCHEMES)
INSIDE = pytest.mark.parametrize(
    'name', [name for name, scheme in position_schemes.SCHEMES.items() if scheme.terms or scheme.on_heads]
)
WITH_TERMS = [name for name, scheme in position_schemes.SCHEMES.items() if scheme.terms]
MODES = pytest.mark.parametrize('causal', [False, True], ids=['both sides', 'causal'])
PLACES = st.integers(0, 60)


def rows_of_positions(length: int) -> st.SearchStrategy:
    """Positions `[B, length]` in any order, as padding, packing and caches make them."""
    return st.lists(PLACES, min_size=B * length, max_size=B * length).map(
        lambda places: jnp.asarray(places, jnp.int32).reshape(B, length)
    )


def random_weights(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random((B, N, T, S)), jnp.float32)


@INSIDE
@MODES
@settings(max_examples=8)
@given(q_positions=rows_of_positions(T), k_positions=rows_of_positions(S), shift=st.integers(1, 500))
def test_attention_depends_on_offsets_alone(name, causal, q_positions, k_positions, shift) -> None:
    toy, (q, k, v), weights = make(name, causal=causal), random_heads(1), random_weights(2)
    here = toy_schemes.scores(toy, q, k, q_positions, k_positions)
    there = toy_schemes.scores(toy, q, k, q_positions + shift, k_positions + shift)
    oracles.assert_close(there, here, 2e-4 if name == 'rope' else 1e-6)
    here = toy_schemes.outputs(toy, weights, v, q_positions, k_positions)
    oracles.assert_close(toy_schemes.outputs(toy, weights, v, q_positions + shift, k_positions + shift), here, 1e-6)


@INSIDE
@MODES
@settings(max_examples=8)
@given(
    q_positions=rows_of_positions(T),
    k_positions=rows_of_positions(S),
    queries=st.permutations(range(T)),
    keys=st.permutations(range(S)),
)
def test_a_block_of_any_rows_is_a_part_of_the_whole(name, causal, q_positions, k_positions, queries, keys) -> None:
    toy, (q, k, v), weights = make(name, causal=causal), map(np.asarray, random_heads(3)), np.asarray(random_weights(4))
    q_positions, k_positions = np.asarray(q_positions), np.asarray(k_positions)
    whole = np.asarray(toy_schemes.scores(toy, q, k, q_positions, k_positions))
    rows, parts = queries[:3], []
    for columns in (keys[:4], keys[4:]):  # two sizes alone: each size is compiled
        block = q[:, rows], k[:, columns], q_positions[:, rows], k_positions[:, columns]
        oracles.assert_close(toy_schemes.scores(toy, *block), whole[:, :, rows][..., columns], 2e-6)
        parts.append(toy_schemes.outputs(toy, weights[:, :, rows][..., columns], v[:, columns], *block[2:]))
    summed = toy_schemes.outputs(toy, weights, v, q_positions, k_positions)
    oracles.assert_close(parts[0] + parts[1], np.asarray(summed)[:, rows], 2e-6)


@INSIDE
@MODES
def test_one_cached_query_row_equals_the_row_of_the_full_matrix(name, causal) -> None:
    toy, (q, k, _) = make(name, causal=causal), random_heads(5)
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    whole = toy_schemes.scores(toy, q, k, positions[:, :T], positions)
    turned = position_schemes.on_heads(toy.config, k, positions)  # as a cache keeps them
    slots = jnp.asarray([[7, 3, 0, 10, 1, 9, 2, 8, 4, 6, 5]] * B)  # and wherever it keeps them
    cached, expected = turned[jnp.arange(B)[:, None], slots], np.asarray(whole)[..., np.asarray(slots[0])]
    for t in range(T):
        at, row_q = positions[:, t : t + 1], q[:, t : t + 1]
        row = jnp.einsum('BTNH,BSNH->BNTS', position_schemes.on_heads(toy.config, row_q, at), cached)
        if toy.terms is not None:
            row = toy_schemes.add(row, toy.terms.score_term(row_q, at, slots))
        row *= H**-0.5
        if toy.terms is not None:
            row = toy_schemes.add(row, toy.terms.bias(at, slots))
        oracles.assert_close(row, expected[:, :, t : t + 1], 2e-6)


@EVERY
def test_embeddings_get_what_their_positions_say_wherever_they_stand(name) -> None:
    toy = make(name)
    whole = position_schemes.on_embedding(toy.config, toy.embedding, jnp.arange(61)[None])
    packed = jnp.asarray([[0, 1, 2, 0, 1, 60], [5, 6, 7, 8, 0, 1]])
    got = position_schemes.on_embedding(toy.config, toy.embedding, packed)
    if position_schemes.SCHEMES[name].on_embedding is None:
        assert whole.shape == got.shape == (1, 1, 1)
        assert not np.any(whole)
        return
    assert whole.shape == (1, 61, D)
    np.testing.assert_array_equal(got, np.asarray(whole)[0, packed])


@EVERY
def test_one_row_of_positions_serves_a_whole_batch(name) -> None:
    toy, (q, k, v), weights = make(name), random_heads(6), random_weights(7)
    one = jnp.arange(30, 30 + T)[None], jnp.arange(30, 30 + S)[None]
    each = tuple(jnp.broadcast_to(row, (B, row.shape[1])) for row in one)
    oracles.assert_close(toy_schemes.scores(toy, q, k, *one), toy_schemes.scores(toy, q, k, *each), 1e-6)
    oracles.assert_close(toy_schemes.outputs(toy, weights, v, *one), toy_schemes.outputs(toy, weights, v, *each), 1e-6)


@pytest.mark.parametrize('name', WITH_TERMS)
def test_terms_are_float32_pytrees_that_tell_configs_apart(name) -> None:
    toy, positions = make(name), jnp.broadcast_to(jnp.arange(S), (B, S))
    assert isinstance(toy.terms, PositionTerms)
    q, weights = random_heads(8)[1].astype(jnp.bfloat16), jnp.ones((B, N, S, S), jnp.bfloat16)
    for hook, first in (('bias', ()), ('score_term', (q,)), ('output_term', (weights,))):
        result = getattr(toy.terms, hook)(*first, positions, positions)
        assert result is None or result.dtype == jnp.float32, hook
    structure = jax.tree.structure(toy.terms)
    assert structure == jax.tree.structure(make(name).terms)
    assert hash(structure) == hash(jax.tree.structure(make(name).terms))
    traces = []

    @jax.jit
    def read(terms: PositionTerms) -> None:
        traces.append(terms)

    read(make(name, seed=1).terms)
    read(make(name, seed=2).terms)
    assert len(traces) == 1
    if name == 't5':
        assert structure != jax.tree.structure(make(name, causal=True).terms)
        assert structure != jax.tree.structure(make(name, t5_max_distance=24).terms)


def test_a_batch_split_over_devices_gathers_nothing() -> None:
    shaw, t5 = make('shaw').terms, make('t5').terms
    positions = jnp.broadcast_to(jnp.arange(T), (8, T))
    q, weights = jnp.ones((8, T, N, H)), jnp.ones((8, N, T, T))

    def loss(both: tuple[PositionTerms, PositionTerms], q: jax.Array, weights: jax.Array) -> jax.Array:
        score: Any = toy_schemes.add(both[0].score_term(q, positions, positions), both[1].bias(positions, positions))
        return (score**2).sum() + jnp.square(
            toy_schemes.add(both[0].output_term(weights, positions, positions), None)
        ).sum()

    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec('data')), NamedSharding(mesh, PartitionSpec())
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=(whole, split, split))
    program = gradients.lower((shaw, t5), q, weights).compile().as_text()
    found = set(re.findall(r'(all-gather|all-reduce|all-to-all|collective-permute)\S*\(', program))
    assert found == {'all-reduce'}  # of the tables' gradients


@EVERY
def test_described_parameters_can_be_made(name) -> None:
    config = ModelConfig(positions=name)
    scheme = position_schemes.SCHEMES[name]
    described = {**(scheme.embedding_parameters(config) if scheme.embedding_parameters else {})}
    described.update(scheme.terms_parameters(config, config.attention) if scheme.terms_parameters else {})
    for one in described.values():
        drawn = one.initializer(jax.random.key(0), one.shape, jnp.float32)
        assert drawn.shape == one.shape
        assert len(one.logical_axes) == len(one.shape)
        assert 0 < np.std(drawn) < 1


def count(described: dict) -> int:
    return sum(int(np.prod(one.shape)) for one in described.values())


def test_parameter_counts() -> None:
    base = ModelConfig()  # d_model 512, 8 heads of 64, length 256, k = 16
    schemes = position_schemes.SCHEMES
    assert count(schemes['learned'].embedding_parameters(base)) == 256 * 512  # type: ignore[misc]
    assert count(schemes['shaw'].terms_parameters(base, base.attention)) == 2 * 33 * 64  # type: ignore[misc]
    wide = AttentionConfig(value_dim=96)
    assert count(schemes['shaw'].terms_parameters(base, wide)) == 33 * (64 + 96)  # type: ignore[misc]
    assert count(schemes['t5'].terms_parameters(base, base.attention)) == 32 * 8  # type: ignore[misc]
    assert {name for name, s in schemes.items() if s.embedding_parameters or s.terms_parameters} == {
        'learned', 'shaw', 't5',
    }  # fmt: skip
    assert [name for name, s in schemes.items() if s.shared] == ['t5']


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (ModelConfig(positions='rop'), r"config\.model\.positions is 'rop'; it must be one of 'none', .*'rope'\?\)"),
        (ModelConfig(positions='zz'), r"config\.model\.positions is 'zz'; .*'alibi'$"),
        (
            ModelConfig(positions='rope', attention=AttentionConfig(head_dim=7)),
            r"config\.model\.attention\.head_dim is 7; positions='rope' turns pairs, so it must be even: 6 or 8",
        ),
        (
            ModelConfig(positions='rope', decoder_self=AttentionOverlayConfig(head_dim=1)),
            r'config\.model\.decoder_self\.head_dim is 1; .*even: 2$',
        ),
        (ModelConfig(positions='t5', t5_buckets=9), r'config\.model\.t5_buckets is 9; it must be even, .*: 8 or 10$'),
        (
            ModelConfig(positions='t5', t5_buckets=32, t5_max_distance=16),
            r'config\.model\.t5_max_distance is 16; it must be above 16, .*: 17 or more, or fewer buckets$',
        ),
    ],
)
def test_what_can_not_work_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        position_schemes.check(config)


def test_what_a_model_has_not_is_not_checked() -> None:
    odd_cross = ModelConfig(positions='rope', cross=AttentionOverlayConfig(head_dim=7))
    position_schemes.check(odd_cross)  # turned are the heads of self-attention alone
    odd_encoder = ModelConfig(positions='rope', encoder_self=AttentionOverlayConfig(head_dim=7))
    position_schemes.check(odd_encoder, uses=('decoder_self',))
    with pytest.raises(ConfigError, match='encoder_self'):
        position_schemes.check(odd_encoder)
    odd_values = ModelConfig(positions='rope', attention=AttentionConfig(value_dim=U))
    position_schemes.check(odd_values)
    for name in position_schemes.SCHEMES:
        position_schemes.check(ModelConfig(positions=name, t5_buckets=32 if name != 't5' else 10))
