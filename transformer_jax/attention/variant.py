"""What one variant of attention declares of itself, and what it is given besides q, k, v and the mask."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig
from transformer_jax.parameters import Parameter
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, PRNGKey

# What a variant can say of itself in `Variant.supports`, and what that means.
FEATURES: dict[str, str] = {
    'causal': 'hides later positions',
    'cross': 'queries and keys of different sequences',
    'segments': 'several segments in a row (packing); padding is supported by all',
    'window': 'a sliding window',
    'globals': 'global tokens beside a window',
    'prefix': 'prefix-LM: a part that every query of its segment sees',
    'grouped_heads': 'fewer key-value heads than query heads',
    'value_dim': 'd_v other than d_k',
    'key_masks': 'a mask given key by key',
    'bias': 'an additive bias on the logits',
    'positions': 'position schemes with terms inside attention',
    'rotary': "queries and keys turned by their positions (positions='rope'), whose scores know offsets alone",
    'dropout': 'dropout on the weights',
    'weights': 'returns the weights',
    'sequence': 'lengths split over devices, the mesh axis `sequence`',
    'cache': 'decoding with cached keys and values, or with a running state',
    'cpu': 'runs on CPU',
    'gpu': 'runs on GPU',
    'tpu': 'runs on TPU',
    'float32': 'computes in float32',
    'bfloat16': 'computes in bfloat16',
}


# Fields of `AttentionConfig` that are of some variants alone; see `Variant.reads`.
OWN_FIELDS = ('scale', 'block_size', 'num_features', 'feature_seed', 'rank', 'score_dim')


class Options(NamedTuple):
    """What a variant is given besides q, k, v and the mask. `None` = absent."""

    config: AttentionConfig  # static: block size, number of features, ...
    scale: float = 1.0  # the logits are q k^T times this
    params: Mapping[str, Array] = {}  # the variant's own, by the names in `Variant.parameters`
    bias: Float[Array, '#B #N #T #S'] | None = None  # added to the scaled logits
    terms: PositionTerms | None = None
    dropout_rng: PRNGKey | None = None  # given = dropout of `config.dropout_rate` on the weights
    return_weights: bool = False
    cached: bool = False  # k and v are a cache: zeros in slots that hold no token, so that nothing has to be emptied
    packed: Float[Array, 'B T E'] | None = None  # q, k and v side by side, E = 3 N H; most variants leave them alone
    projection: Float[Array, 'F D'] | None = None  # W^O, F = N U; given to variants with `projects` alone


class Running(NamedTuple):
    """Decoding with a state of constant size in place of cached keys and values.

    `init(batch, config, dtype)` makes the state of `batch` sequences, a pytree whose leaves have the sequence axis
    first. `extend(state, q, k, v, holds, options)` reads T new rows of each sequence, of which those where `holds`
    (bool `[B, T]`) is False are padding that changes no state, and returns `(output [B, T, N, U], state)`.
    """

    init: Callable
    extend: Callable


class Use(NamedTuple):
    """Where a variant is asked to work: the context that its `check` judges, on the host before tracing."""

    name: str  # encoder_self, decoder_self or cross
    config: AttentionConfig
    causal: bool
    cross: bool
    packed: bool
    terms: bool  # the position scheme has terms inside attention
    compute_dtype: str
    platform: str  # cpu, gpu or tpu
    decodes: bool  # the model generates with a cache
    max_length: int
    prefix: bool = False
    turned: bool = False  # the position scheme turns queries and keys
    sequence_shards: int = 1  # ways the mesh splits lengths
    by_index: bool = True  # the mask may be taken by index: it is aligned, or neither causal nor a window


class Variant(NamedTuple):
    """One (kind, impl): its function `(q, k, v, mask, options) -> (output, weights or None)`, and what it supports.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, U]`, the output `[B, T, N, U]`. A query that may see nothing
    gets zeros with finite gradients; NaN in a padding slot reaches nobody.
    """

    function: Callable[..., tuple[Array, Array | None]]
    supports: frozenset[str]
    check: Callable[[Use], str | None] | None = None  # what a set can't say: a message, or None when it works
    parameters: Callable[[AttentionConfig, int], dict[str, Parameter]] | None = None  # by config and max_length
    running: Running | None = None
    projects: bool = False  # the output is already `[B, T, D]` where the options have a projection
    exact: bool = True  # equals the definition of its kind; False = an approximation of `dot`
    reads: frozenset[str] = frozenset(OWN_FIELDS)  # those that have an effect; a changed one that has none is refused


def refuse_unsupported(supports: frozenset[str], mask: Mask, options: Options, *, name: str, advice: str) -> None:
    """Raises `ValueError` for what a call asks of a variant beyond what it supports.

    Configs are checked before (`attention.check`); this is for what only the call itself knows.
    """
    asked = {
        'causal': mask.causal,
        'window': mask.window is not None,
        'globals': mask.num_global > 0,
        'prefix': mask.k_prefix is not None,
        'key_masks': mask.allowed is not None,
        'bias': options.bias is not None,
        'positions': options.terms is not None,
        'dropout': options.dropout_rng is not None,
        'weights': options.return_weights,
    }
    if missing := [feature for feature, is_asked in asked.items() if is_asked and feature not in supports]:
        words = ', '.join(f'{feature} ({FEATURES[feature]})' for feature in missing)
        raise ValueError(f'{name} does not support {words}: {advice}')


def project(heads: Float[Array, 'B T N U'], projection: Float[Array, 'F D'] | None) -> Array:
    """The heads' outputs side by side, F = N U, times the product that follows; as they are where there is none."""
    return heads if projection is None else heads.reshape(*heads.shape[:2], -1) @ projection
