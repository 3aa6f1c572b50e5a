"""Checks of one attention variant: against its equation in float64, and of what every variant promises."""

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import attention
from transformer_jax.attention.api import make_options
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Use, Variant
from transformer_jax.checking.findings import Finding, format_table
from transformer_jax.checking.oracle import ORACLES, Oracle, visible
from transformer_jax.config import ATTENTION_USES, AttentionConfig, ConfigError
from transformer_jax.shapes import Array

EXACT_LIMIT = 5e-6  # max|x - oracle| / max|oracle| in float32
NONE_LIMIT = 0.0  # what must not be there at all
BATCH, QUERIES, KEYS = 3, 17, 23
_USES = {
    'encoder_self': {'causal': False, 'cross': False},
    'decoder_self': {'causal': True, 'cross': False},
    'cross': {'causal': False, 'cross': True},
}


def check_variant(
    variant: Variant | str,
    config: AttentionConfig | None = None,
    *,
    oracle: Oracle | None = None,
    uses: tuple[str, ...] = ATTENTION_USES,
) -> list[Finding]:
    """Runs the suite on a variant in each use that it supports; for a test of a variant of your own.

    Args:
        variant: the `Variant`, or the kind's name (`'dot'`, `'my_module:my_attention'`).
        config: sizes and settings; the default is 6 heads of width 8.
        oracle: its equation in float64, see `checking.oracle`; None = that of a built-in kind, or no comparison.
        uses: where to check it.

    Raises `AssertionError` with the table of findings when a check fails, or when no use is supported.
    """
    config = config or AttentionConfig(num_heads=6, head_dim=8)
    if isinstance(variant, str):
        config = dataclasses.replace(config, kind=variant)
        own = attention.variants_of(config.kind)
        variant = own[attention.choose(make_use(uses[0], config))] if config.impl == 'auto' else own[config.impl]
    findings = []
    for name in uses:
        use = make_use(name, config)
        if attention.why_not(variant, use) is None:
            findings += check_use(use, variant, oracle)
    failed = [one for one in findings if not one.passed]
    if failed or not findings:
        raise AssertionError(f'{len(failed)} of {len(findings)} checks failed\n{format_table(findings)}')
    return findings


def make_use(name: str, config: AttentionConfig, **changes: Any) -> Use:
    """A use in float32 on this machine, unpacked."""
    use = Use(
        name=name, config=config, **_USES[name], packed=False, terms=False, compute_dtype='float32',
        platform=jax.default_backend(), decodes=False, max_length=KEYS,
    )  # fmt: skip
    return use._replace(**changes)


def check_use(use: Use, variant: Variant, oracle: Oracle | None = None) -> Iterator[Finding]:
    """Every check of one use."""
    case = _Case(use, variant)
    yield from _compare_with_oracle(case, oracle)
    yield _check_hidden_slots(case)
    yield _check_rows_that_see_nothing(case)
    yield _check_padding_content(case)
    yield _check_segments(case)


class _Case:
    """Random arrays and a mask for one use, and the variant as a function of arrays alone."""

    def __init__(self, use: Use, variant: Variant) -> None:
        config = use.config
        self.use, self.variant, self.config = use, variant, config
        self.length_k = KEYS if use.cross else QUERIES
        rng = np.random.default_rng(zlib.crc32(use.name.encode()))
        kv_heads, value_dim = config.num_kv_heads or config.num_heads, config.value_dim or config.head_dim
        self.q = rng.normal(size=(BATCH, QUERIES, config.num_heads, config.head_dim))
        self.k = rng.normal(size=(BATCH, self.length_k, kv_heads, config.head_dim))
        self.v = rng.normal(size=(BATCH, self.length_k, kv_heads, value_dim))
        self.probe = rng.normal(size=(BATCH, QUERIES, config.num_heads, value_dim))
        declared = variant.parameters(config, max(QUERIES, KEYS)) if variant.parameters else {}
        self.params = {name: rng.normal(size=one.shape) * 0.3 for name, one in declared.items()}

    def mask(self, *, packed: bool = False) -> Mask:
        """Rows of several lengths, one of them full; or three segments in each row."""
        sides = []
        for length in (QUERIES, self.length_k):
            index = np.broadcast_to(np.arange(length), (BATCH, length))
            if packed:
                starts = np.array([0, length // 3, 2 * length // 3])
                segments = (index[..., None] >= starts).sum(axis=-1)
                positions = index - starts[segments - 1]
            else:
                segments, positions = (index < length - 4 * np.arange(BATCH)[:, None]).astype(int), index
            sides.append((segments.astype(np.int32), positions.astype(np.int32)))
        (q_segments, q_positions), (k_segments, k_positions) = sides
        arrays = map(jnp.asarray, (q_segments, k_segments, q_positions, k_positions))
        mask = Mask(*arrays, causal=self.use.causal, aligned=not self.use.cross)
        return mask.within(self.config.window, self.config.window_right, self.config.num_global)

    def run(self, q: Any, k: Any, v: Any, params: Any, mask: Mask) -> Array:
        """The variant's output."""
        options = make_options(q, self.config, params=params)
        return self.variant.function(q, k, v, mask, options)[0]

    def arrays(self, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        """q, k, v and the parameters."""
        return jax.tree.map(lambda array: jnp.asarray(array, dtype), (self.q, self.k, self.v, self.params))

    def finding(self, check: str, error: float | None, limit: float = EXACT_LIMIT, note: str = '') -> Finding:
        """A finding about this use."""
        return Finding(self.use.name, check, error, limit, note)


def _compare_with_oracle(case: _Case, oracle: Oracle | None) -> Iterator[Finding]:
    oracle = oracle or ORACLES.get(case.config.kind)
    if oracle is None:
        for check in ('values', 'gradients'):
            yield case.finding(check, None, note='no equation was given to compare with')
        return
    mask = case.mask()
    seen = visible(mask)

    def ours(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        output = case.run(q, k, v, params, mask)
        return (output * case.probe).sum(), output

    def theirs(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        groups = q.shape[2] // k.shape[2]
        output = oracle(q, jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2), seen, params, case.config)
        return (output * case.probe).sum(), output

    gradients, output = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3), has_aux=True))(*case.arrays())
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(theirs, argnums=(0, 1, 2, 3), has_aux=True))(*case.arrays(jnp.float64))
        exact_gradients, exact_output = jax.tree.map(np.asarray, exact)
    limit, note = EXACT_LIMIT, ''
    if not case.variant.exact:
        limit, note = _approximation_limit(case.config), 'an approximation of softmax attention'
    yield case.finding('values', _error(output, exact_output), limit, note)
    errors = map(_error, jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients))
    if case.variant.exact:
        yield case.finding('gradients', max(errors), limit, note)
    else:
        finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
        yield case.finding('gradients', 0.0 if finite else np.inf, limit, 'of an approximation: finite')


def _approximation_limit(config: AttentionConfig) -> float:
    """The error of random features falls as one over the root of their number."""
    return 8.0 * (config.head_dim / config.num_features) ** 0.5


def _error(ours: Any, exact: Any) -> float:
    """max|ours - exact| / max|exact|; NaN counts as infinite."""
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(exact, np.float64))
    if not np.isfinite(difference).all():
        return np.inf
    return float(difference.max() / max(np.abs(exact).max(), 1e-30))


def _check_hidden_slots(case: _Case) -> Finding:
    """Exact zeros in the Jacobian wherever a query may not see a key: causality, windows, padding."""
    q, k, v, params = case.arrays()
    mask = case.mask()
    seen = np.asarray(visible(mask))[0]

    def influence(k: Array, v: Array) -> Array:
        return case.run(q, k, v, params, mask)[0].sum(axis=(1, 2))  # of each query

    to_k, to_v = jax.jit(jax.jacrev(influence, argnums=(0, 1)))(k, v)
    strength = np.abs(np.asarray(to_k[:, 0])).sum(axis=(2, 3)) + np.abs(np.asarray(to_v[:, 0])).sum(axis=(2, 3))
    error = float(strength[~seen].max(initial=0.0)) if np.isfinite(strength).all() else np.inf
    return case.finding('hidden keys have no influence', error, NONE_LIMIT)


def _check_rows_that_see_nothing(case: _Case) -> Finding:
    """Zeros with finite gradients, in a row of the batch without keys."""
    q, k, v, params = case.arrays()
    mask = case.mask()
    mask = dataclasses.replace(mask, k_segments=mask.k_segments.at[1].set(0))
    if not case.use.cross:
        mask = dataclasses.replace(mask, q_segments=mask.k_segments)

    def loss(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        output = case.run(q, k, v, params, mask)
        return (output * case.probe).sum(), output

    gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, params)
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    error = float(jnp.abs(output[1]).max()) if finite else np.inf
    return case.finding('a row that sees nothing gives zeros', error, NONE_LIMIT)


def _check_padding_content(case: _Case) -> Finding:
    """NaN in padding changes neither output nor gradients of real tokens."""
    mask = case.mask()
    real_q, real_k = (np.asarray(side)[:, :, None, None] > 0 for side in (mask.q_segments, mask.k_segments))
    clean = case.arrays()
    dirty = (jnp.where(real_q, clean[0], jnp.nan), *(jnp.where(real_k, a, jnp.nan) for a in clean[1:3]), clean[3])

    def loss(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        output = case.run(q, k, v, params, mask)
        return jnp.where(real_q, output * case.probe, 0).sum(), jnp.where(real_q, output, 0)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (expected_gradients, expected), (gradients, output) = run(*clean), run(*dirty)
    errors = [_error(output, expected)]
    for ours, other, real in zip(gradients[:3], expected_gradients[:3], (real_q, real_k, real_k), strict=True):
        errors.append(_error(jnp.where(real, ours, 0), jnp.where(real, other, 0)))
    errors += map(_error, jax.tree.leaves(gradients[3]), jax.tree.leaves(expected_gradients[3]))
    return case.finding('padding may hold anything', max(errors))


def _check_segments(case: _Case) -> Finding:
    """Packed segments attend as if each stood alone."""
    check = 'packed segments are as if alone'
    reason = attention.why_not(case.variant, case.use._replace(packed=True))
    if reason is not None:
        return case.finding(check, None, note=reason)
    q, k, v, params = case.arrays()
    mask = case.mask(packed=True)
    run = jax.jit(case.run)
    packed = np.asarray(run(q, k, v, params, mask))
    errors = []
    for segment in (1, 2, 3):
        own_q, own_k = (np.asarray(side)[0] == segment for side in (mask.q_segments, mask.k_segments))
        alone = dataclasses.replace(
            mask,
            q_segments=mask.q_segments[:, own_q],
            k_segments=mask.k_segments[:, own_k],
            q_positions=mask.q_positions[:, own_q],
            k_positions=mask.k_positions[:, own_k],
        )
        expected = run(q[:, own_q], k[:, own_k], v[:, own_k], params, alone)
        errors.append(_error(packed[:, own_q], expected))
    return case.finding(check, max(errors))


def require_supported(use: Use, path: str) -> Variant:
    """The variant of a configured use. Raises `ConfigError` when the table says that it can't work."""
    attention.check(use, path)
    own = attention.variants_of(use.config.kind)
    chosen = attention.choose(use)
    if chosen not in own:
        raise ConfigError(f'{path}.impl is {chosen!r}; it must be one of {", ".join(own)}')
    return own[chosen]
