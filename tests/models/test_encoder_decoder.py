"""The whole encoder-decoder against numpy loops over the paper's equations, and what must not change its results."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.tiny import CONFIG, START, VARIANTS, V, compute_logits, make_batch, make_model, make_params
from transformer_jax.config import AttentionConfig, Config, ConfigError, ExecutionConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.layers import dropout as dropout_module
from transformer_jax.models import build, validate
from transformer_jax.models.family import shift_right
from transformer_jax.models.interface import Model
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import sharding_tree

BATCH = make_batch([7, 4, 1], [5, 2, 6], pads=(2, 1))


def probe_loss(model: Model, params: Any, batch: Batch, probe: np.ndarray) -> jax.Array:
    batch = jax.tree.map(jnp.asarray, batch)
    return (model.project(params, model.hidden(params, batch)) * probe).sum()


def real_targets(batch: Batch) -> np.ndarray:
    return np.asarray(batch.target_segment_ids) > 0


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_equal_the_loops(variant: str) -> None:
    model = make_model(variant)
    params = make_params(model)
    expected = oracles.Transformer(params, model.config, START).logits(BATCH)
    oracles.assert_close(compute_logits(model, params, BATCH), expected[..., :V])


def test_every_layer_gives_its_attention_weights_when_asked() -> None:
    """For all layers at once: nothing where the mask hides, and 1 over what a query sees."""
    model = make_model()
    params = make_params(model)
    batch = jax.tree.map(jnp.asarray, BATCH)
    shifted = shift_right(batch.targets, batch.target_positions, START)
    hidden, kept = jax.jit(functools.partial(model.module.apply, mutable='weights'))({'params': params}, batch, shifted)
    assert_equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    assert_equal(hidden, jax.jit(model.hidden)(params, batch))
    rows, T, S = (*BATCH.targets.shape, BATCH.inputs.shape[1])
    real_sources = np.asarray(BATCH.input_segment_ids) > 0
    decoder = kept['weights']['decoder']['layers']
    (cross,), (own,) = decoder['cross_attention']['weights'], decoder['self_attention']['weights']
    (encoder,) = kept['weights']['encoder']['layers']['self_attention']['weights']
    assert cross.shape == (3, rows, 3, T, S)
    assert own.shape == (3, rows, 3, T, T)
    assert encoder.shape == (2, rows, 3, S, S)
    assert not np.asarray(cross)[:, ~np.broadcast_to(real_sources[:, None, None], (rows, 3, T, S))].any()
    assert not np.asarray(own)[..., np.triu(np.ones((T, T), bool), 1)].any()
    targets = real_targets(BATCH)
    assert_equal(np.moveaxis(np.asarray(cross).sum(-1), 2, -1)[:, targets], 1)


@pytest.mark.parametrize(
    'variant', [pytest.param(name, marks=[] if name == 'paper' else pytest.mark.slow) for name in VARIANTS]
)
def test_gradients_equal_finite_differences_of_the_loops(variant: str) -> None:
    """In every parameter array: along one random direction, to 1e-4 of the gradient's own length.

    A bias on keys changes no softmax: where nothing but rounding is left, it is measured by all gradients.
    """
    model = make_model(variant, num_decoder_layers=2)
    params = make_params(model, seed=1)
    rng = np.random.default_rng(0)
    batch = make_batch([4, 2], [3, 4])
    probe = rng.normal(size=(2, 4, V))
    gradients = jax.jit(jax.grad(lambda params: probe_loss(model, params, batch, probe)))(params)
    leaves, tree = jax.tree.flatten(oracles.to_float64(params))
    least = 1e-4 * max(float(np.linalg.norm(gradient)) for gradient in jax.tree.leaves(gradients))
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.choice([-1.0, 1.0], size=gradient.shape)

        def moved(step: float, index: int = index, direction: np.ndarray = direction) -> float:
            changed = [leaf + step * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            oracle = oracles.Transformer(jax.tree.unflatten(tree, changed), model.config, START)
            return float((oracle.logits(batch)[..., :V] * probe).sum())

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        gradient = np.asarray(gradient, np.float64)
        assert abs((gradient * direction).sum() - expected) <= 1e-4 * max(float(np.linalg.norm(gradient)), least)


def test_bfloat16_compute_stays_near() -> None:
    model = make_model('pre-norm', compute_dtype='bfloat16')
    params = make_params(model)
    hidden = jax.jit(model.hidden)(params, BATCH)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    logits = compute_logits(model, params, BATCH)
    assert logits.dtype == jnp.float32
    exact = compute_logits(make_model('pre-norm'), params, BATCH)
    oracles.assert_close(logits, exact, limit=2e-2)


@pytest.mark.parametrize('pads', [0, 3, 17])
def test_padding_changes_no_real_token(pads: int) -> None:
    model = make_model()
    params = make_params(model)
    wide = make_batch([7, 4, 1], [5, 2, 6], pads=(pads, pads))
    expected = np.asarray(compute_logits(model, params, BATCH))[real_targets(BATCH)]
    oracles.assert_close(np.asarray(compute_logits(model, params, wide))[real_targets(wide)], expected, 1e-6)


def test_the_ids_in_padding_change_nothing() -> None:
    model = make_model()
    params = make_params(model)
    rng = np.random.default_rng(0)

    def fill(ids: np.ndarray, segments: np.ndarray) -> np.ndarray:
        return np.where(segments > 0, ids, rng.integers(0, V, ids.shape)).astype(np.int32)

    filled = BATCH._replace(
        inputs=fill(BATCH.inputs, BATCH.input_segment_ids), targets=fill(BATCH.targets, BATCH.target_segment_ids)
    )
    probe = rng.normal(size=(3, 7, V)) * real_targets(BATCH)[..., None]
    gradient = jax.jit(jax.grad(lambda params, batch: probe_loss(model, params, batch, probe)))
    assert (filled.inputs != BATCH.inputs).any()
    for ours, expected in zip(
        jax.tree.leaves(gradient(params, filled)),
        jax.tree.leaves(gradient(params, BATCH)),
        strict=True,
    ):
        oracles.assert_close(ours, expected, 1e-5)


def test_packed_pairs_equal_the_same_pairs_alone() -> None:
    model = make_model()
    params = make_params(model)
    alone = make_batch([7, 4, 3], [5, 2, 6], pads=(2, 1))

    def pack(ids: np.ndarray, segments: np.ndarray) -> list[np.ndarray]:
        pieces = [row[mask > 0] for row, mask in zip(ids, segments, strict=True)]
        columns = [
            np.concatenate(pieces),
            np.concatenate([np.full(len(piece), j + 1) for j, piece in enumerate(pieces)]),
            np.concatenate([np.arange(len(piece)) for piece in pieces]),
        ]
        return [np.pad(column, (0, 3))[None].astype(np.int32) for column in columns]

    inputs, input_segments, input_positions = pack(alone.inputs, alone.input_segment_ids)
    targets, target_segments, target_positions = pack(alone.targets, alone.target_segment_ids)
    packed = Batch(inputs, targets, input_segments, target_segments, input_positions, target_positions)
    expected = np.asarray(compute_logits(model, params, alone))[real_targets(alone)]
    oracles.assert_close(np.asarray(compute_logits(model, params, packed))[real_targets(packed)], expected, 1e-5)


def test_the_future_does_not_change_the_past() -> None:
    """The zero pattern of the Jacobian of every output by every decoder input."""
    model = make_model()
    params = make_params(model)
    batch = make_batch([4], [5])
    memory = jax.jit(model.encode)(params, batch.inputs, batch.input_segment_ids, batch.input_positions)

    def logits(offsets: jax.Array) -> jax.Array:
        def decode(module: Any) -> jax.Array:
            from transformer_jax.models.encoder_decoder import _mask

            place = (jnp.asarray(batch.target_segment_ids), jnp.asarray(batch.target_positions))
            source = (jnp.asarray(batch.input_segment_ids), jnp.asarray(batch.input_positions))
            x = module.embed_target(jnp.asarray(batch.targets), place[1]) + offsets
            return module.decoder(x, _mask(place, place, causal=True), memory.states, _mask(place, source))

        return model.module.apply({'params': params}, method=decode)

    jacobian = jax.jit(jax.jacobian(logits))(jnp.zeros((1, 5, CONFIG.d_model)))
    moved = np.abs(jacobian).sum(axis=(0, 2, 3, 5)) > 0
    np.testing.assert_array_equal(moved, np.tril(np.ones((5, 5), bool)))


def test_targets_are_shifted_right_within_their_segment() -> None:
    targets, positions = jnp.array([[5, 6, 7, 8, 9, 0]]), jnp.array([[0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(shift_right(targets, positions, 2), [[2, 5, 6, 2, 8, 2]])


def test_word_order_matters() -> None:
    model = make_model()
    params = make_params(model)
    turned = BATCH._replace(inputs=BATCH.inputs[:, [2, 1, 0, 3, 4, 5, 6, 7, 8]])
    assert np.abs(compute_logits(model, params, BATCH) - compute_logits(model, params, turned))[0].max() > 1e-3


@functools.cache
def run_with_dropout(execution: ExecutionConfig) -> Any:
    model = make_model('paper', execution, dropout_rate=0.3)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden = model.hidden(params, jax.tree.map(jnp.asarray, BATCH), dropout_rng=jax.random.key(5))
        return (hidden**3).sum(), hidden

    (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(make_params(make_model()))
    return hidden, gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ('unroll', 'remat'), [(None, 'none'), (2, 'full'), (1, 'dots'), (None, 'names'), (2, 'narrow')]
)
def test_unroll_and_remat_change_nothing(unroll: int | None, remat: str) -> None:
    hidden, gradients = run_with_dropout(ExecutionConfig(unroll=unroll, remat=remat))
    expected, expected_gradients = run_with_dropout(ExecutionConfig(unroll=1))
    oracles.assert_close(hidden, expected, 1e-5)
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), gradients, expected_gradients)


@pytest.mark.parametrize('unroll', [1, None])
def test_every_dropout_of_every_layer_and_step_has_a_key_of_its_own(
    unroll: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def record(inputs: jax.Array, rate: float, rng: jax.Array, *_: Any) -> jax.Array:
        def note(data: Any) -> np.ndarray:
            seen.append(tuple(np.asarray(data).tolist()))
            return np.zeros(inputs.shape, np.float32)

        shape = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
        return inputs + jax.pure_callback(note, shape, jax.random.key_data(rng))

    monkeypatch.setattr(dropout_module, 'dropout', record)
    model = make_model('paper', ExecutionConfig(unroll=unroll), dropout_rate=0.3, activation_dropout_rate=0.2)
    params = make_params(model)
    hidden = jax.jit(model.hidden)
    for step in range(2):
        hidden(params, BATCH, dropout_rng=jax.random.fold_in(jax.random.key(0), step)).block_until_ready()
    encoder, decoder = 1 + 2 * (2 + 1), 1 + 3 * (3 + 1)  # the embeddings, then sublayers and activations of each layer
    assert len(seen) == 2 * (encoder + decoder)
    assert len(set(seen)) == len(seen)


def test_dropout_is_off_without_a_key_and_repeats_with_the_same_one() -> None:
    model, off = make_model(dropout_rate=0.3), make_model()
    params = make_params(model)
    hidden = jax.jit(model.hidden)
    oracles.assert_close(hidden(params, BATCH), jax.jit(off.hidden)(params, BATCH), 1e-6)
    first, again, other = (hidden(params, BATCH, dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2


@pytest.mark.slow  # tests/parallel has a whole update on a mixed mesh
def test_one_device_equals_eight() -> None:
    model = make_model()
    params = make_params(model)
    batch = make_batch([7, 4, 1, 6, 2, 3, 5, 7], [5, 2, 6, 1, 1, 3, 4, 2])
    probe = np.random.default_rng(0).normal(size=(8, 6, V)).astype(np.float32)
    expected = jax.jit(jax.grad(lambda p: probe_loss(model, p, batch, probe)))(params)
    mesh = make_mesh(Config().execution.mesh)
    from transformer_jax.parallel.mesh import place_batch, replicated

    placed, placed_probe = place_batch(batch, mesh), place_batch(probe, mesh)
    gradient = jax.jit(jax.grad(lambda p, b, w: probe_loss(model, p, b, w)), out_shardings=replicated(mesh))
    actual = gradient(jax.device_put(params, replicated(mesh)), placed, placed_probe)
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), actual, expected)


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_parameter_has_logical_axes_with_a_rule(variant: str) -> None:
    model = make_model(variant)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings = sharding_tree(model.logical_axes(), shapes, make_mesh(Config().execution.mesh))
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))
    axes = model.logical_axes()
    assert axes['target_embedding']['table'] == ('vocab', 'embed')
    assert axes['encoder']['layers']['self_attention']['query']['kernel'] == ('layers', 'embed', 'heads', 'head_dim')
    assert axes['decoder']['layers']['feed_forward']['contract']['kernel'] == ('layers', 'mlp', 'embed')


@pytest.mark.slow
def test_fresh_parameters_are_drawn_as_documented() -> None:
    model = build(dataclasses.replace(CONFIG, d_model=130, d_ff=170), vocab_size=997, start_id=START)
    params = jax.jit(model.init)(jax.random.key(0))
    table = np.asarray(params['target_embedding']['table'])
    assert table.std() * 130**0.5 == pytest.approx(1, rel=0.02)
    for stack, layers in (('encoder', 2), ('decoder', 3)):
        own = params[stack]['layers']
        query = np.asarray(own['self_attention']['query']['kernel'])
        assert query.shape == (layers, 130, 3, 5)
        bound = (6 / (130 + 15)) ** 0.5
        assert bound * 0.98 < np.abs(query).max() <= bound
        assert query.std() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert not np.array_equal(query[0], query[1])  # each layer draws its own
        assert (own['feed_forward']['expand']['bias'] == 0).all()
        assert (own['feed_forward_residual']['norm']['scale'] == 1).all()


def count(config: ModelConfig, vocab_size: int = 37_000) -> int:
    model = build(config, vocab_size=vocab_size, start_id=START)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def attend(**changes: int) -> AttentionConfig:
    return dataclasses.replace(ModelConfig().attention, **changes)


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({}, 63_045_632),
        ({'attention': attend(num_heads=1, head_dim=512)}, 63_045_632),
        ({'attention': attend(num_heads=4, head_dim=128)}, 63_045_632),
        ({'attention': attend(num_heads=16, head_dim=32)}, 63_045_632),
        ({'attention': attend(num_heads=32, head_dim=16)}, 63_045_632),
        ({'attention': attend(head_dim=16, value_dim=64)}, 55_967_744),
        ({'attention': attend(head_dim=32, value_dim=64)}, 58_327_040),
        ({'num_encoder_layers': 2, 'num_decoder_layers': 2}, 33_644_544),
        ({'num_encoder_layers': 4, 'num_decoder_layers': 4}, 48_345_088),
        ({'num_encoder_layers': 8, 'num_decoder_layers': 8}, 77_746_176),
        ({'d_model': 256, 'attention': attend(head_dim=32)}, 26_816_512),
        ({'d_model': 1024, 'attention': attend(head_dim=128)}, 163_815_424),
        ({'d_ff': 1024}, 50_450_432),
        ({'d_ff': 4096}, 88_236_032),
        ({'d_model': 1024, 'd_ff': 4096, 'attention': attend(num_heads=16)}, 214_171_648),
        ({'attention': dataclasses.replace(attend(), use_bias=True)}, 63_045_632 + 36_864),
        ({'norm_order': 'pre'}, 63_045_632 + 2_048),
        ({'tie_embeddings': 'output'}, 63_045_632 + 37_000 * 512),
        ({'tie_embeddings': 'none'}, 63_045_632 + 2 * 37_000 * 512),
    ],
)
def test_parameter_counts_of_table_3(changes: dict[str, Any], expected: int) -> None:
    assert count(dataclasses.replace(ModelConfig(), **changes)) == expected


def test_the_base_model_has_the_papers_shape() -> None:
    config = ModelConfig()
    assert config.d_model // config.attention.num_heads == config.attention.head_dim == 64
    assert config.num_encoder_layers + config.num_decoder_layers == 12


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'family': 'encoder_decodr'}, r"config\.model\.family is 'encoder_decodr'.*did you mean 'encoder_decoder'"),
        ({'positions': 'sinusodal'}, r"config\.model\.positions is 'sinusodal'.*did you mean 'sinusoidal'"),
        (
            {'attention': dataclasses.replace(attend(), kind='dott')},
            r"config\.model\.attention\.kind is 'dott'.*'dot'",
        ),
        (
            {'attention': dataclasses.replace(attend(), impl='dens')},
            r"config\.model\.attention\.impl is 'dens'.*'dense'",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Config(model=dataclasses.replace(ModelConfig(), **changes)))
