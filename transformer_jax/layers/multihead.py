"""Multi-head attention. Section 3.2.2."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from transformer_jax import positions as position_schemes
from transformer_jax.attention import variants_of
from transformer_jax.attention.api import attention, attention_and_weights, make_options
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Variant
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.layers.declaring import declare, declare_terms
from transformer_jax.layers.kv_cache import KeyValues, Reading, RunningState, empty_key_values
from transformer_jax.parallel.platform import target_platform
from transformer_jax.parallel.rules import ambient_mesh, constrain
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, Int

_AXES_IN = ('embed', 'heads', 'head_dim')


class MultiHeadAttention(nn.Module):
    """Concat(head_1 .. head_N) W^O with head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i); self- and cross-attention.

    The pieces are methods of their own so that decoding can keep keys and values: `project_kv` once a key, then
    `attend` for each new query; `extend` does both for new rows of a target that is being decoded. Fewer key-value
    heads than query heads (multi-query, grouped-query) are shared by groups of query heads.
    """

    config: AttentionConfig
    d_model: int
    dtype: jnp.dtype
    init_scale: float = 1.0  # variance of the first kernels, times Glorot's
    scheme: ModelConfig | None = None  # whose position scheme works inside self-attention; None = none does
    causal: bool = False  # what the scheme's terms are made for
    max_length: int = 256  # of variants whose parameters depend on it

    def setup(self) -> None:
        config = self.config
        value_dim = config.value_dim or config.head_dim
        kv_heads, bias, scale = config.num_kv_heads or config.num_heads, config.use_bias, self.init_scale
        heads_in = (config.num_heads, config.head_dim)
        kv_axes = _AXES_IN if kv_heads == config.num_heads else ('embed', 'kv_heads', 'head_dim')
        self.query = _Projection((self.d_model,), heads_in, _AXES_IN, bias, self.dtype, scale)
        self.key = _Projection((self.d_model,), (kv_heads, config.head_dim), kv_axes, bias, self.dtype, scale)
        self.value = _Projection((self.d_model,), (kv_heads, value_dim), kv_axes, bias, self.dtype, scale)
        axes_out = ('heads', 'head_dim', 'embed')
        self.output = _Projection((config.num_heads, value_dim), (self.d_model,), axes_out, bias, self.dtype, scale)
        own = self._variant.parameters
        self.variant_params = declare(self, own(config, self.max_length)) if own else {}
        self.own_terms = self._declare_terms()

    @property
    def _variant(self) -> Variant:
        return next(iter(variants_of(self.config.kind).values()))

    def _declare_terms(self) -> PositionTerms | None:
        if self.scheme is None or position_schemes.SCHEMES[self.scheme.positions].shared:
            return None
        return declare_terms(self, self.scheme, self.config, causal=self.causal)

    def __call__(
        self,
        inputs_q: Float[Array, 'B T D'],
        inputs_kv: Float[Array, 'B S D'],
        mask: Mask,
        shared_terms: PositionTerms | None = None,
    ) -> Float[Array, 'B T D']:
        """Attends from every row of `inputs_q` to the rows of `inputs_kv` that `mask` lets it see."""
        if inputs_q is inputs_kv and self._packs():
            return self._attend_packed(inputs_q, mask, shared_terms)
        k, v = self.project_kv(inputs_kv, mask.k_positions)
        return self.attend(inputs_q, k, v, mask, shared_terms)

    def mix(
        self, inputs: Float[Array, 'B T D'], mask: Mask, shared_terms: PositionTerms | None = None
    ) -> Float[Array, 'B T D']:
        """Self-attention, as the token-mixing layer of a stack."""
        return self(inputs, inputs, mask, shared_terms)

    def project_kv(
        self, inputs_kv: Float[Array, 'B S D'], positions: Int[Array, 'B S'] | None = None
    ) -> tuple[Float[Array, 'B S K H'], Float[Array, 'B S K U']]:
        """Keys and values of these rows; a scheme that turns keys by their positions needs those."""
        return self._place(self.key(inputs_kv), positions), self.value(inputs_kv)

    def attend(
        self,
        inputs_q: Float[Array, 'B T D'],
        k: Float[Array, 'B S K H'],
        v: Float[Array, 'B S K U'],
        mask: Mask,
        shared_terms: PositionTerms | None = None,
        *,
        cached: bool = False,
    ) -> Float[Array, 'B T D']:
        """Attends from these rows to keys and values made earlier."""
        q = self._place(self.query(inputs_q), mask.q_positions)
        return self._attend(q, k, v, mask, shared_terms, cached=cached)

    def _packs(self) -> bool:
        """Whether self-attention makes queries, keys and values as one product: where a kernel may take them so."""
        config = self.config
        equal = config.num_kv_heads in (None, config.num_heads) and config.value_dim in (None, config.head_dim)
        placed = self.scheme is not None and position_schemes.SCHEMES[self.scheme.positions].on_heads is not None
        return self._projects() and equal and not placed

    def _projects(self) -> bool:
        """Whether the output projection goes with the attention: where a kernel may take it with its own products."""
        return target_platform() == 'tpu' and ambient_mesh() is None and not self.config.use_bias

    def _attend_packed(
        self, inputs: Float[Array, 'B T D'], mask: Mask, shared_terms: PositionTerms | None
    ) -> Float[Array, 'B T D']:
        matrices = [projection.matrix() for projection in (self.query, self.key, self.value)]
        packed = checkpoint_name(inputs.astype(self.dtype) @ jnp.concatenate(matrices, axis=1), 'heads')
        shape = *inputs.shape[:2], self.config.num_heads, self.config.head_dim
        q, k, v = (part.reshape(shape) for part in jnp.split(packed, 3, axis=-1))
        return self._attend(q, k, v, mask, shared_terms, packed=packed)

    def _attend(
        self, q: Array, k: Array, v: Array, mask: Mask, shared_terms: PositionTerms | None, **given: Any
    ) -> Float[Array, 'B T D']:
        use_dropout = self.config.dropout_rate > 0 and self.has_rng('dropout')
        rng = self.make_rng('dropout') if use_dropout else None
        terms = self.own_terms if shared_terms is None else shared_terms
        options = {'params': self.variant_params, 'terms': terms}
        if self.is_mutable_collection('weights'):  # asked for by `apply(..., mutable='weights')`
            output, weights = attention_and_weights(q, k, v, mask, self.config, **options)
            self.sow('weights', 'weights', weights)
            return self.output(output)
        if self._projects():
            given['projection'] = self.output.matrix()
        heads = attention(q, k, v, mask, self.config, dropout_rng=rng, **given, **options)
        return heads if self._projects() else self.output(heads)

    def init_state(self, batch: int, num_slots: int) -> 'KeyValues | RunningState':
        """What a decode keeps of this self-attention: keys and values, or the running sums of a kind that has them."""
        config, running = self.config, self._variant.running
        if running is not None:
            return RunningState.of(running.init(batch, config, self.dtype))
        kv_heads = config.num_kv_heads or config.num_heads
        return empty_key_values(
            batch, num_slots, kv_heads, config.head_dim, config.value_dim or config.head_dim, self.dtype
        )

    def extend(
        self,
        inputs: Float[Array, 'B T D'],
        state: 'KeyValues | RunningState',
        reading: Reading,
        shared_terms: PositionTerms | None = None,
    ) -> tuple[Float[Array, 'B T D'], 'KeyValues | RunningState']:
        """Self-attention of new target rows, W hypotheses with one each or one with several, to all they have read."""
        k, v = self.project_kv(inputs, reading.positions)
        if isinstance(state, KeyValues):
            state = state.write(k, v, reading)
            return self.attend(inputs, state.keys, state.values, reading.mask, shared_terms, cached=True), state
        running = self._variant.running
        assert running is not None
        q = self._place(self.query(inputs), reading.positions)
        options = make_options(q, self.config, params=self.variant_params)
        rows = [reading.by_hypothesis(array) for array in (q, k, v)]
        output, new = running.extend(state.flat(), *rows, reading.holds_by_hypothesis(), options)
        return self.output(output.reshape(*inputs.shape[:2], *output.shape[2:])), state.renew(new)

    def _place(self, heads: Float[Array, 'B T N H'], positions: Int[Array, 'B T'] | None) -> Float[Array, 'B T N H']:
        if self.scheme is None or positions is None:
            return heads
        return position_schemes.on_heads(self.scheme, heads, positions)


class SharedTerms(nn.Module):
    """The terms of a scheme whose parameters a whole stack shares; None where the scheme has none of the kind."""

    config: ModelConfig
    use: str
    causal: bool

    @nn.compact
    def __call__(self) -> PositionTerms | None:
        if not position_schemes.SCHEMES[self.config.positions].shared:
            return None
        return declare_terms(self, self.config, self.config.attention_of(self.use), causal=self.causal)


class _Projection(nn.Module):
    """A linear map between groups of axes, as one matrix product; uniform as Glorot's over the flattened matrix."""

    axes_in: tuple[int, ...]
    axes_out: tuple[int, ...]
    logical_axes: tuple[str, ...]
    use_bias: bool
    dtype: jnp.dtype
    init_scale: float

    def setup(self) -> None:
        shape = (*self.axes_in, *self.axes_out)
        num_in = len(self.axes_in)
        glorot = nn.initializers.variance_scaling(
            self.init_scale,
            'fan_avg',
            'uniform',
            in_axis=tuple(range(num_in)),
            out_axis=tuple(range(num_in, len(shape))),
        )
        partitioned: Any = nn.with_logical_partitioning  # whose stub says that `param` returns the box
        self.kernel = self.param('kernel', partitioned(glorot, self.logical_axes), shape, jnp.float32)
        if self.use_bias:
            zeros = partitioned(nn.initializers.zeros_init(), self.logical_axes[num_in:])
            self.bias = self.param('bias', zeros, self.axes_out, jnp.float32)

    def matrix(self) -> Float[Array, 'D E']:
        """All axes in by all axes out."""
        return self.kernel.reshape(math.prod(self.axes_in), -1).astype(self.dtype)

    def __call__(self, inputs: Array) -> Array:
        num_in = len(self.axes_in)
        lead = inputs.shape[: inputs.ndim - num_in]
        rows = inputs.reshape(*lead, math.prod(self.axes_in)).astype(self.dtype)
        outputs = rows @ self.matrix()
        if num_in == 1:
            outputs = checkpoint_name(outputs, 'heads')
        outputs = outputs.reshape(*lead, *self.axes_out)
        if len(self.axes_out) > 1:
            outputs = constrain(outputs, 'batch', 'length', *self.logical_axes[num_in:])
        if self.use_bias:
            outputs += jnp.expand_dims(self.bias.astype(self.dtype), tuple(range(len(lead))))
        return outputs
