"""The Transformer with a recurrence or a convolution in the place of self-attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.test_decoding import Search
from tests.models.test_recurrent import make_packed_batch, moved_by
from tests.models.tiny import CONFIG, START, V, compute_logits, make_batch, make_params
from transformer_jax.attention.mask import Mask
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
from transformer_jax.layers import kv_cache
from transformer_jax.models import build, uses_of_attention, validate
from transformer_jax.models.interface import Model
from transformer_jax.models.stacks import DecoderLayer, Stack

D = CONFIG.d_model

VARIANTS: dict[str, dict[str, Any]] = {
    'recurrence': {
        'encoder_mixing': 'recurrence',
        'decoder_mixing': 'recurrence',
        'recurrence': RecurrenceConfig('lstm'),
    },
    'convolution': {
        'encoder_mixing': 'convolution',
        'decoder_mixing': 'convolution',
        'norm_order': 'pre',
        'convolution': ConvolutionConfig(dilation=2),
    },
    'growing convolution': {
        'encoder_mixing': 'convolution',
        'decoder_mixing': 'convolution',
        'convolution': ConvolutionConfig(dilation_growth=3, separable=True),
    },
    'attention, recurrence': {'decoder_mixing': 'recurrence'},
}


def make_model(variant: str, execution: ExecutionConfig | None = None, **changes: Any) -> Model:
    config = dataclasses.replace(CONFIG, **{**VARIANTS[variant], **changes})
    return build(config, vocab_size=V, start_id=START, execution=execution or ExecutionConfig(unroll=1))


BATCH = make_packed_batch()
REAL = BATCH.target_segment_ids > 0


class Loops(oracles.Transformer):
    """The Transformer of the oracle with another first sublayer."""

    def encode(self, batch: Any) -> np.ndarray:
        self.segments, self.causal, self.index = np.asarray(batch.input_segment_ids), False, 0
        return super().encode(batch)

    def decode(self, batch: Any, memory: np.ndarray) -> np.ndarray:
        self.segments, self.causal, self.index = np.asarray(batch.target_segment_ids), True, 0
        return super().decode(batch, memory)

    def join(self, layer: Any, name: str, x: np.ndarray, sublayer: Any) -> Any:
        if name != 'self_attention' or name in layer:
            return super().join(layer, name, x, sublayer)
        if 'recurrence' in layer:
            cell = self.config.recurrence.cell
            return super().join(layer, 'recurrence', x, lambda y, p: oracles.recurrence(cell, p, y, self.segments))
        own = self.config.convolution
        dilation = own.dilation * own.dilation_growth**self.index
        self.index += 1
        return super().join(
            layer,
            'convolution',
            x,
            lambda y, p: oracles.convolution(p, y, self.segments, dilation, causal=self.causal),
        )


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_equal_the_loops(variant: str) -> None:
    """Packed, and with padding on either side."""
    model = make_model(variant)
    params = make_params(model)
    logits = np.asarray(compute_logits(model, params, BATCH))
    oracles.assert_close(logits[REAL], Loops(params, model.config, START).logits(BATCH)[REAL], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['convolution', 'recurrence'])
def test_gradients_are_finite_and_reach_every_parameter(variant: str) -> None:
    """Unrolled and with all layers computed again in the backward pass."""
    model = make_model(variant, ExecutionConfig(remat='full'), num_encoder_layers=1, num_decoder_layers=1)
    batch = jax.tree.map(jnp.asarray, BATCH)

    def loss(params: Any) -> jax.Array:
        return (model.hidden(params, batch)[REAL] ** 3).sum()

    gradients = jax.jit(jax.grad(loss))(make_params(model))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


@pytest.mark.parametrize(
    'variant', [*(pytest.param(name, marks=pytest.mark.slow) for name in list(VARIANTS)[:-1]), 'attention, recurrence']
)
def test_reading_through_the_cache_equals_reading_at_once(variant: str) -> None:
    search = Search(make_model(variant), width=1, slots=9)
    search.prefill([3, 1, 4, 2])
    search.broadcast(3)
    for _ in range(2):
        search.step()
        search.reorder()
        search.reorder()
    search.step()


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['recurrence', 'convolution'])
def test_the_future_does_not_change_the_past(variant: str) -> None:
    jacobian = moved_by(make_model(variant), make_batch([4], [5]), 'embed_target', jnp.zeros((1, 5, D)))
    moved = jacobian.sum(axis=-1) > 0
    assert not np.triu(moved, 1).any()
    assert moved.diagonal().all()


def test_a_stack_whose_dilation_grows_equals_its_layers_in_turn() -> None:
    """The scan of a whole target, and each layer on its own reading row after row."""
    config = dataclasses.replace(
        CONFIG, decoder_mixing='convolution', convolution=ConvolutionConfig(dilation_growth=2), norm_order='post'
    )
    dtype, rng = jnp.dtype('float32'), np.random.default_rng(0)
    x, memory = (jnp.float32(rng.normal(size=(1, length, D))) for length in (9, 4))

    def place(length: int) -> tuple[jax.Array, jax.Array]:
        return jnp.ones((1, length), jnp.int32), jnp.arange(length)[None]

    (q_segments, q_positions), (k_segments, k_positions) = place(9), place(4)
    mask = Mask(q_segments, q_segments, q_positions, q_positions, causal=True, aligned=True)
    stack = Stack(DecoderLayer, 3, config, ExecutionConfig(unroll=1, remat='full'), dtype)
    context = (mask, memory, Mask(q_segments, k_segments, q_positions, k_positions))
    params = jax.tree.map(
        lambda leaf: jnp.float32(rng.normal(size=leaf.shape) * 0.4),
        jax.eval_shape(lambda: stack.init(jax.random.key(0), x, *context))['params'],
    )
    whole = jax.jit(stack.apply)({'params': params}, x, *context)
    past, states = kv_cache.empty_past(1, 9), [None] * 3
    for t in range(9):
        past, reading = kv_cache.read(past, jnp.zeros((1, 1), int), jnp.ones(1, int), 1, 31)
        row, memory_mask = x[:, t : t + 1], Mask(q_segments[:, :1], k_segments, reading.positions, k_positions)
        for index in range(3):
            layer = DecoderLayer(config, dtype, index)
            own = {'params': jax.tree.map(lambda leaf, index=index: leaf[index], params['layers'])}
            if t == 0:
                states[index] = layer.apply(own, 1, 9, method='init_state')
                assert states[index].leaves.shape == (1, 1, 2 * 2**index, D)
            keys_values = layer.apply(own, memory, method='project_memory')
            row, states[index] = layer.apply(own, row, states[index], reading, keys_values, memory_mask, method='step')
        oracles.assert_close(row, whole[:, t : t + 1], 1e-5)


def test_parameters_are_named_by_what_mixes() -> None:
    params = jax.eval_shape(make_model('attention, recurrence').init, jax.random.key(0))
    assert sorted(params['encoder']['layers']) == [
        'feed_forward', 'feed_forward_residual', 'self_attention', 'self_attention_residual',
    ]  # fmt: skip
    assert sorted(params['decoder']['layers']) == [
        'cross_attention', 'cross_attention_residual', 'feed_forward', 'feed_forward_residual', 'recurrence',
        'recurrence_residual',
    ]  # fmt: skip
    assert list(params['decoder']['layers']['recurrence']) == ['forward']  # and no way back
    assert params['decoder']['layers']['recurrence']['forward']['input_kernel'].shape == (3, D, 3, D)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'recurrence': RecurrenceConfig('lstm')}, "recurrence.cell is 'lstm', but neither .*_mixing is 'recurrence'"),
        ({'convolution': ConvolutionConfig(dilation=2)}, 'convolution.dilation is 2, but neither'),
        (
            {'encoder_mixing': 'recurrence', 'recurrence': RecurrenceConfig(attention='luong')},
            "recurrence.attention is 'luong', but it is of family 'recurrent'",
        ),
        (
            {'encoder_mixing': 'recurrence', 'encoder_self': AttentionOverlayConfig(window=3)},
            "encoder_self.window is 3, but config.model.encoder_mixing is 'recurrence'",
        ),
        (
            {'encoder_mixing': 'recurrence', 'decoder_mixing': 'convolution', 'attention': AttentionConfig(window=3)},
            'attention.window is 3, but no layer',
        ),
        (
            {'decoder_mixing': 'convolution', 'positions': 'alibi'},
            "positions is 'alibi', which works inside self-attention, but config.model.decoder_mixing",
        ),
        (
            {'encoder_mixing': 'convolution', 'convolution': ConvolutionConfig(dilation=128)},
            'in layer 6 of 6, dilation 128: it reaches over 256 subwords, and must stay below .* 256',
        ),
    ],
)
def test_what_would_be_ignored_or_can_not_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Config(model=dataclasses.replace(ModelConfig(), **changes)))


def test_uses_of_attention_leave_out_what_mixes_otherwise() -> None:
    config = Config(model=ModelConfig(encoder_mixing='recurrence'))
    validate(config)
    assert [use.name for use in uses_of_attention(config)] == ['decoder_self', 'cross']
