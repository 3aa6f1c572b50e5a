"""The text of a compiled program (HLO) as computations of instructions: as much of it as counting costs needs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

_BYTES = {'pred': 1, 'token': 0, 'opaque': 0}  # the others say their bits: f32, s8, bf16, f8e4m3fn
_ON_CHIP = re.compile(r'S\([1-9]\d*\)')  # a layout in another memory space than HBM
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$')
_END = re.compile(r'\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_NAME = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(r'\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'\bbranch_computations=\{([^}]*)\}')


class ArrayShape(NamedTuple):
    """An array, or one part of a tuple."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False  # in a memory beside the HBM, such as a TPU's VMEM

    @property
    def num_bytes(self) -> int:
        """Without what tiling adds."""
        if self.dtype in _BYTES:
            return int(prod(self.dims) * _BYTES[self.dtype])
        bits = re.search(r'\d+', self.dtype)
        if bits is None:
            raise ValueError(f'an array of type {self.dtype!r}, whose size is not known')
        return prod(self.dims) * int(bits[0]) // 8


@dataclass(frozen=True)
class Instruction:
    name: str
    shapes: tuple[ArrayShape, ...]  # one, or the parts of a tuple, nested ones flat
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # all that follows the operands
    argument: str  # what stands between the parentheses
    is_root: bool

    @cached_property
    def called(self) -> dict[str, str]:
        """Computations by the attribute that names them: `calls`, `to_apply`, `condition`, `body`, ..."""
        return dict(_CALLED.findall(self.attributes))

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """Computations of which a conditional runs one."""
        listed = _BRANCHES.search(self.attributes)
        if listed:
            return tuple(_NAME.findall(listed[1]))
        return tuple(name for key, name in self.called.items() if key in ('true_computation', 'false_computation'))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes, or None."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By their number."""
        return {int(one.argument): one for one in self.instructions.values() if one.opcode == 'parameter'}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By the name of what they use."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that makes an operand; None when there is no such operand."""
        if index >= len(instruction.operands):
            return None
        return self.instructions.get(instruction.operands[index])


@dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: Computation
    num_devices: int  # that one program is split over


def parse_program(text: str) -> Program:
    """Reads what `jax.stages.Compiled.as_text` gives. Raises `ValueError` when it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _join_lines(text):
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = Computation(header[2])
                computations[current.name] = current
                entry = current if header[1] else entry
        elif _END.match(line):
            current = None
        else:
            instruction = _parse_instruction(line)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError(f'the text of a compiled program has an ENTRY computation; this one begins {text[:80]!r}')
    counts = [int(n) for n in re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', text[: text.find('\n')])]
    return Program(computations, entry, prod(counts))


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """The arrays of a type."""
    return tuple(
        ArrayShape(dtype, tuple(int(d.strip('<= ')) for d in dims.split(',') if d), bool(_ON_CHIP.search(layout)))
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _join_lines(text: str) -> Iterator[str]:
    """Lines, those of an attribute that is printed over several lines as one."""
    pending: str | None = None
    for line in filter(None, text.splitlines()):
        is_new = _INSTRUCTION.match(line) or _END.match(line) or (not line[0].isspace() and line.endswith('{'))
        if not is_new and pending is not None and _INSTRUCTION.match(pending):
            pending += line
            continue
        if pending is not None:
            yield pending
        pending = line
    if pending is not None:
        yield pending


def _parse_instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    if head is None:
        raise ValueError(f'not an instruction of a compiled program: {line[:120]!r}')
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == '(' else line.index(' ', start)
    opening = line.index('(', end + 1)
    closing = _closing(line, opening)
    argument = line[opening + 1 : closing]
    return Instruction(
        name=head[2],
        shapes=parse_shapes(line[start:end]),
        opcode=line[end:opening].strip(),
        operands=tuple(_NAME.findall(argument)),
        attributes=line[closing + 1 :],
        argument=argument,
        is_root=bool(head[1]),
    )


def _closing(line: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for index in range(opening, len(line)):
        if line[index] == '(':
            depth += 1
        elif line[index] == ')':
            depth -= 1
            if not depth:
                return index
    raise ValueError(f'a parenthesis does not close in {line[:120]!r}')
