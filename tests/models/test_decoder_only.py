"""One causal stack, with or without a source before its target: against loops over one sequence, cached and packed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.test_decoding import Search
from tests.models.tiny import CONFIG, START, V, compute_logits, make_batch, make_model, make_params
from transformer_jax.config import AttentionConfig, Config, ConfigError, DecoderOnlyConfig, EvaluationConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models import build, validate
from transformer_jax.models.interface import Model
from transformer_jax.positions import SCHEMES

PREFIX = DecoderOnlyConfig()
CAUSAL = DecoderOnlyConfig(prefix='causal')
LANGUAGE_MODEL = DecoderOnlyConfig(task='language_model')
HEADS = AttentionConfig(num_heads=3, head_dim=4)  # an even width, as rope needs
TASKS = {'prefix': PREFIX, 'causal prefix': CAUSAL, 'language model': LANGUAGE_MODEL}


def make(own: DecoderOnlyConfig = PREFIX, variant: str = 'paper', **changes: Any) -> Model:
    changes = {'num_decoder_layers': 2, 'attention': HEADS} | changes
    return make_model(variant, family='decoder_only', decoder_only=own, **changes)


class Loops(oracles.Transformer):
    """The stack on one pair: source, start id and target as one sequence without padding."""

    def logits_of(self, source: list[int], target: list[int]) -> np.ndarray:
        own = self.config.decoder_only
        source = source if own.task == 'translation' else []
        read = [self.start_id, *target[:-1]]
        length = len(source) + len(read)
        positions = np.arange(length)
        name = 'target_embedding' if self.config.tie_embeddings == 'all' else 'source_embedding'
        x = self.embed('target_embedding', np.array(read), positions[len(source) :])
        if source:
            x = np.concatenate([self.embed(name, np.array(source), positions[: len(source)]), x])
        visible = np.zeros((1, length, length), bool)
        for t in range(length):
            for s in range(length):
                visible[0, t, s] = s <= t or (own.prefix == 'bidirectional' and s < len(source))
        x = x[None]
        for layer in self.layers('decoder', self.config.num_decoder_layers):
            x = self.join(layer, 'self_attention', x, lambda y, p: oracles.multi_head(p, y, y, visible))
            x = self.join(layer, 'feed_forward', x, lambda y, p: oracles.feed_forward(p, y, self.config.activation))
        hidden = self.finish('decoder', x)[0, len(source) :]
        tied = self.config.tie_embeddings != 'none'
        table = self.params['target_embedding']['table'] if tied else self.params['output_table']
        return (hidden @ table.T + self.params.get('output_bias', 0.0))[:, :V]


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('variant', ['paper', pytest.param('swish, untied, biases', marks=pytest.mark.slow)])
def test_logits_equal_the_loops(task: str, variant: str) -> None:
    attention = {} if variant == 'paper' else {'attention': dataclasses.replace(HEADS, use_bias=True)}
    model = make(TASKS[task], variant, **attention)
    params = make_params(model)
    sources, targets = [7, 4, 1], [5, 2, 6]
    batch = make_batch(sources, targets, pads=(2, 1))
    logits = np.asarray(compute_logits(model, params, batch))
    loops = Loops(params, model.config, START)  # pyright: ignore[reportAttributeAccessIssue]
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = loops.logits_of(batch.inputs[row, :source].tolist(), batch.targets[row, :target].tolist())
        oracles.assert_close(logits[row, :target], expected)


ONE_LAYER = {'num_decoder_layers': 1}
CACHED: dict[str, tuple[DecoderOnlyConfig, dict[str, Any]]] = {
    'prefix': (PREFIX, {}),
    'language model, learned': (LANGUAGE_MODEL, {'positions': 'learned'}),
    'causal prefix, running state': (CAUSAL, {'attention': dataclasses.replace(HEADS, kind='linear')}),
    'window below the step': (PREFIX, {'attention': dataclasses.replace(HEADS, window=3), 'positions': 'rope'}),
    'own tables': (PREFIX, {'tie_embeddings': 'none', 'output_bias': True, 'norm_order': 'pre'}),
    'shared heads': (PREFIX, {'attention': dataclasses.replace(HEADS, num_kv_heads=1)}),
    'global tokens': (CAUSAL, {'attention': dataclasses.replace(HEADS, window=2, num_global=1)}),
    'additive': (PREFIX, {'attention': dataclasses.replace(HEADS, kind='additive')}),
    'general': (PREFIX, {'attention': dataclasses.replace(HEADS, kind='general'), **ONE_LAYER}),
    'concat': (PREFIX, {'attention': dataclasses.replace(HEADS, kind='concat', score_dim=5), **ONE_LAYER}),
    'performer': (CAUSAL, {'attention': dataclasses.replace(HEADS, kind='performer', num_features=7), **ONE_LAYER}),
    'window to one side': (PREFIX, {'attention': dataclasses.replace(HEADS, window=3, window_right=1), **ONE_LAYER}),
    'language model, running state': (LANGUAGE_MODEL, {'attention': dataclasses.replace(HEADS, kind='linear')}),
}
CACHED |= {f'{task}, {scheme}': (TASKS[task], {'positions': scheme}) for task in TASKS for scheme in SCHEMES}
QUICK = (
    'prefix', 'language model, learned', 'causal prefix, running state', 'window below the step', 'general', 'concat',
    'performer', 'window to one side',
)  # fmt: skip


@pytest.mark.parametrize('name', [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in CACHED])
def test_hypotheses_that_are_reordered_at_every_step(name: str) -> None:
    own, changes = CACHED[name]
    search = Search(make(own, **changes), width=3, slots=5)
    for _ in range(5):
        search.step()
        search.reorder()


@pytest.mark.parametrize('own', [PREFIX, pytest.param(LANGUAGE_MODEL, marks=pytest.mark.slow)])
def test_a_forced_prefix_then_sentences_dropped_and_a_cache_that_grows(own: DecoderOnlyConfig) -> None:
    search = Search(make(own), width=1, slots=5)
    search.prefill([3, 1, 4, 2])
    search.step()
    search.broadcast(3)
    search.cache = search.model.grow(search.cache, 7)
    search.step()
    search.reorder()
    search.select([2, 1])
    search.step()


def test_the_source_is_held_once_a_sentence() -> None:
    def sizes(width: int) -> dict[str, int]:
        leaves = jax.tree_util.tree_leaves_with_path(Search(make(), width, slots=4).cache)
        return {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}

    narrow, wide = sizes(1), sizes(5)
    assert sum('.source_layers' in path for path in wide) == 4  # keys and values of 2 layers
    for path, size in wide.items():
        assert size == narrow[path] * (5 if path.startswith(('.state.layers', '.state.past.ancestors')) else 1)


def pack(batch: Batch, lengths: list[tuple[int, int]]) -> Batch:
    """The pairs of a batch one behind the other in one row, with a pad column at the end."""
    sides = []
    for side, (ids, positions) in enumerate(
        ((batch.inputs, batch.input_positions), (batch.targets, batch.target_positions))
    ):
        counts = [pair[side] for pair in lengths]
        parts = [
            np.concatenate([array[row, :n] for row, n in enumerate(counts)] + [np.zeros(1, np.int32)])[None]
            for array in (ids, np.broadcast_to(np.arange(1, len(counts) + 1)[:, None], ids.shape), positions)
        ]
        sides.append([part.astype(np.int32) for part in parts])
    (inputs, *source), (targets, *target) = sides
    return Batch(inputs, targets, source[0], target[0], source[1], target[1])


@pytest.mark.parametrize(
    ('own', 'positions'),
    [(PREFIX, 'sinusoidal'), pytest.param(CAUSAL, 't5', marks=pytest.mark.slow), (LANGUAGE_MODEL, 'rope')],
)
def test_packed_pairs_are_as_they_are_apart(own: DecoderOnlyConfig, positions: str) -> None:
    lengths = [(4, 3), (1, 5), (6, 2)]
    apart = make_batch(*[list(side) for side in zip(*lengths, strict=True)])
    model = make(own, positions=positions)
    params = make_params(model)
    expected = np.asarray(compute_logits(model, params, apart))
    packed = np.asarray(compute_logits(model, params, pack(apart, lengths)))[0]
    start = 0
    for row, (_, length) in enumerate(lengths):
        oracles.assert_close(packed[start : start + length], expected[row, :length])
        start += length


@functools.partial(jax.jit, static_argnums=0)
def compute_encoded_step(model: Model, params: Any, inputs: Any, segments: Any) -> Any:
    positions = jnp.where(segments > 0, jnp.cumsum(segments, axis=1) - 1, 0)
    cache = model.init_decode(params, model.encode(params, inputs, segments, positions), 3)
    return model.decode_step(params, jnp.full((1, 1), START), cache)[0]


@pytest.mark.parametrize('left', [0, 3])
@pytest.mark.parametrize('own', [PREFIX, pytest.param(CAUSAL, marks=pytest.mark.slow)])
def test_padding_of_the_source_on_either_side_changes_nothing(own: DecoderOnlyConfig, left: int) -> None:
    model, batch = make(own), make_batch([4], [5])
    params = make_params(model)
    expected = np.asarray(compute_logits(model, params, batch))
    pads = ((0, 0), (left, 5 - left))
    padded = batch._replace(
        inputs=np.pad(batch.inputs, pads, constant_values=V - 1),
        input_segment_ids=np.pad(batch.input_segment_ids, pads),
        input_positions=np.pad(batch.input_positions, pads),
    )
    oracles.assert_close(compute_logits(model, params, padded), expected)
    stepped = compute_encoded_step(model, params, jnp.asarray(padded.inputs), jnp.asarray(padded.input_segment_ids))
    oracles.assert_close(stepped[:, 0], expected[:, 0])


@pytest.mark.parametrize('own', [PREFIX, CAUSAL])
def test_the_zero_pattern_of_the_jacobian(own: DecoderOnlyConfig) -> None:
    """With every id once, the derivative by a row of the table is that by the place which holds the id."""
    model = make(own, tie_embeddings='none')
    params = make_params(model)
    batch = make_batch([5], [4])
    batch = batch._replace(inputs=batch.input_positions + 3, targets=batch.target_positions + 3)
    batch = jax.tree.map(jnp.asarray, batch)

    def read(tables: Any) -> tuple[Any, Any]:
        own_params = params | {name: {'table': table} for name, table in tables.items()}
        memory = model.encode(own_params, batch.inputs, batch.input_segment_ids, batch.input_positions)
        return memory.layers[-1].keys[0].sum(axis=1), model.hidden(own_params, batch)[0]

    tables = {name: params[name]['table'] for name in ('source_embedding', 'target_embedding')}
    keys, hidden = jax.jit(jax.jacrev(read))(tables)

    def depends(jacobian: Any, ids: list[int]) -> np.ndarray:
        return np.abs(np.asarray(jacobian)).max(axis=(1, 3))[:, ids] > 0

    seen = np.ones((5, 5), bool) if own.prefix == 'bidirectional' else np.tril(np.ones((5, 5), bool))
    np.testing.assert_array_equal(depends(keys['source_embedding'], [3, 4, 5, 6, 7]), seen)
    assert not np.asarray(keys['target_embedding']).any()
    assert depends(hidden['source_embedding'], [3, 4, 5, 6, 7]).all()
    read_ids = [START, 3, 4, 5]
    np.testing.assert_array_equal(depends(hidden['target_embedding'], read_ids), np.tril(np.ones((4, 4), bool)))


@pytest.mark.parametrize('task', ['prefix', 'language model'])
def test_parameters_by_formula(task: str) -> None:
    model = make(TASKS[task], positions='learned', max_length=31)
    D, F, N, H, L = CONFIG.d_model, CONFIG.d_ff, 3, 4, 2
    layer = 4 * D * N * H + 2 * D * F + F + D + 4 * D
    places = 62 if task == 'prefix' else 31  # the longest source and the longest target stand in one sequence
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == V * D + places * D + L * layer
    assert jax.tree.structure(shapes) == jax.tree.structure(
        jax.tree.map(lambda _: 0, model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    )


def check(**changes: Any) -> None:
    evaluation = EvaluationConfig(bleu=changes.pop('bleu', True), score=changes.pop('score', 'bleu'))
    validate(Config(model=dataclasses.replace(Config().model, family='decoder_only', **changes), evaluation=evaluation))


def test_what_does_not_go_together_is_refused_before_tracing() -> None:
    check()
    check(decoder_only=CAUSAL, attention=AttentionConfig(kind='linear'))
    with pytest.raises(ConfigError, match=r'decoder_self.*does not support prefix \(prefix-LM'):
        check(attention=AttentionConfig(kind='linear'))
    with pytest.raises(ConfigError, match="evaluation.bleu is True, but .* language modelling.*'loss'"):
        check(decoder_only=LANGUAGE_MODEL)
    check(decoder_only=LANGUAGE_MODEL, bleu=False, score='loss')
    with pytest.raises(ConfigError, match="tie_embeddings is 'output'.*'all'"):
        check(decoder_only=LANGUAGE_MODEL, tie_embeddings='output', bleu=False, score='loss')
    check(tie_embeddings='output')
    with pytest.raises(ConfigError, match=r'decoder_mixing is .recurrence'):
        check(decoder_mixing='recurrence')
    with pytest.raises(ConfigError, match='has no encoder'):
        check(encoder_mixing='convolution')


def test_the_number_of_encoder_layers_changes_nothing() -> None:
    config = dataclasses.replace(CONFIG, family='decoder_only')
    models = [build(dataclasses.replace(config, num_encoder_layers=n), vocab_size=V, start_id=START) for n in (1, 5)]
    first, second = (jax.eval_shape(model.init, jax.random.key(0)) for model in models)
    assert first == second
