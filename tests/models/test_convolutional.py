"""The convolutional encoder-decoder against loops over its equations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import oracles
from tests.models.test_decoding import Search
from tests.models.test_recurrent import make_packed_batch, moved_by
from tests.models.tiny import CONFIG, START, V, compute_logits, make_batch, make_params
from transformer_jax.config import (
    AttentionConfig,
    AttentionOverlayConfig,
    Config,
    ConfigError,
    ConvolutionConfig,
    ExecutionConfig,
    ModelConfig,
    RecurrenceConfig,
)
from transformer_jax.data.batch import Batch
from transformer_jax.models import build, uses_of_attention, validate
from transformer_jax.models.interface import Model

D = CONFIG.d_model

VARIANTS: dict[str, dict[str, Any]] = {
    'plain': {},
    'separable, dilated': {
        'convolution': ConvolutionConfig(kernel_width=4, dilation=1, dilation_growth=2, separable=True),
        'tie_embeddings': 'none',
        'output_bias': True,
    },
    'unscaled': {'attention': AttentionConfig(scale=None), 'positions': 'none', 'scale_embedding': False},
}


def make_model(variant: str, **changes: Any) -> Model:
    own = {'family': 'convolutional', 'attention': AttentionConfig()}
    config = dataclasses.replace(CONFIG, **{**own, **VARIANTS[variant], **changes})
    return build(config, vocab_size=V, start_id=START, execution=ExecutionConfig(unroll=1))


BATCH = make_packed_batch()
REAL = BATCH.target_segment_ids > 0


class Loops(oracles.Transformer):
    """Gehring et al. 2017, with the embeddings, shifting and projection that all families share."""

    def embed(self, name: str, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        embedded = super().embed(name, ids, positions)
        if self.config.positions == 'none':
            embedded -= oracles.sinusoids(self.config.max_length, D)[positions]
        return embedded

    def block(self, layer: Any, x: np.ndarray, segments: np.ndarray, index: int, *, causal: bool) -> np.ndarray:
        own = self.config.convolution
        dilation = own.dilation * own.dilation_growth**index
        return oracles.convolution(layer['convolution'], x, segments, dilation, causal=causal, gated=True)

    def encode(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        name = 'target_embedding' if self.config.tie_embeddings == 'all' else 'source_embedding'
        x = embedded = self.embed(name, batch.inputs, batch.input_positions)
        for i, layer in enumerate(self.layers('encoder', self.config.num_encoder_layers)):
            x = (x + self.block(layer, x, batch.input_segment_ids, i, causal=False)) * np.sqrt(0.5)
        return x, x + embedded

    def decode(self, batch: Batch, memory: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        keys, values = memory
        x = embedded = self.embed(
            'target_embedding', self.shift(batch.targets, batch.target_positions), batch.target_positions
        )
        for i, layer in enumerate(self.layers('decoder', self.config.num_decoder_layers)):
            y = self.block(layer, x, batch.target_segment_ids, i, causal=True)
            own = layer['attention']['query']
            found = self.attend(batch, y @ own['kernel'] + own['bias'] + embedded, keys, values)
            x = (x + (y + found) * np.sqrt(0.5)) * np.sqrt(0.5)
        return x

    def attend(self, batch: Batch, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        found = np.zeros(queries.shape)
        scale = 1.0 if self.config.attention.scale is None else D**-0.5
        for b, t in np.ndindex(queries.shape[:2]):
            seen = np.flatnonzero(batch.input_segment_ids[b] == batch.target_segment_ids[b, t])
            if batch.target_segment_ids[b, t] == 0:
                continue
            scores = keys[b, seen] @ queries[b, t] * scale
            powers = np.exp(scores - scores.max())
            found[b, t] = (powers / powers.sum()) @ values[b, seen] * np.sqrt(len(seen))
        return found


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_equal_the_loops(variant: str) -> None:
    """Packed, and with padding on either side."""
    model = make_model(variant)
    params = make_params(model)
    logits = np.asarray(compute_logits(model, params, BATCH))
    oracles.assert_close(logits[REAL], Loops(params, model.config, START).logits(BATCH)[REAL], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['plain', 'separable, dilated'])
def test_gradients_equal_finite_differences_of_the_loops(variant: str) -> None:
    """In every parameter array along one random direction."""
    model = make_model(variant, num_decoder_layers=2)
    params = make_params(model, seed=1)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(jnp.asarray, BATCH)
    probe = rng.normal(size=(*REAL.shape, V)) * REAL[..., None]

    def loss(params: Any) -> jax.Array:
        return (model.project(params, model.hidden(params, batch)) * probe).sum()

    gradients = jax.jit(jax.grad(loss))(params)
    leaves, tree = jax.tree.flatten(oracles.to_float64(params))
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.choice([-1.0, 1.0], size=gradient.shape)

        def moved(step: float, index: int = index, direction: np.ndarray = direction) -> float:
            changed = [leaf + step * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            loops = Loops(jax.tree.unflatten(tree, changed), model.config, START)
            return float((loops.logits(BATCH)[..., :V] * probe).sum())

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        gradient = np.asarray(gradient, np.float64)
        assert abs((gradient * direction).sum() - slope) <= 1e-4 * np.linalg.norm(gradient)


@pytest.mark.parametrize('variant', ['separable, dilated', pytest.param('plain', marks=pytest.mark.slow)])
def test_reading_through_the_cache_equals_reading_at_once(variant: str) -> None:
    """A prefix of another length in each row, then hypotheses that are reordered twice between steps."""
    search = Search(make_model(variant), width=1, slots=9, factor=0.7, spoil_padding=True)  # without, logits reach 32
    search.prefill([3, 1, 4, 2])
    search.broadcast(3)
    for _ in range(2):
        search.step()
        search.reorder()
        search.reorder()
    search.select([3, 0, 3])
    search.cache = search.model.grow(search.cache, 12)
    search.step()


@pytest.mark.slow
def test_reorder_moves_the_past_inputs_and_nothing_of_the_source() -> None:
    search = Search(make_model('plain'), width=3, slots=4, factor=0.7)
    search.step()
    search.reorder()
    search.step()
    after = search.model.reorder(search.cache, jnp.int32([[2, 0, 1]] * 4))
    pairs = zip(jax.tree_util.tree_leaves_with_path(search.cache), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        name = jax.tree_util.keystr(path)
        depends = name.startswith('.state.layers') or name == '.state.past.ancestors'
        # The first layer of each hypothesis has read the same start id, and another subword since.
        assert np.array_equal(old, new) != depends, name
        assert old.shape[:2] == (4, 3) if name.startswith('.state.layers') else old.shape[:1] in ((4,), ())


def test_the_future_does_not_change_the_past() -> None:
    """A kernel of 3 in three layers sees 6 rows back; attention to the source adds nothing."""
    jacobian = moved_by(make_model('plain'), make_batch([4], [9]), 'embed_target', jnp.zeros((1, 9, D)))
    expected = np.tril(np.ones((9, 9), bool)) & ~np.tril(np.ones((9, 9), bool), -7)
    np.testing.assert_array_equal(jacobian.sum(axis=-1) > 0, expected)


def test_the_ids_in_padding_change_nothing() -> None:
    model = make_model('plain')
    rng = np.random.default_rng(0)
    filled = BATCH._replace(
        inputs=np.where(BATCH.input_segment_ids > 0, BATCH.inputs, rng.integers(3, V, BATCH.inputs.shape)),
        targets=np.where(REAL, BATCH.targets, rng.integers(3, V, BATCH.targets.shape)),
    )
    params = make_params(model)
    np.testing.assert_array_equal(
        np.asarray(compute_logits(model, params, filled))[REAL], np.asarray(compute_logits(model, params, BATCH))[REAL]
    )


def test_parameters() -> None:
    model = make_model('separable, dilated')
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))

    def convolution(layers: int) -> dict[str, tuple[int, ...]]:
        return {'depthwise': (layers, 4, D), 'pointwise': (layers, D, 2 * D), 'bias': (layers, 2 * D)}

    assert shapes == {
        'source_embedding': {'table': (V, D)},
        'target_embedding': {'table': (V, D)},
        'output_table': (V, D),
        'output_bias': (V,),
        'encoder': {'layers': {'convolution': convolution(2)}},
        'decoder': {
            'layers': {
                'convolution': convolution(3),
                'attention': {'query': {'kernel': (3, D, D), 'bias': (3, D)}},
            }
        },
    }
    plain = jax.eval_shape(make_model('plain').init, jax.random.key(0))
    assert plain['encoder']['layers']['convolution']['kernel'].shape == (2, 3, D, 2 * D)


@pytest.mark.parametrize(
    ('kind', 'own'), [pytest.param('additive', 'key_map', marks=pytest.mark.slow), ('general', 'query_map')]
)
def test_any_kind_of_attention_finds_the_source(kind: str, own: str) -> None:
    attention = AttentionConfig(kind=kind, dropout_rate=0.1)
    model = make_model('plain', attention=attention, num_encoder_layers=1, num_decoder_layers=2)
    assert model.module.init  # the score's parameters are the layer's own
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert shapes['decoder']['layers']['attention'][own].shape[:2] == (2, 1)
    search = Search(model, width=2, slots=3, factor=0.7)
    for _ in range(3):
        search.step()
        search.reorder()


@pytest.mark.slow
def test_it_learns_to_copy() -> None:
    model = make_model('plain', num_encoder_layers=1, num_decoder_layers=1)
    optimizer = optax.adam(1e-2)
    params = model.init(jax.random.key(0))
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
        ({'positions': 'rope'}, "positions is 'rope', which works inside self-attention.*'sinusoidal'"),
        ({'decoder_mixing': 'recurrence'}, "decoder_mixing is 'recurrence', but"),
        ({'attention': AttentionConfig(window=3)}, 'attention.window is 3, but'),
        ({'cross': AttentionOverlayConfig(num_heads=2)}, 'cross.num_heads is 2, but .* one head'),
        ({'encoder_self': AttentionOverlayConfig(kind='linear')}, "encoder_self.kind is 'linear', but"),
        ({'recurrence': RecurrenceConfig('lstm')}, "recurrence.cell is 'lstm', but .* no recurrence"),
        (
            {'convolution': ConvolutionConfig(dilation_growth=4)},
            'in layer 6 of 6, dilation 1,024: it reaches over 2,048',
        ),
        ({'convolution': ConvolutionConfig(kernel_width=1)}, 'kernel_width is 1; it must be at least 2'),
    ],
)
def test_what_would_be_ignored_or_can_not_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Config(model=dataclasses.replace(ModelConfig(family='convolutional'), **changes)))


def test_a_config_that_it_takes() -> None:
    config = Config(model=ModelConfig(family='convolutional', positions='learned'))
    validate(config)
    (use,) = uses_of_attention(config, (61, 67))
    assert (use.name, use.max_length) == ('cross', 67)
    assert (use.config.num_heads, use.config.head_dim) == (1, 512)  # what runs, and what cuDNN has no kernel for
