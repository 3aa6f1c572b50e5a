"""The one attention function: three uses (encoder self, causal self, cross), every variant."""

from transformer_jax.attention import VARIANTS
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array, Float, PRNGKey


def attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S N H'],
    v: Float[Array, 'B S N U'],
    mask: Mask,
    config: AttentionConfig,
    *,
    dropout_rng: PRNGKey | None = None,
) -> Float[Array, 'B T N U']:
    """Attends from `q` to `k` and `v` where `mask` allows. Dropout on the weights is on when `dropout_rng` is given."""
    variant = VARIANTS[config.kind, resolve(config)]
    scale = q.shape[-1] ** -0.5
    output, _ = variant.function(q, k, v, mask, scale=scale, dropout_rate=config.dropout_rate, dropout_rng=dropout_rng)
    return output


def resolve(config: AttentionConfig) -> str:
    """The implementation that `impl='auto'` stands for on this machine."""
    return 'dense' if config.impl == 'auto' else config.impl
