"""Convolution along a text, plain or separable, dilated, gated or not. Table 1 of the paper, third row; section 3.5.

A kernel never reaches beyond its row's segment: what lies there counts as zero, as does padding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import ConvolutionConfig
from transformer_jax.layers.kv_cache import Reading, RunningState
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, Int


def dilation_of(config: ConvolutionConfig, index: Any) -> Any:
    """The distance between the rows that layer `index` (from 0, which may be traced) looks at."""
    if config.dilation_growth == 1:
        return config.dilation
    if index is None:
        raise ValueError('config.model.convolution.dilation_growth is above 1: a layer must be told its index')
    return config.dilation * config.dilation_growth**index


def look_around(
    inputs: Float[Array, 'B T D'],
    segment_ids: Int[Array, 'B T'],
    width: int,
    dilation: Any,
    *,
    causal: bool,
) -> Float[Array, 'B T K D']:
    """What each place of a kernel of K = `width` sees at each row: rows `dilation` apart, zeros beyond the segment.

    The last place of a causal kernel is the row itself; otherwise the kernel is centred, and one of even width reaches
    one place further to the left. `dilation` may be traced.
    """
    length = inputs.shape[1]
    inputs = jnp.where((segment_ids > 0)[..., None], inputs, 0)
    first = 1 - width if causal else -(width // 2)
    # Rows further away than the text is long are all zero, so padding by its length serves every dilation.
    reach = min(length, width * dilation) if isinstance(dilation, int) else length
    padded = jnp.pad(inputs, ((0, 0), (reach, reach), (0, 0)))
    segments = jnp.pad(segment_ids, ((0, 0), (reach, reach)))
    places = []
    for place in range(width):
        start = reach + jnp.clip((first + place) * dilation, -reach, reach)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, length, 1)
        same = jax.lax.dynamic_slice_in_dim(segments, start, length, 1) == segment_ids
        places.append(jnp.where(same[..., None], rows, 0))
    return jnp.stack(places, axis=2)


class Convolution(nn.Module):
    """A convolution of width D; separable: of each channel on its own, then a linear map. Centred unless causal.

    `gated` makes twice the channels, a and b, and gives a * sigmoid(b) (Dauphin et al., 2017). O(K T D^2) time,
    separable O(K T D + T D^2). In decoding a layer keeps the inputs that its kernel reaches back to. `index` is the
    layer's number in its stack, where the dilation grows by layer.
    """

    config: ConvolutionConfig
    d_model: int
    dtype: jnp.dtype
    causal: bool
    gated: bool = False
    init_scale: float = 1.0  # variance of the kernel: times Glorot's, or, where gated, times 1 / fan-in

    def setup(self) -> None:
        config, width = self.config, self.d_model
        outputs = width * (2 if self.gated else 1)
        if config.separable:
            depthwise = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal', in_axis=0, out_axis=(), batch_axis=1)
            self.depthwise = self._declare('depthwise', depthwise, (config.kernel_width, width), (None, 'embed'))
            pointwise = self._variance_scaling(in_axis=0, out_axis=1)
            self.pointwise = self._declare('pointwise', pointwise, (width, outputs), ('embed', 'mlp'))
        else:
            kernel, shape = self._variance_scaling(in_axis=(0, 1), out_axis=2), (config.kernel_width, width, outputs)
            self.kernel = self._declare('kernel', kernel, shape, (None, 'embed', 'mlp'))
        self.bias = self._declare('bias', nn.initializers.zeros_init(), (outputs,), ('mlp',))

    def _declare(self, name: str, initializer: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        return self.param(name, nn.with_logical_partitioning(initializer, axes), shape, jnp.float32)

    def _variance_scaling(self, **axes: Any) -> Any:
        mode, distribution = ('fan_in', 'normal') if self.gated else ('fan_avg', 'uniform')
        return nn.initializers.variance_scaling(self.init_scale, mode, distribution, **axes)

    def mix(
        self,
        inputs: Float[Array, 'B T D'],
        mask: Mask,
        shared_terms: PositionTerms | None = None,
        index: int | Int[Array, ''] | None = None,
    ) -> Float[Array, 'B T D']:
        """Each row with its neighbours in its segment, which must lie side by side."""
        if not mask.aligned or mask.k_prefix is not None:
            raise ValueError('a convolution needs the rows of a segment side by side, and has no prefix-LM')
        dilation, width = dilation_of(self.config, index), self.config.kernel_width
        return self._combine(look_around(inputs, mask.q_segments, width, dilation, causal=self.causal))

    def _combine(self, seen: Float[Array, 'B T K D']) -> Float[Array, 'B T D']:
        """The kernel over what its places see."""
        seen = seen.astype(self.dtype)
        if self.config.separable:
            rows = jnp.einsum('BTKD,KD->BTD', seen, self.depthwise.astype(self.dtype))
            outputs = rows @ self.pointwise.astype(self.dtype)
        else:
            outputs = jnp.einsum('BTKD,KDE->BTE', seen, self.kernel.astype(self.dtype))
        outputs += jnp.broadcast_to(self.bias.astype(self.dtype), outputs.shape)
        if not self.gated:
            return outputs
        values, gates = jnp.split(outputs, 2, axis=-1)
        return values * jax.nn.sigmoid(gates)

    def init_state(self, batch: int, num_slots: int, index: int | None = None) -> RunningState:
        """The last inputs that the kernel reaches back to, none yet: (K - 1) * dilation rows."""
        reach = (self.config.kernel_width - 1) * dilation_of(self.config, index)
        return RunningState.of(jnp.zeros((batch, reach, self.d_model), self.dtype))

    def extend(
        self,
        inputs: Float[Array, 'B T D'],
        state: RunningState,
        reading: Reading,
        shared_terms: PositionTerms | None = None,
        index: int | None = None,
    ) -> tuple[Float[Array, 'B T D'], RunningState]:
        """The convolution at new target rows, W hypotheses with one each or one with several, whose padding is last."""
        dilation, holds = dilation_of(self.config, index), reading.holds_by_hypothesis()
        new = jnp.where(holds[..., None], reading.by_hypothesis(inputs), 0)
        past = state.flat()
        rows = jnp.concatenate([past, new.astype(past.dtype)], axis=1)
        places = [rows[:, place * dilation :][:, : new.shape[1]] for place in range(self.config.kernel_width)]
        outputs = self._combine(jnp.stack(places, axis=2))
        last = holds.sum(axis=1)[:, None] + jnp.arange(past.shape[1])[None]
        kept = jnp.take_along_axis(rows, last[..., None], axis=1)
        return outputs.reshape(inputs.shape), state.renew(kept)
