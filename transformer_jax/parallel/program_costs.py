"""What one device does in one run of a compiled program: cycles, products, memory traffic and collectives.

Loop bodies count as often as they run, of the branches of a conditional the dearest one, and what a fusion or a call
does counts where it is called.
"""

import re
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from transformer_jax.parallel.hlo import Computation, Instruction, Program, parse_program
from transformer_jax.parallel.matmul_costs import count_product_flops
from transformer_jax.parallel.trip_counts import count_trips

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62  # from here on what the compiler writes is no number of cycles
_KERNELS = ('tpu_custom_call', '__gpu$xla.gpu.triton', 'triton_kernel_call', 'mosaic_gpu', '__cudnn$fmhaSoftmax')
# By n, the devices of a group: how many times the bytes of its operands a device receives, in a ring.
_RECEIVED = {
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-gather': lambda n: n - 1,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
    'collective-broadcast': lambda n: 1,
}
# Neither computes nor moves anything: it names what is there.
_FREE = frozenset(
    'parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier '
    'add-dependency domain iota'.split()
)


class Kernel(NamedTuple):
    """A custom kernel: what it is and how often it runs. The compiler does not know what it costs."""

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape
    results: tuple[tuple[str, tuple[int, ...]], ...]
    num_bytes: int  # of operands and results, once each
    calls: float


class Collective(NamedTuple):
    """All collectives of one kind."""

    count: float
    num_bytes: float  # that each device receives, as a ring does it, whatever the compiler made of the collective
    exposed_bytes: float  # of them those that nothing overlaps: the collective has no start and end of its own


@dataclass(frozen=True)
class ProgramCosts:
    compiler_cycles: int  # the compiler's own estimates; 0 where it makes none
    flops: float  # of matrix products and convolutions, 2 for a multiply-add; without the kernels'
    num_bytes: float  # read and written in device memory; without the kernels'
    unestimated_bytes: float  # of them, those of instructions that the compiler says it has no estimate of
    kernels: tuple[Kernel, ...]
    collectives: dict[str, Collective]
    bounded_loops: dict[str, int]  # loops whose turns depend on data: how many were counted, the most there can be


def read_costs(text: str) -> ProgramCosts:
    """Costs of the text that `jax.stages.Compiled.as_text` gives."""
    counter = _Counter(parse_program(text))
    total = counter.count(counter.program.entry)
    collectives: dict[str, Collective] = {}
    for (kind, _), one in total.collectives.items():
        old = collectives.get(kind, Collective(0, 0, 0))
        collectives[kind] = Collective(*(a + b for a, b in zip(old, one, strict=True)))
    return ProgramCosts(
        compiler_cycles=round(total.cycles),
        flops=total.flops,
        num_bytes=total.num_bytes,
        unestimated_bytes=total.unestimated_bytes,
        kernels=tuple(kernel._replace(calls=calls) for kernel, calls in total.kernels.items()),
        collectives=dict(sorted(collectives.items())),
        bounded_loops=counter.bounded_loops,
    )


@dataclass
class _Total:
    cycles: float = 0
    flops: float = 0
    num_bytes: float = 0
    unestimated_bytes: float = 0
    kernels: dict[Kernel, float] = field(default_factory=dict)
    # By kind and by what tells one from another: several fusions may be parts of one collective.
    collectives: dict[tuple[str, str], Collective] = field(default_factory=dict)

    def add(self, other: '_Total', times: float = 1) -> None:
        self.cycles += other.cycles * times
        self.flops += other.flops * times
        self.num_bytes += other.num_bytes * times
        self.unestimated_bytes += other.unestimated_bytes * times
        for kernel, calls in other.kernels.items():
            self.kernels[kernel] = self.kernels.get(kernel, 0) + calls * times
        for key, one in other.collectives.items():
            self.collectives[key] = Collective(*(part * times for part in one))


class _Counter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.bounded_loops: dict[str, int] = {}
        self._counted: dict[str, _Total] = {}

    def count(self, computation: Computation) -> _Total:
        """One run of a computation whose instructions are run one by one."""
        if computation.name not in self._counted:
            total = _Total()
            for instruction in computation.instructions.values():
                self._add(total, computation, instruction)
            self._counted[computation.name] = total
        return self._counted[computation.name]

    def _add(self, total: _Total, holder: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith('-done'):
            return
        if opcode == 'while':
            trips = count_trips(self.program, holder, instruction)
            if not trips.exact:
                self.bounded_loops[instruction.name] = trips.count
            total.add(self._called(instruction, 'body'), trips.count)
            total.add(self._called(instruction, 'condition'), trips.count)
            return
        if opcode == 'conditional':
            branches = [self.count(self.program.computations[name]) for name in instruction.branches]
            total.add(max(branches, key=lambda one: (one.cycles, one.flops, one.num_bytes)))
            return
        if opcode in ('call', 'call-start', 'async-start'):
            inner = self._called(instruction, 'to_apply' if 'to_apply' in instruction.called else 'calls')
            total.add(inner if opcode == 'call' else _overlapped(inner))
            return
        estimate = _CYCLES.search(instruction.attributes)
        cycles = int(estimate[1]) if estimate else 0
        total.cycles += cycles if cycles < _NO_ESTIMATE else 0
        if kind := _collective_kind(opcode):
            self._add_collective(total, kind, holder, instruction, instruction.name, not opcode.endswith('-start'))
        elif kernel := _kernel(holder, instruction):
            total.kernels[kernel] = total.kernels.get(kernel, 0) + 1
            return
        elif opcode == 'fusion':
            self._add_fused(total, holder, instruction)
        else:
            total.flops += count_product_flops(holder, instruction)
        num_bytes = self._memory_bytes(holder, instruction)
        total.num_bytes += num_bytes
        total.unestimated_bytes += num_bytes if cycles >= _NO_ESTIMATE else 0

    def _called(self, instruction: Instruction, attribute: str) -> _Total:
        return self.count(self.program.computations[instruction.called[attribute]])

    def _add_fused(self, total: _Total, holder: Computation, fusion: Instruction) -> None:
        """Products and collectives inside a fusion, whose cycles and memory traffic are its own."""
        fused = self.program.computations[fusion.called['calls']]
        for instruction in fused.instructions.values():
            if instruction.opcode == 'fusion':
                self._add_fused(total, holder, instruction)
            elif kind := _collective_kind(instruction.opcode):
                if fused.name.startswith('all-reduce-scatter'):  # each device keeps its part of the sum alone
                    self._add_collective(total, 'reduce-scatter', fused, instruction, fusion.name, exposed=True)
                else:
                    # Start, steps and end of one collective are fusions of their own, which share its channel.
                    channel = instruction.attribute(r'channel_id=(\d+)') or fusion.name
                    key = f'{holder.name} channel {channel}'
                    self._add_collective(total, kind, fused, instruction, key, exposed=False)
            else:
                total.flops += count_product_flops(fused, instruction)

    def _add_collective(
        self, total: _Total, kind: str, holder: Computation, instruction: Instruction, key: str, exposed: bool
    ) -> None:
        group = _group_size(instruction, self.program.num_devices)
        if group == 1:  # over a mesh axis that splits nothing: no device talks to another
            return
        operands = (holder.instructions.get(name) for name in instruction.operands)
        received = sum(one.num_bytes for one in operands if one is not None) * _RECEIVED[kind](group)
        total.collectives[kind, key] = Collective(1, received, received if exposed else 0)

    def _memory_bytes(self, holder: Computation, instruction: Instruction) -> float:
        """Read and written in device memory: operands and results, and of what is only cut, the cut."""
        fused = None
        if instruction.opcode == 'fusion':
            fused = self.program.computations[instruction.called['calls']]
        total = 0
        for index, name in enumerate(instruction.operands):
            operand = holder.instructions.get(name)
            if operand is not None:
                total += _bytes_read(holder, instruction, fused, index, operand)
        return total + _bytes_written(holder, instruction, fused)


def _bytes_read(
    holder: Computation, instruction: Instruction, fused: Computation | None, index: int, operand: Instruction
) -> int:
    whole = _in_memory(operand)
    if fused is None:
        if instruction.opcode in ('dynamic-slice', 'slice', 'gather') and index == 0:
            return min(whole, instruction.num_bytes)
        if instruction.opcode == 'dynamic-update-slice' and index == 0:
            return 0
        return whole
    parameter = fused.parameters.get(index)
    users = fused.users.get(parameter.name, []) if parameter is not None else []
    if parameter is None or not users:
        return whole if parameter is None else 0
    cut = 0
    for user in users:
        if user.opcode in ('dynamic-slice', 'slice', 'gather') and user.operands[0] == parameter.name:
            cut += user.num_bytes
        elif user.opcode != 'dynamic-update-slice' or user.operands[0] != parameter.name:
            return whole
    return min(whole, cut)


def _bytes_written(holder: Computation, instruction: Instruction, fused: Computation | None) -> int:
    root, inside = (instruction, holder) if fused is None else (fused.root, fused)
    while root.opcode == 'bitcast' and inside.operand(root, 0) is not None:
        root = inside.instructions[root.operands[0]]
    whole = _in_memory(instruction)
    if instruction.opcode == 'copy-start':  # gives the copy, what it copies, and a context
        return instruction.shapes[0].num_bytes if not instruction.shapes[0].on_chip else 0
    if root.opcode == 'dynamic-update-slice':
        update = inside.operand(root, 1)
        return min(whole, whole if update is None else update.num_bytes)
    return whole


def _in_memory(instruction: Instruction) -> int:
    return sum(shape.num_bytes for shape in instruction.shapes if not shape.on_chip)


def _overlapped(total: _Total) -> _Total:
    """The same with collectives that run while others compute."""
    own = _Total()
    own.add(total)
    own.collectives = {key: one._replace(exposed_bytes=0) for key, one in own.collectives.items()}
    return own


def _collective_kind(opcode: str) -> str | None:
    kind = opcode.removesuffix('-start')
    return kind if kind in _RECEIVED else None


def _group_size(instruction: Instruction, num_devices: int) -> int:
    """How many devices take part in a collective together.

    Groups read `{{0,1},{2,3}}`, `[2,4]<=[8]`, `mesh['a'=2,'b'=4] {'b'}` or `mesh[...], device_ids=(...) {'b'}`; no or
    empty groups mean all devices. Raises `ValueError` for groups that read otherwise.
    """
    text = instruction.attributes
    named = re.search(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}', text)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return prod(int(part or sizes[name]) for name, part in axes) if axes else num_devices
    if counted := re.search(r'replica_groups=\[\d+,(\d+)\]<=', text):
        return int(counted[1])
    if listed := re.search(r'replica_groups=\{\{([\d,]*)\}', text):
        return len(listed[1].split(','))
    if 'replica_groups=' in text and 'replica_groups={}' not in text:
        groups = text[text.index('replica_groups=') :][:80]
        raise ValueError(f'the groups of {instruction.name} can not be read: {groups}')
    return num_devices


def _kernel(holder: Computation, instruction: Instruction) -> Kernel | None:
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    if instruction.opcode != 'custom-call' or target is None or not target.startswith(_KERNELS):
        return None
    operands = [one for name in instruction.operands if (one := holder.instructions.get(name)) is not None]
    return Kernel(
        name=re.sub(r'[.\d]+$', '', instruction.name),
        operands=tuple((shape.dtype, shape.dims) for one in operands for shape in one.shapes),
        results=tuple((shape.dtype, shape.dims) for shape in instruction.shapes),
        num_bytes=instruction.num_bytes + sum(one.num_bytes for one in operands),
        calls=1,
    )
