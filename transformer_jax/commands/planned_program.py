"""One program of a run on devices that need not be here: what is asked of it, and what its compiling tells."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from transformer_jax import models
from transformer_jax.attention import choose
from transformer_jax.commands import programs
from transformer_jax.commands.programs import Shape, StateBytes
from transformer_jax.commands.show import build_model
from transformer_jax.config import Config
from transformer_jax.parallel.mesh import AXES, make_mesh
from transformer_jax.parallel.plan import DoesNotFitError, Plan
from transformer_jax.parallel.platform import compiling_for
from transformer_jax.parallel.targets import Target, first_devices
from transformer_jax.training.parameter_count import count_parameters


@dataclass(frozen=True)
class Question:
    """What is asked: which program of which config, over which mesh of which devices, for which batch."""

    config: Config  # its mesh is the one that is meant
    target: Target
    shape: Shape
    decode: bool
    run: str | os.PathLike[str] | None

    def make_mesh(self) -> jax.sharding.Mesh:
        """Over the first devices of the target, or all of them where the config leaves the number open."""
        sizes = [getattr(self.config.execution.mesh, axis) for axis in AXES]
        count = len(self.target.devices) if None in sizes else prod(sizes)
        return make_mesh(self.config.execution.mesh, first_devices(self.target, count))


@dataclass(frozen=True)
class Answer:
    """What a compiled program takes of each device, and what follows from it."""

    question: Question
    mesh: dict[str, int]
    parameters: int  # of the model, as papers count them
    state: StateBytes
    model_flops: float | None  # of all devices together, by the model's definition
    plan: Plan | None  # None when the compiler found no room for it
    needed_bytes: float | None  # a device, where that is known
    does_not_fit: str | None  # why

    @property
    def num_devices(self) -> int:
        return prod(self.mesh.values())

    @property
    def tokens(self) -> int:
        """Target tokens of one run of the program: of an update all slots, of a decode step one a sentence."""
        shape, accumulation = self.question.shape, self.question.config.train.accumulation
        return shape.rows if self.question.decode else shape.rows * shape.target_length * accumulation

    @property
    def tokens_per_second(self) -> float | None:
        seconds = None if self.plan is None else self.plan.step_seconds
        return self.tokens / seconds if seconds else None

    @property
    def model_flop_utilisation(self) -> float | None:
        """The share of the devices' peak that the model's own FLOPs take."""
        chip = self.question.target.chip
        if self.plan is None or not self.plan.step_seconds or self.model_flops is None or chip is None:
            return None
        return self.model_flops / (self.plan.step_seconds * chip.peak_flops * self.num_devices)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known. Bytes, FLOPs and collectives are those of one device."""
        shape, plan = self.question.shape, self.plan
        names = ('flops', 'estimated_cycles', 'kernel_cycles', 'collective_cycles', 'temporary_bytes', 'argument_bytes')
        names = (*names, 'output_bytes', 'peak_bytes', 'step_seconds', 'compile_seconds')
        figures = {name: None if plan is None else getattr(plan, name) for name in names}
        collectives = {} if plan is None else plan.collectives
        return {
            'program': 'decode step' if self.question.decode else 'update',
            'target': self.question.target.name,
            'mesh': self.mesh,
            'devices': self.num_devices,
            'batch': shape.rows,
            'source_length': shape.source_length,
            'target_length': shape.target_length,
            'remat': self.question.config.execution.remat,
            'parameters': self.parameters,
            'parameter_bytes': self.state.parameters,
            'optimizer_bytes': self.state.optimizer,
            'average_bytes': self.state.average,
            'memory_bytes': self.question.target.memory,
            'needed_bytes': self.needed_bytes,
            'fits': self.does_not_fit is None,
            'does_not_fit': self.does_not_fit,
            **figures,
            'bytes': None if plan is None else plan.num_bytes,
            'model_flops': self.model_flops,
            'model_flop_utilisation': self.model_flop_utilisation,
            'tokens_per_second': self.tokens_per_second,
            'collectives': {k: {'count': one.count, 'bytes': one.num_bytes} for k, one in collectives.items()},
            'notes': [] if plan is None else list(plan.notes),
        }


def answer(question: Question) -> Answer:
    """Compiles what is asked. Draws no parameters."""
    config, target, shape = question.config, question.target, question.shape
    mesh = question.make_mesh()
    model = build_model(config, question.run)
    plan = needed = reason = None
    if question.decode:
        state = StateBytes(0, 0, 0)
        flops = programs.decoding_flops(config, shape, vocab_size=model.vocab_size)
    else:
        state = programs.training_bytes(config, model, target, mesh)
        flops = programs.training_flops(config, shape, vocab_size=model.vocab_size)
    try:
        if question.decode:
            plan, state = programs.plan_decoding(config, model, target, mesh, shape)
        else:
            plan = programs.plan_training(config, model, target, mesh, shape)
        needed = plan.peak_bytes
        if target.memory is not None and plan.peak_bytes > target.memory:
            reason = f'it takes {say_bytes(plan.peak_bytes)} of {say_bytes(target.memory)} a device'
    except DoesNotFitError as error:
        needed, reason = error.needed, str(error)
    return Answer(
        question,
        {axis: int(ways) for axis, ways in mesh.shape.items()},
        count_parameters(config.model, vocab_size=model.vocab_size),
        state,
        flops,
        plan,
        needed,
        reason,
    )


def describe(one: Answer) -> Iterator[str]:
    """Lines about one answer: figures of each device, then of all together."""
    question, plan, target = one.question, one.plan, one.question.target
    shape, chip, config = question.shape, target.chip, question.config
    with compiling_for(target.platform):
        found = models.uses_of_attention(config, (shape.source_length, shape.target_length))
        uses = ', '.join(f'{use.name} {use.config.kind}/{choose(use)}' for use in found)
    slots = f'{shape.rows} rows of {shape.source_length} + {shape.target_length} subwords'
    if question.decode:
        slots = f'{shape.rows} sentences of {shape.source_length} subwords, {config.decoding.method}'
    elif config.train.accumulation > 1:
        slots = f'{config.train.accumulation} x {slots}'
    split = ', '.join(f'{axis} {ways}' for axis, ways in one.mesh.items() if ways > 1) or 'none'
    yield f'{"the decode step" if question.decode else "the update"}: {slots}'
    yield f'devices: {one.num_devices} of {target.name}, split over {split}; remat {config.execution.remat}'
    yield f'attention: {uses or "none"}'
    if chip is not None:
        yield (
            f'a device ({chip.name}): {say_bytes(target.memory)}, {chip.peak_flops / 1e12:,.4g} TFLOP/s, '
            f'{chip.bandwidth / 1e9:,.0f} GB/s, {chip.clock / 1e9:.4g} GHz'
        )
    yield from (f'  {name:<24}{value}' for name, value in _figures(one))
    for note in () if plan is None else plan.notes:
        yield f'  note: {note}'


def say_bytes(count: float | None) -> str:
    """Bytes for people."""
    if count is None:
        return 'unknown'
    for unit, size in (('GiB', 2**30), ('MiB', 2**20), ('KiB', 2**10)):
        if count >= size:
            return f'{count / size:,.2f} {unit}'
    return f'{count:,.0f} B'


def _figures(one: Answer) -> Iterator[tuple[str, str]]:
    plan, target, decode = one.plan, one.question.target, one.question.decode
    yield 'parameters', f'{say_bytes(one.state.parameters)} of a model of {one.parameters:,}'
    if not decode:
        yield 'optimizer state', say_bytes(one.state.optimizer)
        if one.state.average:
            yield 'moving average', say_bytes(one.state.average)
    if plan is None:
        yield 'peak memory', f'{say_bytes(one.needed_bytes)} of {say_bytes(target.memory)}: DOES NOT FIT'
        yield 'the compiler says', str(one.does_not_fit)
        return
    yield 'activations', f'{say_bytes(plan.temporary_bytes)} with all other temporaries'
    share = f' ({plan.peak_bytes / target.memory:.1%})' if target.memory else ''
    verdict = 'fits' if one.does_not_fit is None else 'DOES NOT FIT'
    yield 'peak memory', f'{say_bytes(plan.peak_bytes)} of {say_bytes(target.memory)}{share}: {verdict}'
    yield 'FLOPs', f'{plan.flops:.4g}'
    yield 'bytes', f'{say_bytes(plan.num_bytes)} read and written'
    for kind, collective in plan.collectives.items():
        overlapped = collective.num_bytes - collective.exposed_bytes
        yield (
            kind,
            (
                f'{collective.count:,.0f} times, {say_bytes(collective.num_bytes)} received, '
                f'{say_bytes(overlapped)} of them while computing'
            ),
        )
    if not plan.collectives:
        yield 'collectives', 'none'
    if plan.estimated_cycles is not None and plan.step_seconds is not None:
        yield (
            'estimated cycles',
            (
                f'{plan.estimated_cycles / 1e6:,.2f} million, {(plan.kernel_cycles or 0) / 1e6:,.2f} of them in custom '
                f'kernels, {(plan.collective_cycles or 0) / 1e6:,.2f} waiting for other devices'
            ),
        )
        by = 'compiler' if target.chip is not None and target.chip.compiler_counts_cycles else 'peak and bandwidth'
        yield 'step time', f'{plan.step_seconds * 1e3:,.3f} ms, estimated by the {by}'
    else:
        yield 'step time', f'unknown: the table of devices has no {target.devices[0].device_kind}'
    if (share_of_peak := one.model_flop_utilisation) is not None:
        yield 'model FLOP utilisation', f'{share_of_peak:.1%} (the model takes {one.model_flops:.4g} FLOPs)'
    if (speed := one.tokens_per_second) is not None:
        yield 'tokens/s', f'{speed:,.0f} target tokens on {one.num_devices} devices'
    yield 'compile time', f'{plan.compile_seconds:,.1f} s'
