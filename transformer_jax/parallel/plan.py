"""Compiles a program ahead of time, for devices that need not be here, and says what it takes of each of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import jax

from transformer_jax.parallel.chips import Chip
from transformer_jax.parallel.jaxpr_costs import Shapes, find_kernels
from transformer_jax.parallel.platform import compiling_for
from transformer_jax.parallel.program_costs import Collective, Kernel, ProgramCosts, read_costs
from transformer_jax.parallel.targets import Target

_NEEDED = re.compile(
    r'([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm|\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])'
)
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30}


@dataclass(frozen=True)
class Plan:
    """What one run of a program takes of each device. Bytes, FLOPs (2 a multiply-add), cycles of its clock, seconds.

    The compiler estimates the cycles of what it made itself; what it has no estimate of counts by its bytes. A custom
    kernel counts at the larger of its FLOPs over half the device's peak and its bytes over the bandwidth. A collective
    counts at what the device receives over the interconnect's bandwidth; those that overlap with computing, only as far
    as they take longer than it.
    """

    estimated_cycles: float | None  # the total; None for a device whose figures are not known
    kernel_cycles: float | None  # the part of it in custom kernels
    collective_cycles: float | None  # the part of it that waits for other devices
    step_seconds: float | None
    flops: float  # of matrix products and convolutions, those in custom kernels and of rematerialisation among them
    num_bytes: float  # read and written in the device's memory
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int  # that no argument gave its place to
    peak_bytes: int
    collectives: Mapping[str, Collective]
    compile_seconds: float
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...]  # what was bounded or could not be counted


class DoesNotFitError(RuntimeError):
    """The compiler finds no room for a program in the memory of a device."""

    def __init__(self, needed: float | None, available: float | None, message: str) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available


def compile_program(jitted: Any, arguments: tuple[Any, ...], target: Target, mesh: jax.sharding.Mesh) -> Plan:
    """Compiles a jitted function for shapes with shardings on `mesh`, whose devices are some of the target's.

    Raises `DoesNotFitError` when the compiler itself says so.
    """
    with compiling_for(target.platform), jax.set_mesh(mesh):
        start = monotonic()
        traced = jitted.trace(*arguments)
        lowered = traced.lower()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise _judge(error) from error
        seconds = monotonic() - start
    return account(read_costs(compiled.as_text()), find_kernels(traced.jaxpr), compiled, target.chip, seconds)


def account(
    costs: ProgramCosts,
    kernel_flops: Mapping[tuple[str, Shapes], float | None],
    compiled: Any,
    chip: Chip | None,
    compile_seconds: float,
) -> Plan:
    """The plan of a compiled program whose costs were read."""
    notes = [
        f'the turns of loop {name} depend on the data: counted as {turns}, the most there can be'
        for name, turns in costs.bounded_loops.items()
    ]
    if costs.unestimated_bytes:
        notes.append('the compiler has no estimate of some instructions: they count by their bytes alone')
    flops, num_bytes, kernel_seconds = costs.flops, costs.num_bytes, 0.0
    for kernel in costs.kernels:
        own = kernel_flops.get((kernel.name, kernel.results))
        if own is None:
            notes.append(f'the FLOPs of kernel {kernel.name} could not be counted: it counts by its bytes alone')
        flops += kernel.calls * (own or 0.0)
        num_bytes += kernel.calls * kernel.num_bytes
        if chip is not None:
            each = max((own or 0.0) / (chip.peak_flops / 2), kernel.num_bytes / chip.bandwidth)
            kernel_seconds += kernel.calls * each
    seconds = waiting = None
    if chip is not None:
        computing = kernel_seconds + (
            costs.compiler_cycles / chip.clock + costs.unestimated_bytes / chip.bandwidth
            if chip.compiler_counts_cycles
            else max(costs.flops / chip.peak_flops, costs.num_bytes / chip.bandwidth)
        )
        waiting = _waiting_seconds(costs.collectives, computing, chip)
        seconds = computing + waiting
    memory = compiled.memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Plan(
        estimated_cycles=None if chip is None or seconds is None else seconds * chip.clock,
        kernel_cycles=None if chip is None else kernel_seconds * chip.clock,
        collective_cycles=None if chip is None or waiting is None else waiting * chip.clock,
        step_seconds=seconds,
        flops=flops,
        num_bytes=num_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=kept,
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept,
        collectives=costs.collectives,
        compile_seconds=compile_seconds,
        kernels=costs.kernels,
        notes=tuple(dict.fromkeys(notes)),
    )


def _waiting_seconds(collectives: Mapping[str, Collective], computing: float, chip: Chip) -> float:
    exposed = sum(one.exposed_bytes for one in collectives.values()) / chip.interconnect
    overlapped = sum(one.num_bytes - one.exposed_bytes for one in collectives.values()) / chip.interconnect
    return exposed + max(0.0, overlapped - computing)


def _judge(error: Exception) -> Exception:
    """What the compiler's refusal means."""
    message = str(error)
    if 'RESOURCE_EXHAUSTED' not in message and 'out of memory' not in message.lower():
        return error
    found = _NEEDED.search(message)
    sizes = [None, None]
    if found:
        texts = [text for text in found.groups() if text is not None]
        sizes = [float(texts[0]) * _UNITS[texts[1]], float(texts[2]) * _UNITS[texts[3]]]
    return DoesNotFitError(sizes[0], sizes[1], message.splitlines()[0])
