"""Performer: random features whose products estimate the softmax's exponentials. Choromanski et al., 2021."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.linear import feature_variant
from transformer_jax.attention.variant import Options
from transformer_jax.shapes import Array, Float


@functools.cache
def draw_directions(num_features: int, head_dim: int, seed: int) -> np.ndarray:
    """The directions `[F, H]` of the features, float64: each standard normal, orthogonal in blocks of `head_dim`.

    Blocks come in pairs of opposite sign, which estimates an exponential with less variance than two blocks drawn apart
    (the paper's hyperbolic features). A function of its arguments alone; all heads and layers share it.
    """
    generator = np.random.default_rng(seed)
    blocks: list[np.ndarray] = []
    while len(blocks) * head_dim < num_features:
        orthogonal, triangular = np.linalg.qr(generator.normal(size=(head_dim, head_dim)))
        orthogonal = orthogonal * np.sign(np.diag(triangular))  # every rotation as likely as any other
        lengths = np.linalg.norm(generator.normal(size=(head_dim, head_dim)), axis=1, keepdims=True)
        blocks += [lengths * orthogonal.T, -lengths * orthogonal.T]
    directions = np.concatenate(blocks)[:num_features]
    directions.flags.writeable = False  # it is cached
    return directions


def random_features(
    rows: Float[Array, 'B T N H'], options: Options
) -> tuple[Float[Array, 'B T N F'], Float[Array, 'B T N']]:
    """exp(w x - |x|^2 / 2) for each direction w, with x = row sqrt(scale): products average to exp(scale q k).

    The common factor 1 / sqrt(F) of the paper cancels in attention and is left out. Each row is divided by its largest
    feature, whose logarithm is returned.
    """
    config = options.config
    directions = jnp.asarray(draw_directions(config.num_features, rows.shape[-1], config.feature_seed), rows.dtype)
    x = rows * options.scale**0.5
    exponents = jnp.einsum('BTNH,FH->BTNF', x, directions) - (x * x).sum(axis=-1, keepdims=True) / 2
    log_scale = jax.lax.stop_gradient(exponents.max(axis=-1))
    log_scale = jnp.where(jnp.isfinite(log_scale), log_scale, 0)  # of a row so long that all its features are 0
    return jnp.exp(exponents - log_scale[..., None]), log_scale


PERFORMER = feature_variant(
    random_features,
    lambda config: config.num_features,
    exact=False,
    further=frozenset({'rotary'}),
    reads=frozenset({'scale', 'num_features', 'feature_seed'}),
)
