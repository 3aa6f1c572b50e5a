"""Encoder and decoder layers, and stacks of them as one scanned module. Section 3.1, Figure 1.

The layer that mixes tokens is the paper's self-attention, or in its place a recurrence or a convolution (Table 1).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import ExecutionConfig, ModelConfig
from transformer_jax.layers.convolution import Convolution
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.kv_cache import LayerState, Reading
from transformer_jax.layers.multihead import MultiHeadAttention
from transformer_jax.layers.norm import Rows, finish
from transformer_jax.layers.recurrence import Recurrence
from transformer_jax.layers.residual import Residual, make_norm, open_rows
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, Int, Params

_NAMES = ('heads', 'stream', 'normalised', 'segments')
REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # By what the layers name: keeps what costs a product, makes attention, norms and dropout bits again.
    'names': jax.checkpoint_policies.save_only_these_names(*_NAMES, 'hidden'),
    # Without the hidden rows of feed-forward layers, the widest by far: one product of a layer is made again.
    'narrow': jax.checkpoint_policies.save_only_these_names(*_NAMES),
}


# By `config.encoder_mixing` and `decoder_mixing`: what the sublayer is called among the parameters.
MIXING_NAMES = {'attention': 'self_attention', 'recurrence': 'recurrence', 'convolution': 'convolution'}
Mixing = MultiHeadAttention | Recurrence | Convolution


def make_attention(config: ModelConfig, use: str, dtype: jnp.dtype, *, causal: bool = False) -> MultiHeadAttention:
    """Attention in one of its uses: 'encoder_self', 'decoder_self' or 'cross'."""
    return MultiHeadAttention(
        config.attention_of(use),
        config.d_model,
        dtype,
        config.init_scale,
        scheme=None if use == 'cross' else config,
        causal=causal,
        max_length=config.max_length,
    )


def _make_mixing(config: ModelConfig, side: str, dtype: jnp.dtype) -> Mixing:
    """The token-mixing layer of an 'encoder' or a 'decoder'."""
    causal = side == 'decoder'
    match mixing_of(config, side):
        case 'recurrence':
            return Recurrence(config.recurrence, config.d_model, dtype, causal)
        case 'convolution':
            return Convolution(config.convolution, config.d_model, dtype, causal, init_scale=config.init_scale)
        case _:
            return make_attention(config, f'{side}_self', dtype, causal=causal)


def mixing_of(config: ModelConfig, side: str) -> str:
    """What mixes tokens in the 'encoder' or the 'decoder'."""
    return config.encoder_mixing if side == 'encoder' else config.decoder_mixing


class _MixingLayer(nn.Module):
    """A layer with a token-mixing sublayer, which has a name of its own among the parameters by what it is.

    `index` is the layer's number in its stack; only convolutions whose dilation grows must know it. A scanned layer,
    which stands for all, is given it with each call.
    """

    config: ModelConfig
    dtype: jnp.dtype
    index: int | None = None

    side = ''  # 'encoder' or 'decoder'
    takes_open_rows = True  # takes and returns `Normalised` rows

    def _declare_mixing(self) -> None:
        setattr(self, self._mixing_name, _make_mixing(self.config, self.side, self.dtype))
        setattr(self, f'{self._mixing_name}_residual', Residual(self.config, self.dtype))

    @property
    def _mixing_name(self) -> str:
        return MIXING_NAMES[mixing_of(self.config, self.side)]

    @property
    def _mixing(self) -> Any:
        return getattr(self, self._mixing_name)

    @property
    def _mixing_residual(self) -> Residual:
        return getattr(self, f'{self._mixing_name}_residual')

    def _index_of(self, index: int | Array | None = None) -> dict[str, Any]:
        """The option `index` of a mixing that takes it."""
        convolves = mixing_of(self.config, self.side) == 'convolution'
        return {'index': self.index if index is None else index} if convolves else {}


def make_feed_forward(config: ModelConfig, dtype: jnp.dtype) -> FeedForward:
    """The feed-forward sublayer of a config."""
    return FeedForward(config.d_ff, config.activation, config.activation_dropout_rate, dtype, config.init_scale)


class EncoderLayer(_MixingLayer):
    """Token mixing (the paper's self-attention), then feed-forward."""

    side = 'encoder'

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self._declare_mixing()
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(
        self,
        inputs: Rows,
        mask: Mask,
        terms: PositionTerms | None = None,
        index: Int[Array, ''] | None = None,
    ) -> Rows:
        x = self._mixing_residual(finish(inputs), lambda y: self._mixing.mix(y, mask, terms, **self._index_of(index)))
        return self.feed_forward_residual.leave_open(x, self.feed_forward)


class DecoderLayer(_MixingLayer):
    """Causal token mixing (the paper's self-attention), cross-attention to the encoder's output, then feed-forward."""

    side = 'decoder'

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self._declare_mixing()
        self.cross_attention = make_attention(config, 'cross', dtype)
        self.cross_attention_residual = Residual(config, dtype)
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(
        self,
        inputs: Rows,
        mask: Mask,
        memory: Float[Array, 'B S D'],
        memory_mask: Mask,
        terms: PositionTerms | None = None,
        index: Int[Array, ''] | None = None,
    ) -> Rows:
        x = self._mixing_residual(finish(inputs), lambda y: self._mixing.mix(y, mask, terms, **self._index_of(index)))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention(y, memory, memory_mask))
        return self.feed_forward_residual.leave_open(x, self.feed_forward)

    def project_memory(self, memory: Float[Array, 'B S D']) -> tuple[Array, Array]:
        """Cross keys and values, computed once a sentence."""
        return self.cross_attention.project_kv(memory)

    def init_state(self, batch: int, num_slots: int) -> LayerState:
        """What the layer keeps of the target read so far."""
        return self._mixing.init_state(batch, num_slots, **self._index_of())

    def step(
        self,
        inputs: Float[Array, 'B T D'],
        state: LayerState,
        reading: Reading,
        memory_kv: tuple[Array, Array],
        memory_mask: Mask,
        terms: PositionTerms | None = None,
    ) -> tuple[Float[Array, 'B T D'], LayerState]:
        """The layer on new rows only."""
        new_state = state

        def mix(y: Array) -> Array:
            nonlocal new_state
            mixed, new_state = self._mixing.extend(y, state, reading, terms, **self._index_of())
            return mixed

        x = self._mixing_residual(inputs, mix)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend(y, *memory_kv, memory_mask, cached=True)
        )
        return self.feed_forward_residual(x, self.feed_forward), new_state


class Stack(nn.Module):
    """`num_layers` equal layers with their parameters stacked on a leading axis, then the final norm of pre-norm.

    `unroll` layers stand in the program a loop turn; the parameter tree is the same whatever it is.
    """

    layer: type[nn.Module]
    num_layers: int
    config: ModelConfig
    execution: ExecutionConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: Float[Array, 'B T D'], *context: Any) -> Float[Array, 'B T D']:
        layer: Any = self.layer
        unroll = min(self.execution.unroll or self.num_layers, self.num_layers)
        if self.execution.remat != 'none':
            # Without a loop between the two passes the compiler would keep what it finds computed twice.
            prevent_cse = unroll == self.num_layers
            layer = nn.remat(layer, policy=REMAT_POLICIES[self.execution.remat], prevent_cse=prevent_cse)

        # Layers that differ by their dilation alone are still one program, which is told the number of its layer.
        index = jnp.arange(self.num_layers) if self.config.convolution.dilation_growth > 1 else None

        def body(module: nn.Module, carry: Any, index: Array | None, *context: Any) -> tuple[Any, None]:
            return module(carry, *context, **({} if index is None else {'index': index})), None

        scanned = nn.scan(
            body,
            variable_axes={'params': 0, 'weights': 0},  # attention weights are there only where they are asked for
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, *(nn.broadcast,) * len(context)),  # pyright: ignore[reportArgumentType]
            length=self.num_layers,
            unroll=unroll,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        rows = open_rows(self.config, inputs) if getattr(self.layer, 'takes_open_rows', False) else inputs
        rows, _ = scanned(layer(self.config, self.dtype, name='layers'), rows, index, *context)
        x = finish(rows)
        return make_norm(self.config, self.dtype, 'final_norm')(x) if self.config.norm_order == 'pre' else x


def apply_layer(layer: nn.Module, params: Params, index: int, *args: Any, method: str) -> Any:
    """A method of one decoder layer on its own, outside the stack's loop: a decode unrolls the layers."""
    own = jax.tree.map(lambda stacked: stacked[index], params['decoder']['layers'])
    return layer.apply({'params': own}, *args, method=method)


def finish_decode(config: ModelConfig, params: Params, x: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
    """What follows a decoder's layers: in pre-norm order a norm."""
    if config.norm_order == 'post':
        return x
    norm: Any = make_norm(config, jnp.dtype(config.compute_dtype))
    return norm.apply({'params': params['decoder']['final_norm']}, x)
