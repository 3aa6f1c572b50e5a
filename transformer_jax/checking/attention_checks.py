"""Checks of one attention variant: against its equation in float64, and of what every variant promises."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import attention
from transformer_jax.attention.variant import Use, Variant
from transformer_jax.checking import oracle as oracles
from transformer_jax.checking.case import EXACT_LIMIT, KEYS, QUERIES, Case
from transformer_jax.checking.findings import Finding, format_table, relative_error
from transformer_jax.checking.oracle import ORACLES, Oracle, visible
from transformer_jax.config import ATTENTION_USES, AttentionConfig, ModelConfig
from transformer_jax.shapes import Array

NONE_LIMIT = 0.0  # what must not be there at all
RANDOM_LIMIT = 5e-5  # like the exact one, where sums are of exponentials of random products
_SMALL_BLOCKS = (5, 16, 128)  # those tried, for a check of more than one block; kernels take certain sizes alone
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
        oracle: its equation in float64, see `checking.oracle`; None = that of a built-in kind, or no comparison. That
            of an approximation says what it computes given what it draws.
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


def implementations(use: Use) -> Iterator[tuple[Use, Variant]]:
    """What a configured use runs with, without dropout: 'auto' may take another variant for short texts than for long.

    First the one for the longest text. In float32 where the variant has it. Raises `ConfigError` when the table says
    that the use can't work.
    """
    attention.check(use, f'config.model.{use.name}')
    own = attention.variants_of(use.config.kind)
    for impl in dict.fromkeys(map(attention.choose, (use, use._replace(max_length=min(use.max_length, KEYS))))):
        config = dataclasses.replace(use.config, impl=impl, dropout_rate=0.0)
        checked = use._replace(name=f'{use.name}, {impl}', config=config, packed=False)
        exact = checked._replace(compute_dtype='float32')
        yield (exact if attention.why_not(own[impl], exact) is None else checked), own[impl]


def check_use(
    use: Use, variant: Variant, oracle: Oracle | None = None, model: ModelConfig | None = None
) -> Iterator[Finding]:
    """Every check of one use, with the position scheme of `model`; in blocks as well where the variant takes a size."""
    for size in (None, *small_block(use, variant)):
        config = use.config if size is None else dataclasses.replace(use.config, block_size=size)
        case = Case(use._replace(config=config), variant, model, block_size=size)
        for finding in _check_case(case, oracle):
            if size is None or finding.error is not None:  # why a check was not run is said once
                yield finding


def small_block(use: Use, variant: Variant) -> list[int]:
    """A block size that makes several blocks of a few rows, where the config's own makes one."""
    own = use.config.block_size
    if 'block_size' not in variant.reads or (own is not None and own < QUERIES):
        return []
    sizes = (size for size in _SMALL_BLOCKS if own is None or size < own)
    tried = ((size, use._replace(config=dataclasses.replace(use.config, block_size=size))) for size in sizes)
    return [size for size, other in tried if attention.why_not(variant, other) is None][:1]


def _check_case(case: Case, oracle: Oracle | None) -> Iterator[Finding]:
    yield from _compare_with_oracle(case, oracle)
    if not case.variant.exact:
        yield _check_approximation(case)
    yield _check_hidden_slots(case)
    yield _check_rows_that_see_nothing(case)
    yield _check_padding_content(case)
    yield _check_segments(case)


def _compare_with_oracle(case: Case, oracle: Oracle | None) -> Iterator[Finding]:
    oracle = oracle or ORACLES.get(case.config.kind)
    if oracle is None or not case.has_scheme_equation:
        of = '' if oracle is None or case.scheme is None else f' of positions {case.scheme.positions!r}'
        for check in ('values', 'gradients'):
            yield case.finding(check, None, note=f'no equation{of} was given to compare with')
        return
    mask = case.mask()

    def ours(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        output = case.run(q, k, v, params, mask)
        return (output * case.probe).sum(), output

    def theirs(q: Array, k: Array, v: Array, params: Any) -> tuple[Array, Array]:
        output = case.equation(oracle, mask, q, k, v, params)
        return (output * case.probe).sum(), output

    gradients, output = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3), has_aux=True))(*case.arrays())
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(theirs, argnums=(0, 1, 2, 3), has_aux=True))(*oracles.to_float64(case.arrays()))
        exact_gradients, exact_output = jax.tree.map(np.asarray, exact)
    limit = case.limit if case.variant.exact else max(case.limit, RANDOM_LIMIT)
    yield case.finding('values', relative_error(output, exact_output), limit)
    errors = map(relative_error, jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients))
    yield case.finding('gradients', max(errors), limit)


def _check_approximation(case: Case) -> Finding:
    """Near softmax attention where rows are short: with |q| = |k| = 1/2 after scaling, random features err little.

    What gives zeros, or what has nothing to do with the scores' softmax, errs by about 1. Of a variant of one's own no
    more than that is asked, for nobody knows what its error depends on.
    """
    q, k, v, params = case.arrays()
    root = 1.0 if case.config.scale is None else case.config.head_dim**0.25
    q, k = (0.5 * root * rows / jnp.linalg.norm(rows, axis=-1, keepdims=True) for rows in (q, k))
    mask = case.mask()
    output = jax.jit(case.run)(q, k, v, params, mask)
    with jax.enable_x64(True):
        exact = np.asarray(case.equation(oracles.dot, mask, *oracles.to_float64((q, k, v, params))))
    limit = min(0.9, 2 / case.config.num_features**0.5) if case.config.kind in ORACLES else 0.9
    return case.finding('near softmax on short rows', relative_error(output, exact), limit, 'an approximation')


def _check_hidden_slots(case: Case) -> Finding:
    """Exact zeros in the Jacobian of one row, wherever a query may not see a key: causality, windows, padding."""
    q, k, v, params = case.arrays()
    mask = case.mask()
    seen = np.asarray(visible(mask))[0]

    def influence(k_row: Array, v_row: Array) -> Array:
        output = case.run(q, k.at[0].set(k_row), v.at[0].set(v_row), params, mask)
        return output[0].sum(axis=(1, 2))  # of each query

    def strength_of(*rows: Array) -> Array:
        to_k, to_v = jax.jacrev(influence, argnums=(0, 1))(*rows)
        return jnp.abs(to_k).sum(axis=(2, 3)) + jnp.abs(to_v).sum(axis=(2, 3))

    strength = np.asarray(jax.jit(strength_of)(k[0], v[0]))
    error = float(strength[~seen].max(initial=0.0)) if np.isfinite(strength).all() else np.inf
    return case.finding('hidden keys have no influence', error, NONE_LIMIT)


def _check_rows_that_see_nothing(case: Case) -> Finding:
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


def _check_padding_content(case: Case) -> Finding:
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
    errors = [relative_error(output, expected)]
    for ours, other, real in zip(gradients[:3], expected_gradients[:3], (real_q, real_k, real_k), strict=True):
        errors.append(relative_error(jnp.where(real, ours, 0), jnp.where(real, other, 0)))
    errors += map(relative_error, jax.tree.leaves(gradients[3]), jax.tree.leaves(expected_gradients[3]))
    return case.finding('padding may hold anything', max(errors), EXACT_LIMIT)


def _check_segments(case: Case) -> Finding:
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
            k_prefix=None if mask.k_prefix is None else mask.k_prefix[:, own_k],
        )
        expected = run(q[:, own_q], k[:, own_k], v[:, own_k], params, alone)
        errors.append(relative_error(packed[:, own_q], expected))
    return case.finding(check, max(errors))
