"""One use of attention at toy lengths: random arrays, a mask, and the variant as a function of arrays alone."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import positions as position_schemes
from transformer_jax.attention.api import make_options
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Use, Variant
from transformer_jax.checking import position_oracle
from transformer_jax.checking.findings import Finding
from transformer_jax.checking.oracle import Oracle, visible
from transformer_jax.config import ModelConfig
from transformer_jax.shapes import Array

EXACT_LIMIT = 5e-6  # max|x - oracle| / max|oracle| in float32
LOW_LIMIT = 2e-2  # the same in bfloat16
BATCH, QUERIES, KEYS = 3, 17, 23

Arrays = tuple[Any, Any, Any, dict[str, Any]]  # q, k, v; and the parameters of the variant and of the position scheme


class Case:
    """A use with its variant, and with the position scheme of `model` where the use has one inside.

    With a `block_size` the lengths are several blocks, the last of them not whole. Positions are those of the indices;
    but where a scheme has terms and there is no block size they are 0, 1, 3, 6, ..., for offsets of all sizes.
    """

    def __init__(
        self, use: Use, variant: Variant, model: ModelConfig | None = None, *, block_size: int | None = None
    ) -> None:
        config = use.config
        self.use, self.variant, self.config, self.block_size = use, variant, config, block_size
        self.scheme = model if model is not None and (use.terms or use.turned) else None
        self.spread = self.scheme is not None and use.terms and block_size is None
        self.length_q, length_k = (QUERIES, KEYS) if block_size is None else (5 * block_size + 2, 6 * block_size + 3)
        self.length_k = length_k if use.cross else self.length_q
        rng = np.random.default_rng(zlib.crc32(use.name.encode()))
        kv_heads, value_dim = config.num_kv_heads or config.num_heads, config.value_dim or config.head_dim
        self.q = rng.normal(size=(BATCH, self.length_q, config.num_heads, config.head_dim))
        self.k = rng.normal(size=(BATCH, self.length_k, kv_heads, config.head_dim))
        self.v = rng.normal(size=(BATCH, self.length_k, kv_heads, value_dim))
        self.probe = rng.normal(size=(BATCH, self.length_q, config.num_heads, value_dim))
        declared = {'own': variant.parameters(config, max(self.length_q, self.length_k)) if variant.parameters else {}}
        described = None if self.scheme is None else position_schemes.SCHEMES[self.scheme.positions].terms_parameters
        declared['scheme'] = described(self.scheme, config) if self.scheme is not None and described else {}
        self.params = {
            owner: {name: rng.normal(size=one.shape) * 0.3 for name, one in group.items()}
            for owner, group in declared.items()
        }
        self.dtype = jnp.dtype(use.compute_dtype)
        self.limit = EXACT_LIMIT if self.dtype == jnp.float32 else LOW_LIMIT

    def mask(self, *, packed: bool = False) -> Mask:
        """Rows of several lengths, one of them full; or three segments in each row."""
        sides = []
        for length in (self.length_q, self.length_k):
            index = np.broadcast_to(np.arange(length), (BATCH, length))
            if packed:
                starts = np.array([0, length // 3, 2 * length // 3])
                segments = (index[..., None] >= starts).sum(axis=-1)
                positions = index - starts[segments - 1]
            else:
                segments, positions = (index < length - 4 * np.arange(BATCH)[:, None]).astype(int), index
            prefix = jnp.asarray(positions < length // (9 if packed else 3))
            if self.spread:
                positions = positions * (positions + 1) // 2
            sides.append((segments.astype(np.int32), positions.astype(np.int32), prefix))
        (q_segments, q_positions, _), (k_segments, k_positions, prefix) = sides
        arrays = map(jnp.asarray, (q_segments, k_segments, q_positions, k_positions))
        use, config = self.use, self.config
        aligned = not (use.cross or use.prefix or self.spread)
        mask = Mask(*arrays, k_prefix=prefix if use.prefix else None, causal=use.causal, aligned=aligned)
        return mask.within(config.window, config.window_right, config.num_global)

    def arrays(self) -> Arrays:
        """q, k and v in the type of the use, and the parameters."""
        q, k, v = (jnp.asarray(array, self.dtype) for array in (self.q, self.k, self.v))
        return q, k, v, jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), self.params)

    def run(self, q: Any, k: Any, v: Any, params: Any, mask: Mask) -> Array:
        """The variant's output."""
        terms = None
        if self.scheme is not None:
            q = position_schemes.on_heads(self.scheme, q, mask.q_positions)
            k = position_schemes.on_heads(self.scheme, k, mask.k_positions)
            terms = position_schemes.make_terms(self.scheme, self.config, params['scheme'], causal=self._one_sided)
        options = make_options(q, self.config, params=params['own'], terms=terms)
        return self.variant.function(q, k, v, mask, options)[0]

    def equation(self, oracle: Oracle, mask: Mask, q: Any, k: Any, v: Any, params: Any) -> Array:
        """What the output should be, in float64."""
        seen = visible(mask)
        q_positions, k_positions = (np.asarray(side).astype(int) for side in (mask.q_positions, mask.k_positions))
        added = ()
        if self.scheme is not None:
            if turn := position_oracle.TURNED.get(self.scheme.positions):
                q, k = turn(self.scheme, q, q_positions), turn(self.scheme, k, k_positions)
            if add := position_oracle.ADDED.get(self.scheme.positions):
                offsets = k_positions[:, None, :] - q_positions[:, :, None]
                added = (add(self.scheme, params['scheme'], offsets, self.config.num_heads, self._one_sided),)
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        return oracle(q, k, v, seen, params['own'], self.config, *added)

    @property
    def has_scheme_equation(self) -> bool:
        """Whether what the position scheme does is written out; so it is where none does anything."""
        known: set[str] = {*position_oracle.TURNED, *position_oracle.ADDED}
        return self.scheme is None or self.scheme.positions in known

    @property
    def _one_sided(self) -> bool:
        return self.use.causal and not self.use.prefix

    def finding(self, check: str, error: float | None, limit: float | None = None, note: str = '') -> Finding:
        """A finding about this use; the limit is that of its type unless another is given."""
        check = check if self.block_size is None else f'{check}, {self.block_size} at a time'
        return Finding(self.use.name, check, error, self.limit if limit is None else limit, note)
