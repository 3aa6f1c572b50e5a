"""The recurrent encoder-decoder against loops over its equations, and what its decoder may know."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests import oracles
from tests.models.test_decoding import Search
from tests.models.tiny import CONFIG, START, V, compute_logits, make_batch, make_params
from transformer_jax.config import AttentionConfig, Config, ConfigError, ExecutionConfig, ModelConfig, RecurrenceConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models import build, uses_of_attention, validate
from transformer_jax.models.interface import Model

D = CONFIG.d_model

# Attention, its score and the cell; then what else differs.
VARIANTS: dict[str, tuple[RecurrenceConfig, dict[str, Any]]] = {
    'none, gru': (RecurrenceConfig('gru', 'none'), {}),
    'none, lstm': (RecurrenceConfig('lstm', 'none'), {'tie_embeddings': 'none', 'output_bias': True}),
    'bahdanau, gru': (RecurrenceConfig('gru', 'bahdanau'), {}),
    'bahdanau, rnn': (RecurrenceConfig('rnn', 'bahdanau'), {'num_decoder_layers': 1, 'scale_embedding': False}),
    'luong, lstm, general': (RecurrenceConfig('lstm', 'luong', 'general'), {'num_encoder_layers': 1}),
    'luong, gru, dot, not fed': (RecurrenceConfig('gru', 'luong', 'dot', input_feeding=False), {}),
    'luong, rnn, concat': (RecurrenceConfig('rnn', 'luong', 'concat'), {}),
}

# Those that each add something to test; all but one cost too much to run every time.
FEW = [
    pytest.param('luong, rnn, concat'),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ('none, lstm', 'bahdanau, gru', 'luong, lstm, general')),
]


def make_model(variant: str, execution: ExecutionConfig | None = None, **changes: Any) -> Model:
    recurrence, more = VARIANTS[variant]
    own = {'family': 'recurrent', 'positions': 'none', 'num_decoder_layers': 2, 'recurrence': recurrence}
    config = dataclasses.replace(CONFIG, **{**own, **more, **changes})
    return build(config, vocab_size=V, start_id=START, execution=execution)


def make_packed_batch() -> Batch:
    """Row 0: two pairs, then padding. Row 1: padding on the left of both sides, then one pair."""
    rng = np.random.default_rng(0)
    sources = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [0, 0, 0, 1, 1, 1, 1, 1]], np.int32)
    targets = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 0]], np.int32)

    def positions(segments: np.ndarray) -> np.ndarray:
        return np.array(
            [[row[:t].tolist().count(own) if own else 0 for t, own in enumerate(row)] for row in segments], np.int32
        )

    def draw(segments: np.ndarray) -> np.ndarray:
        return np.where(segments > 0, rng.integers(3, V, segments.shape), 0).astype(np.int32)

    return Batch(draw(sources), draw(targets), sources, targets, positions(sources), positions(targets))


BATCH = make_packed_batch()
REAL = BATCH.target_segment_ids > 0


class Loops:
    """Bahdanau et al. 2015 and Luong et al. 2015, one text at a time."""

    def __init__(self, params: Any, config: ModelConfig) -> None:
        self.params, self.config, self.cell = oracles.to_float64(params), config, config.recurrence.cell

    def logits(self, batch: Batch) -> np.ndarray:
        tied = self.config.tie_embeddings != 'none'
        table = self.params['target_embedding']['table'] if tied else self.params['output_table']
        logits = np.zeros((*batch.targets.shape, len(table)))
        for b in range(len(batch.targets)):
            for segment in set(batch.target_segment_ids[b].tolist()) - {0}:
                source = batch.inputs[b][batch.input_segment_ids[b] == segment]
                place = batch.target_segment_ids[b] == segment
                hidden = self.decode(source, batch.targets[b][place])
                logits[b, place] = hidden @ table.T + self.params.get('output_bias', 0.0)
        return logits

    def embed(self, name: str, ids: np.ndarray) -> np.ndarray:
        return self.params[name]['table'][ids] * (D**0.5 if self.config.scale_embedding else 1.0)

    def decode(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The states `[T, D]` before the vocabulary projection."""
        name = 'target_embedding' if self.config.tie_embeddings == 'all' else 'source_embedding'
        x, segments = self.embed(name, source)[None], np.ones((1, len(source)))
        summary = np.zeros(2 * D)
        for i in range(self.config.num_encoder_layers):
            own = self.params[f'encoder_{i}']
            forward = oracles.read_recurrently(self.cell, own['forward'], x, segments)
            backward = oracles.read_recurrently(self.cell, own['backward'], x, segments, reverse=True)
            summary = np.concatenate([forward[0, -1], backward[0, 0]])
            x = oracles.recurrence(self.cell, own, x, segments)
        annotations, p = x[0], self.params['decoder']
        num_states = 2 if self.cell == 'lstm' else 1
        first = np.tanh(summary @ p['initial_state']['kernel'] + p['initial_state']['bias']).reshape(-1, num_states, D)
        states = [list(own) for own in first]
        kind, fed, hidden = self.config.recurrence.attention, np.zeros(D), []
        for previous in [START, *target[:-1]]:
            y = self.embed('target_embedding', previous)
            context = None
            if kind == 'none':
                context = np.tanh(summary @ p['fixed_vector']['kernel'] + p['fixed_vector']['bias'])
            elif kind == 'bahdanau':
                context = self.attend(states[0][0], annotations)
            elif self.config.recurrence.input_feeding:
                context = fed
            s = self.step(states, y, context)
            if kind == 'luong':
                fed = np.tanh(np.concatenate([self.attend(s, annotations), s]) @ p['readout']['kernel'])
                hidden.append(fed)
            else:
                joined = np.concatenate([s, y, context])
                hidden.append(np.tanh(joined @ p['readout']['kernel'] + p['readout']['bias']))
        return np.stack(hidden)

    def step(self, states: list[list[np.ndarray]], y: np.ndarray, context: np.ndarray | None) -> np.ndarray:
        """Moves every layer's state, in place; the top layer's output."""
        x = y
        for i, state in enumerate(states):
            p = self.params['decoder'][f'layer_{i}']
            gates = np.stack([x @ p['input_kernel'][:, g] + p['bias'][g] for g in range(len(p['bias']))])
            if i == 0 and context is not None:
                gates += np.stack([context @ p['context_kernel'][:, g] for g in range(len(gates))])
            states[i] = oracles.recurrent_step(self.cell, gates, p['recurrent_kernel'], state)
            x = states[i][0]
        return x

    def attend(self, query: np.ndarray, annotations: np.ndarray) -> np.ndarray:
        own, p = self.config.recurrence, self.params['decoder'].get('attention', {})
        scores = []
        for a in annotations:
            if own.attention == 'bahdanau':
                scores.append(p['score'][0] @ np.tanh(query @ p['query_map'][0] + a @ p['key_map'][0]))
            elif own.luong_score == 'concat':
                scores.append(p['score'][0] @ np.tanh(np.concatenate([query, a]) @ p['joint_map'][0]))
            elif own.luong_score == 'general':
                scores.append(query @ p['query_map'][0] @ a)
            else:
                scores.append(query @ a)
        powers = np.exp(np.array(scores) - max(scores))
        return (powers / powers.sum()) @ annotations


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_equal_the_loops(variant: str) -> None:
    """Packed, and with padding on either side."""
    model = make_model(variant)
    params = make_params(model)
    logits = np.asarray(compute_logits(model, params, BATCH))
    oracles.assert_close(logits[REAL], Loops(params, model.config).logits(BATCH)[REAL], 1e-5)


@pytest.mark.parametrize('variant', FEW)
def test_gradients_equal_finite_differences_of_the_loops(variant: str) -> None:
    """In every parameter array along one random direction; with states computed again in the backward pass too."""
    model = make_model(variant, num_encoder_layers=1)
    params = make_params(model, seed=1)
    rng = np.random.default_rng(0)
    probe = rng.normal(size=(*REAL.shape, V)) * REAL[..., None]

    def gradient_of(model: Model) -> Any:
        batch = jax.tree.map(jnp.asarray, BATCH)
        return jax.jit(jax.grad(lambda params: (model.project(params, model.hidden(params, batch)) * probe).sum()))(
            params
        )

    gradients = gradient_of(model)
    leaves, tree = jax.tree.flatten(oracles.to_float64(params))
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.choice([-1.0, 1.0], size=gradient.shape)

        def moved(step: float, index: int = index, direction: np.ndarray = direction) -> float:
            changed = [leaf + step * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            return float((Loops(jax.tree.unflatten(tree, changed), model.config).logits(BATCH) * probe).sum())

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        gradient = np.asarray(gradient, np.float64)
        assert abs((gradient * direction).sum() - slope) <= 1e-4 * np.linalg.norm(gradient)
    if variant == 'bahdanau, gru':
        again = gradient_of(make_model(variant, ExecutionConfig(remat='full'), num_encoder_layers=1))
        jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), again, gradients)


@pytest.mark.parametrize('variant', FEW)
def test_reading_through_the_cache_equals_reading_at_once(variant: str) -> None:
    """A prefix of another length in each row, then hypotheses that are reordered twice between steps."""
    search = Search(make_model(variant), width=1, slots=9)
    search.prefill([3, 1, 4, 2])
    search.broadcast(3)
    for _ in range(2):
        search.step()
        search.reorder()
        search.reorder()
    search.step()


@pytest.mark.slow
@pytest.mark.parametrize('variant', VARIANTS)
def test_sentences_that_are_dropped_and_a_cache_that_grows(variant: str) -> None:
    search = Search(make_model(variant), width=2, slots=2)
    for _ in range(2):
        search.step()
        search.reorder()
    search.select([3, 0, 3])
    search.cache = search.model.grow(search.cache, 5)
    for _ in range(3):
        search.step()
        search.reorder()


@pytest.mark.slow
def test_reorder_moves_the_states_and_nothing_of_the_source() -> None:
    search = Search(make_model('luong, lstm, general'), width=3, slots=4)
    search.step()
    search.reorder()
    search.step()
    before = search.cache
    after = search.model.reorder(before, jnp.int32([[2, 0, 1]] * 4))
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        name = jax.tree_util.keystr(path)
        depends = name.startswith('.state.layers') or name == '.state.past.ancestors'
        assert np.array_equal(old, new) != depends, name
        if name.startswith('.state.layers'):
            assert old.shape[:2] == (4, 3)
        if name.startswith('.source'):
            assert old.shape[0] == 4


@pytest.mark.slow
def test_bfloat16_stays_near_and_decodes() -> None:
    model = make_model('bahdanau, gru', compute_dtype='bfloat16')
    hidden = jax.jit(model.hidden)(make_params(model), BATCH)
    assert hidden.dtype == jnp.bfloat16
    exact = jax.jit(make_model('bahdanau, gru').hidden)(make_params(model), BATCH)
    oracles.assert_close(np.asarray(hidden)[REAL], np.asarray(exact)[REAL], 3e-2)
    search = Search(model, width=2, slots=3, limit=0.1)  # logits reach 2.5, and bfloat16 steps by 0.02 there
    search.step()


def test_the_ids_in_padding_change_nothing() -> None:
    model = make_model('bahdanau, gru')
    rng = np.random.default_rng(0)
    filled = BATCH._replace(
        inputs=np.where(BATCH.input_segment_ids > 0, BATCH.inputs, rng.integers(3, V, BATCH.inputs.shape)),
        targets=np.where(REAL, BATCH.targets, rng.integers(3, V, BATCH.targets.shape)),
    )
    assert (filled.inputs != BATCH.inputs).any()

    params = make_params(model)
    logits, expected = (np.asarray(compute_logits(model, params, batch))[REAL] for batch in (filled, BATCH))
    np.testing.assert_array_equal(logits, expected)


def moved_by(model: Model, batch: Batch, method: str, offsets: Any) -> Any:
    """|d hidden / d offsets| summed over features; the offsets are added to what a method of the module returns."""
    params = make_params(model)

    def run(offsets: Any) -> jax.Array:
        def add(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
            outputs = function(*args, **kwargs)
            return jax.tree.map(jnp.add, outputs, offsets) if context.method_name == method else outputs

        with nn.intercept_methods(add):
            return model.hidden(params, jax.tree.map(jnp.asarray, batch))

    return jax.tree.map(lambda a: np.abs(a).sum(axis=(0, 2, 3)), jax.jit(jax.jacobian(run))(offsets))


@pytest.mark.parametrize('variant', FEW)
def test_the_future_does_not_change_the_past(variant: str) -> None:
    jacobian = moved_by(make_model(variant), make_batch([4], [5]), 'embed_target', jnp.zeros((1, 5, D)))
    np.testing.assert_array_equal(jacobian.sum(axis=-1) > 0, np.tril(np.ones((5, 5), bool)))


@pytest.mark.parametrize('variant', ['none, gru', 'bahdanau, gru'])
def test_without_attention_the_decoder_knows_the_last_states_alone(variant: str) -> None:
    """The encoder gives annotations, and the states `[forwards; backwards]` of which only the last ones count."""
    offsets = (jnp.zeros((1, 4, D)), jnp.zeros((1, 4, 2 * D)))
    annotations, states = moved_by(make_model(variant), make_batch([4], [3]), 'encode', offsets)
    forwards, backwards = states[..., :D] > 0, states[..., D:] > 0
    assert forwards[:, 3].all()
    assert backwards[:, 0].all()
    assert not forwards[:, :3].any()
    assert not backwards[:, 1:].any()
    assert (annotations > 0).all() if variant != 'none, gru' else not annotations.any()


def test_parameters() -> None:
    model = make_model('bahdanau, gru', num_encoder_layers=1)
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))
    cell = {'input_kernel': (D, 3, D), 'recurrent_kernel': (D, 3, D), 'bias': (3, D)}
    assert shapes == {
        'target_embedding': {'table': (V, D)},
        'encoder_0': {'forward': cell, 'backward': cell, 'output': {'kernel': (2 * D, D)}},
        'decoder': {
            'layer_0': {**cell, 'context_kernel': (D, 3, D)},
            'layer_1': cell,
            'initial_state': {'kernel': (2 * D, 2 * D), 'bias': (2 * D,)},
            'attention': {'query_map': (1, D, D), 'key_map': (1, D, D), 'score': (1, D)},
            'readout': {'kernel': (3 * D, D), 'bias': (D,)},
        },
    }
    axes = model.logical_axes()
    jax.tree.map(lambda names, shape: np.testing.assert_equal(len(names), len(shape)), axes, shapes,
                 is_leaf=lambda node: isinstance(node, tuple))  # fmt: skip


def test_weights_are_returned_when_asked_for() -> None:
    model = make_model('luong, lstm, general')
    batch = jax.tree.map(jnp.asarray, BATCH)
    _, sown = model.module.apply({'params': make_params(model)}, batch, batch.targets, mutable='weights')
    (weights,) = sown['weights']['cross_attention']
    assert weights.shape == (2, 1, 9, 8)
    visible = oracles.visibility(
        BATCH.target_segment_ids, BATCH.input_segment_ids, BATCH.target_positions, BATCH.input_positions, causal=False
    )
    np.testing.assert_array_equal(np.asarray(weights)[:, 0] > 0, visible)
    np.testing.assert_allclose(np.asarray(weights)[:, 0].sum(axis=-1)[REAL], 1, rtol=1e-5)


def test_dropout_acts_between_layers_too() -> None:
    model = make_model('none, gru', dropout_rate=0.4)
    batch = jax.tree.map(jnp.asarray, BATCH)
    run = jax.jit(lambda rng: model.hidden(make_params(model), batch, dropout_rng=rng))
    first, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other)[REAL].max() > 0.1
    masks: list[int] = []

    def count(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        masks.append(type(context.module).__name__ == 'Dropout')
        return function(*args, **kwargs)

    params = make_params(model)
    with nn.intercept_methods(count):
        jax.eval_shape(lambda rng: model.hidden(params, batch, dropout_rng=rng), jax.random.key(0))
    assert sum(masks) == 2 + 1 + 1 + 1  # embeddings of both sides, between two layers of each side, the output


@pytest.mark.slow
def test_it_learns_to_copy() -> None:
    model = make_model('bahdanau, gru', num_encoder_layers=1, num_decoder_layers=1)
    optimizer = optax.adam(1e-2)
    params = model.init(jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    ones = jnp.ones((16, 6), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(6), ones.shape)

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model.project(params, model.hidden(params, Batch(ids, ids, ones, ones, places, places)))
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, rng, losses = optimizer.init(params), np.random.default_rng(0), []
    for _ in range(80):
        params, state, value = step(params, state, jnp.int32(rng.integers(3, V, ones.shape)))
        losses.append(float(value))
    assert np.mean(losses[-10:]) < 2.6  # log(20) = 3.0 for who does not see the source


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'positions': 'sinusoidal'}, "positions is 'sinusoidal'; family 'recurrent' .* set it to 'none'"),
        ({'attention': AttentionConfig(window=3)}, 'attention.window is 3, but .*recurrence.attention'),
        ({'attention': AttentionConfig(kind='linear')}, "attention.kind is 'linear', but"),
        ({'encoder_mixing': 'convolution'}, "encoder_mixing is 'convolution', but .* leave it 'attention'"),
        ({'recurrence': RecurrenceConfig(attention='none', luong_score='dot')}, "luong_score is 'dot', but .* 'none'"),
        ({'recurrence': RecurrenceConfig(input_feeding=False)}, "input_feeding is False, but .* 'bahdanau'"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    config = Config(model=dataclasses.replace(ModelConfig(family='recurrent', positions='none'), **changes))
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_a_config_that_it_takes() -> None:
    config = Config(model=ModelConfig(family='recurrent', positions='none'))
    validate(config)
    assert uses_of_attention(config) == []
