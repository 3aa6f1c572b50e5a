"""Checks of a whole configured model, with its sizes reduced: invariances, decoding with the cache, and sharding."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import attention, models
from transformer_jax.checking.attention_checks import check_use, implementations
from transformer_jax.checking.findings import Finding
from transformer_jax.checking.recurrent_checks import check_recurrent
from transformer_jax.config import Config, MeshConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.parallel.mesh import make_mesh, place_batch
from transformer_jax.shapes import Array, Params

VOCABULARY, START = 29, 1
DECODE_LIMIT = 1e-5  # absolute, or of the largest value where that is above 1
SHARDING_LIMIT = 5e-6
LOW_LIMIT = 5e-2  # of the same in bfloat16
MAX_LENGTH = 64
SOURCES, TARGETS = (11, 7, 3, 5, 11, 2, 9, 4), (9, 12, 4, 2, 7, 1, 12, 6)


def check_config(config: Config) -> Iterator[Finding]:
    """Every check of the config's attention variants and of its model, without dropout; in float32 where it can be."""
    for use in models.uses_of_attention(config):
        for checked, variant in implementations(use):
            yield from check_use(checked, variant, model=config.model)
    reduced = reduce_sizes(config)
    model = models.build(reduced, vocab_size=VOCABULARY, start_id=START, execution=config.execution)
    params = _draw_params(model)
    batch = make_batch()
    if reduced.family == 'recurrent':
        yield from check_recurrent(reduced, model, params, batch)
    yield _check_the_future(model, params, batch)
    in_float32 = reduced.compute_dtype == 'float32'
    for finding in (
        _check_padding(model, params, batch),
        _check_packing(config, model, params, batch),
        _check_decoding(model, params, batch),
        check_sharding(model, params, batch),
    ):
        yield finding if in_float32 else finding._replace(limit=LOW_LIMIT)


def reduce_sizes(config: Config) -> ModelConfig:
    """Two layers, a narrow feed-forward layer and short sentences; heads, kinds and schemes as they are.

    Each use of attention is by the implementation that the longest texts of the config run with. In float32, unless one
    of those has none.
    """
    model = config.model
    reduced = dataclasses.replace(
        model,
        num_encoder_layers=min(model.num_encoder_layers, 2),
        num_decoder_layers=min(model.num_decoder_layers, 2),
        d_model=min(model.d_model, 64),
        d_ff=min(model.d_ff, 48),
        max_length=MAX_LENGTH,
        dropout_rate=0.0,
        activation_dropout_rate=0.0,
        attention=dataclasses.replace(model.attention, dropout_rate=0.0),
        compute_dtype='float32',
    )
    for use in models.uses_of_attention(config):
        checked, _ = next(implementations(use))
        overlay = dataclasses.replace(getattr(model, use.name), impl=checked.config.impl)
        reduced = dataclasses.replace(reduced, **{use.name: overlay})
        if checked.compute_dtype != 'float32':
            reduced = dataclasses.replace(reduced, compute_dtype=checked.compute_dtype)
    return reduced


def make_batch(sources: tuple[int, ...] = SOURCES, targets: tuple[int, ...] = TARGETS, pads: int = 0) -> Batch:
    """Rows of these lengths, one pair each, with `pads` more columns than the longest needs."""
    rng = np.random.default_rng(0)
    sides = []
    for lengths in (sources, targets):
        width = max(lengths) + pads
        real = np.arange(width) < np.array(lengths)[:, None]
        ids = np.zeros((len(lengths), width), np.int32)
        for row, length in enumerate(lengths):
            ids[row, :length] = rng.integers(3, VOCABULARY, length)
        sides.append((ids, real.astype(np.int32), np.where(real, np.arange(width), 0).astype(np.int32)))
    (inputs, in_segments, in_positions), (outputs, out_segments, out_positions) = sides
    return Batch(inputs, outputs, in_segments, out_segments, in_positions, out_positions)


def _draw_params(model: Model) -> Params:
    """Parameters of which none is zero or one."""
    params = model.init(jax.random.key(0, impl='threefry2x32'))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    return tree.unflatten([leaf + jnp.float32(rng.normal(size=leaf.shape) * 0.1) for leaf in leaves])


def _generates(model: Model) -> bool:
    return model.task.translates or model.task.generates


def _hidden(model: Model) -> Any:
    return jax.jit(lambda params, batch: model.hidden(params, _pose(model, batch)).astype(jnp.float32))


def _pose(model: Model, batch: Batch) -> Batch:
    """What the model learns of a batch, with the same keys whatever else is in it."""
    return model.objective(batch, jax.random.split(jax.random.key(0, impl='threefry2x32'), len(batch.inputs)))


def _worst(difference: Any, real: Any) -> float:
    """The largest absolute difference at real tokens; NaN counts as infinite."""
    at_real = np.abs(np.asarray(difference))[np.asarray(real)]
    return float(at_real.max()) if np.isfinite(at_real).all() else np.inf


def _size(values: Any, real: Any) -> float:
    """The largest absolute value at real tokens, at least 1: what rounding errors are measured by."""
    return max(1.0, float(np.abs(np.asarray(values))[np.asarray(real)].max()))


def _check_the_future(model: Model, params: Params, batch: Batch) -> Finding:
    """Changing a target from position t on changes nothing before t; hidden t reads targets before t."""
    run, check = _hidden(model), 'later targets change nothing before them'
    if not _generates(model):
        return Finding('model', check, None, 0.0, 'the family reads both ways')
    before = run(params, batch)
    cut = 3
    changed = np.where(
        np.arange(batch.targets.shape[1]) >= cut, (batch.targets + 5) % (VOCABULARY - 3) + 3, batch.targets
    )
    after = run(params, batch._replace(targets=changed.astype(np.int32)))
    real = (batch.target_segment_ids > 0) & (np.arange(batch.targets.shape[1]) <= cut)
    return Finding('model', check, _worst(after - before, real), 1e-6)


def _check_padding(model: Model, params: Params, batch: Batch) -> Finding:
    """3 and 17 more pad columns on both sides change nothing."""
    run, errors = _hidden(model), []
    expected = run(params, batch)
    real = np.asarray(_pose(model, batch).target_segment_ids) > 0
    for pads in (3, 17):
        padded = make_batch(pads=pads)
        got = run(params, padded)[:, : expected.shape[1]]
        errors.append(_worst(got - expected, real) / _size(expected, real))
    return Finding('model', 'more padding changes nothing', max(errors), DECODE_LIMIT)


def _check_packing(config: Config, model: Model, params: Params, batch: Batch) -> Finding:
    """Two pairs in a row are as if each had a row of its own."""
    check = 'packed pairs are as if alone'
    if not _generates(model):
        return Finding('model', check, None, DECODE_LIMIT, 'what is drawn for a slot depends on the slot')
    for use in models.uses_of_attention(config):
        checked, variant = next(implementations(use))
        reason = attention.why_not(variant, checked._replace(packed=True))
        if reason is not None:
            return Finding('model', check, None, DECODE_LIMIT, reason)
    apart = make_batch()
    expected = np.asarray(_hidden(model)(params, apart))
    half = len(SOURCES) // 2

    def join(ids: np.ndarray, lengths: tuple[int, ...], fill: Any = None) -> np.ndarray:
        width = max(lengths[row] + lengths[row + half] for row in range(half))
        rows = np.zeros((half, width), np.int32)
        for row in range(half):
            first, second = lengths[row], lengths[row + half]
            parts = (ids[row, :first], ids[row + half, :second]) if fill is None else fill(first, second)
            rows[row, : first + second] = np.concatenate(parts)
        return rows

    def segments(first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(first, 1), np.full(second, 2)

    def positions(first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(first), np.arange(second)

    packed = Batch(
        join(apart.inputs, SOURCES), join(apart.targets, TARGETS),
        join(apart.inputs, SOURCES, segments), join(apart.targets, TARGETS, segments),
        join(apart.inputs, SOURCES, positions), join(apart.targets, TARGETS, positions),
    )  # fmt: skip
    got = np.asarray(_hidden(model)(params, packed))
    errors = []
    for row in range(half):
        first, second = TARGETS[row], TARGETS[row + half]
        errors.append(np.abs(got[row, :first] - expected[row, :first]).max())
        errors.append(np.abs(got[row, first : first + second] - expected[row + half, :second]).max())
    worst = max(errors) / _size(expected, apart.target_segment_ids > 0) if np.isfinite(errors).all() else np.inf
    return Finding('model', check, float(worst), DECODE_LIMIT)


def _check_decoding(model: Model, params: Params, batch: Batch) -> Finding:
    """Logits of each cached step equal those of the teacher-forced pass; the first three tokens come by prefill."""
    check = 'cached decoding is the full pass'
    if not _generates(model):
        return Finding('model', check, None, DECODE_LIMIT, 'the family does not generate')
    expected = np.asarray(jax.jit(lambda p, b: model.project(p, model.hidden(p, b)))(params, batch))
    length = batch.targets.shape[1]
    inputs = np.concatenate([np.full((len(TARGETS), 1), START), batch.targets[:, :-1]], axis=1).astype(np.int32)
    lengths = np.minimum(np.array(TARGETS), 3).astype(np.int32)

    @jax.jit
    def begin(params: Params, batch: Batch) -> tuple[Array, Any]:
        memory = model.encode(params, batch.inputs, batch.input_segment_ids, batch.input_positions)
        return model.prefill(
            params, jnp.asarray(inputs[:, :3]), jnp.asarray(lengths), model.init_decode(params, memory, length + 3)
        )

    step = jax.jit(model.decode_step)
    logits, cache = begin(params, batch)
    errors = [
        np.abs(np.asarray(logits)[row, :count] - expected[row, :count]).max() for row, count in enumerate(lengths)
    ]
    for t in range(int(lengths.min()), length):
        # Rows that read fewer than three tokens at first are one to two steps behind the others.
        at = np.minimum(t - int(lengths.min()) + lengths, length - 1)
        logits, cache = step(params, jnp.asarray(inputs[np.arange(len(at)), at][:, None]), cache)
        for row, position in enumerate(at):
            if t - int(lengths.min()) + lengths[row] < TARGETS[row]:
                errors.append(np.abs(np.asarray(logits)[row, 0] - expected[row, position]).max())
    worst = max(errors) / _size(expected, batch.target_segment_ids > 0) if np.isfinite(errors).all() else np.inf
    return Finding('model', check, float(worst), DECODE_LIMIT)


def check_sharding(model: Model, params: Params, batch: Batch) -> Finding:
    """The sum of hidden states' squares and its gradients, on one device and with the rows over all of them."""
    count = jax.device_count()
    if count == 1 or len(TARGETS) % count:
        found = 'there is 1 device' if count == 1 else f'{len(TARGETS)} rows do not go evenly over {count} devices'
        note = f'{found}; set JAX_NUM_CPU_DEVICES=8 to simulate as many on a CPU'
        return Finding('model', '1 device = several devices', None, SHARDING_LIMIT, note)

    def loss(params: Params, batch: Batch) -> Array:
        posed = _pose(model, batch)
        return (
            jnp.square(model.hidden(params, posed).astype(jnp.float32)) * (posed.target_segment_ids > 0)[..., None]
        ).sum()

    run = jax.jit(jax.value_and_grad(loss))
    alone = run(params, batch)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        together = run(params, place_batch(batch, mesh))
    errors = []
    # Some gradients are nothing but rounding (a bias on keys changes no softmax): theirs counts beside all gradients.
    least = 0.01 * float(np.sqrt(sum(np.square(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(alone[1]))))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        scale = max(float(np.linalg.norm(np.asarray(one))), least)
        errors.append(float(np.linalg.norm(np.asarray(one) - np.asarray(other))) / scale)
    check = f'1 device = {count} devices'
    return Finding('model', check, max(errors) if np.isfinite(errors).all() else np.inf, SHARDING_LIMIT)
