"""Masks of every kind at prime lengths, and attention and its gradients as float64 loops: for what is exact."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

B, T, S, N, K, H, U = 2, 23, 29, 6, 2, 7, 5
LONG = {
    'all': [(1, 23)],
    'padded': [(1, 17), (0, 6)],
    'left': [(0, 3), (1, 20)],
    'packed': [(1, 5), (2, 11), (3, 6), (0, 1)],
}
OTHER = {
    'all': [(1, 29)],
    'padded': [(1, 11), (0, 18)],
    'left': [(0, 13), (1, 16)],
    'packed': [(1, 13), (2, 3), (4, 7), (0, 6)],
}
"""Runs of (segment, length) of the first row; the second row is the first one moved to the right by one slot."""


def place(runs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions `[B, length]`; positions count from 0 in each segment."""
    first = [segment for segment, length in runs for _ in range(length)]
    rows = [first, [0, *first[:-1]]]
    positions = [[row[:i].count(segment) for i, segment in enumerate(row)] for row in rows]
    return np.array(rows, np.int32), np.array(positions, np.int32)


def self_mask(layout: str, **rules: Any) -> Mask:
    """Queries and keys of one sequence of T."""
    segments, positions = map(jnp.asarray, place(LONG[layout]))
    if rules.pop('prefix', False):
        rules['k_prefix'] = positions < 4
    return Mask(segments, segments, positions, positions, **rules)


def cross_mask(layout: str, **rules: Any) -> Mask:
    """T queries of one sequence and S keys of another."""
    q, k = place(LONG[layout]), place(OTHER[layout])
    return Mask(*map(jnp.asarray, (q[0], k[0], q[1], k[1])), **rules)


def later_queries() -> Mask:
    """The last T of S positions look back at them all, as in decoding with a cache."""
    keys = jnp.ones((B, S), jnp.int32).at[1, :9].set(0)
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    return Mask(keys[:, S - T :], keys, positions[:, S - T :], positions, causal=True)


def key_by_key(layout: str) -> Mask:
    """A third of the keys, at random."""
    allowed = np.random.default_rng(7).random((B, T, S)) < 1 / 3
    return cross_mask(layout, allowed=jnp.asarray(allowed))


# What every exact implementation can do; `aligned` as the models say it of their self-attention.
COMMON: dict[str, Callable[[], Mask]] = {
    'self all': lambda: self_mask('all', aligned=True),
    'self padded': lambda: self_mask('padded', aligned=True),
    'self packed': lambda: self_mask('packed', aligned=True),
    'causal': lambda: self_mask('padded', causal=True, aligned=True),
    'causal left-padded': lambda: self_mask('left', causal=True, aligned=True),
    'causal packed': lambda: self_mask('packed', causal=True, aligned=True),
    'cross all': lambda: cross_mask('all'),
    'cross padded': lambda: cross_mask('padded'),
    'cross packed': lambda: cross_mask('packed'),
    'window': lambda: self_mask('packed', window=(3, 3), aligned=True),
    'window to one side': lambda: self_mask('all', window=(2, 5), aligned=True),
    'causal window': lambda: self_mask('packed', causal=True, window=(4, 0), aligned=True),
}
FURTHER: dict[str, Callable[[], Mask]] = {
    'causal, not aligned': lambda: self_mask('packed', causal=True),
    'causal, later queries': later_queries,
    'window, not aligned': lambda: self_mask('left', window=(3, 1)),
    'globals': lambda: self_mask('packed', window=(2, 2), num_global=2, aligned=True),
    'causal globals': lambda: self_mask('left', causal=True, window=(2, 0), num_global=1),
    'prefix': lambda: self_mask('packed', causal=True, prefix=True, aligned=True),
    'prefix and window': lambda: self_mask('padded', causal=True, prefix=True, window=(3, 2), aligned=True),
    'key by key': lambda: key_by_key('padded'),
}


def visible(mask: Mask) -> np.ndarray:
    """What the rules of a mask let be seen, asked of each query and key by itself: `[B, T, S]`."""
    fields = {f.name: getattr(mask, f.name) for f in dataclasses.fields(mask)}
    q_seg, k_seg, q_pos, k_pos = (np.asarray(fields[name]) for name in list(fields)[:4])
    seen = np.zeros((len(q_seg), q_seg.shape[1], k_seg.shape[1]), bool)
    for b, t, s in np.ndindex(seen.shape):
        ahead = int(k_pos[b, s]) - int(q_pos[b, t])
        may = q_seg[b, t] == k_seg[b, s] and k_seg[b, s] != 0
        if mask.causal and ahead > 0:
            may = may and mask.k_prefix is not None and bool(mask.k_prefix[b, s])
        if mask.window is not None and not -mask.window[0] <= ahead <= mask.window[1]:
            may = may and (q_pos[b, t] < mask.num_global or k_pos[b, s] < mask.num_global)
        seen[b, t, s] = may and (mask.allowed is None or bool(mask.allowed[b, t, s]))
    return seen


def make_arrays(mask: Mask, seed: int = 0, num_kv_heads: int = K, value_width: int = U) -> dict[str, np.ndarray]:
    """Random q, k, v, a bias and a gradient of the output, of the mask's lengths."""
    rng = np.random.default_rng(seed)
    (batch, num_q), num_k = mask.q_segments.shape, mask.k_segments.shape[1]
    shapes = {
        'q': (batch, num_q, N, H), 'k': (batch, num_k, num_kv_heads, H), 'v': (batch, num_k, num_kv_heads, value_width),
        'bias': (1, N, num_q, num_k), 'd_output': (batch, num_q, N, value_width),
    }  # fmt: skip
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def loops(arrays: dict[str, np.ndarray], seen: np.ndarray) -> dict[str, np.ndarray]:
    """The output, and by the chain rule the gradients of sum(output * d_output), one query and head at a time."""
    q, k, v, d_output = (arrays[name] for name in ('q', 'k', 'v', 'd_output'))
    bias = arrays.get('bias', np.zeros((1, 1, 1, 1)))
    bias = np.broadcast_to(bias, (len(q), q.shape[2], q.shape[1], k.shape[1]))
    results = {name: np.zeros_like(array) for name, array in arrays.items()}
    group, scale = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[-1])
    for b, t, n in np.ndindex(q.shape[:3]):
        keys, kv = np.flatnonzero(seen[b, t]), n // group
        if len(keys) == 0:
            continue
        logits = np.array([q[b, t, n] @ k[b, s, kv] * scale + bias[b, n, t, s] for s in keys])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        results['d_output'][b, t, n] = weights @ v[b, keys, kv]
        d_weights = v[b, keys, kv] @ d_output[b, t, n]
        d_logits = weights * (d_weights - weights @ d_weights)
        results['q'][b, t, n] = d_logits @ k[b, keys, kv] * scale
        for s, weight, change in zip(keys, weights, d_logits, strict=True):
            results['k'][b, s, kv] += change * q[b, t, n] * scale
            results['v'][b, s, kv] += weight * d_output[b, t, n]
            if 'bias' in arrays:
                results['bias'][0, n, t, s] += change
    results['output'] = results.pop('d_output')
    return results


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyTerms:
    """Every hook, by a table of clipped offsets; one leaf is no parameter."""

    keys: jax.Array
    values: jax.Array
    biases: jax.Array
    shift: jax.Array

    def offsets(self, q_positions: Any, k_positions: Any) -> Any:
        return jnp.clip(k_positions[:, None, :] - q_positions[:, :, None], -3, 3) + self.shift

    def bias(self, q_positions: Any, k_positions: Any) -> Any:
        return self.biases[self.offsets(q_positions, k_positions)].transpose(0, 3, 1, 2)

    def score_term(self, q: Any, q_positions: Any, k_positions: Any) -> Any:
        return jnp.einsum('BTNH,BTSH->BNTS', q, self.keys[self.offsets(q_positions, k_positions)])

    def output_term(self, weights: Any, q_positions: Any, k_positions: Any) -> Any:
        return jnp.einsum('BNTS,BTSU->BTNU', weights, self.values[self.offsets(q_positions, k_positions)])


class Computed(NamedTuple):
    """An output and its gradients by name."""

    output: jax.Array
    gradients: dict[str, jax.Array]


def compute(
    function: Callable, mask: Mask, arrays: dict[str, Any], dtype: Any = jnp.float32, **settings: Any
) -> Computed:
    """Output and gradients of `(q, k, v, mask, options) -> (output, ...)`; `settings` are of `AttentionConfig`."""
    wanted = {name: jnp.asarray(array, dtype) for name, array in arrays.items() if name != 'd_output'}
    gradients, output = run(function, AttentionConfig(**settings), wanted, mask, jnp.float32(arrays['d_output']))
    return Computed(output, gradients)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={'xla_backend_optimization_level': 0})
def run(function: Callable, config: AttentionConfig, wanted: dict[str, Any], mask: Mask, probe: Any) -> Any:
    """Gradients and output: one program for all masks of one kind."""

    def loss(wanted: dict[str, Any]) -> Any:
        options = Options(config, scale=H**-0.5, bias=wanted.get('bias'))
        output = function(wanted['q'], wanted['k'], wanted['v'], mask, options)[0]
        return (output.astype(jnp.float32) * probe).sum(), output

    return jax.grad(loss, has_aux=True)(wanted)


def assert_equal_loops(
    computed: Computed, arrays: dict[str, np.ndarray], seen: np.ndarray, limit: float = 5e-6
) -> None:
    """Values and gradients, each within `limit` of the greatest; exact zeros where a query sees nothing."""
    expected = loops(arrays, seen)
    output = np.asarray(computed.output, np.float32)
    oracles.assert_close(output, expected['output'], limit)
    assert (output[~seen.any(2)] == 0).all()
    for name, gradient in computed.gradients.items():
        oracles.assert_close(np.asarray(gradient, np.float32), expected[name], limit)


def dirty(mask: Mask, seen: np.ndarray, arrays: dict[str, np.ndarray], poison: float) -> dict[str, np.ndarray]:
    """The arrays with `poison` in each query that sees nothing and in each key and value that nobody sees."""
    looks, shows = seen.any(2)[..., None, None], seen.any(1)[..., None, None]
    return arrays | {
        'q': np.where(looks, arrays['q'], poison),
        'k': np.where(shows, arrays['k'], poison),
        'v': np.where(shows, arrays['v'], poison),
    }
