"""How often the loops of a compiled program run."""

from typing import NamedTuple

from transformer_jax.parallel.hlo import Computation, Instruction, Program


class Trips(NamedTuple):
    """The turns of one loop."""

    count: int
    exact: bool  # False: the greatest that it can run, or one where nothing tells


_PASS = ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start')
_SLICES = ('dynamic-slice', 'dynamic-update-slice')


def count_trips(program: Program, holder: Computation, loop: Instruction) -> Trips:
    """The turns of a `while` that stands in `holder`.

    What the compiler knows it writes at the loop, or else it is what the counter is compared with. A loop whose number
    of turns depends on data walks over an array block by block: it has at most as many turns as the most blocks that
    any array of its body is cut into. Where nothing is cut, one turn, not exact.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"?(\d+)')
    if known is not None:
        return Trips(int(known), True)
    counted = _from_condition(program, holder, loop)
    if counted is not None:
        return Trips(counted, True)
    return Trips(max(1, *_blocks(program, program.computations[loop.called['body']])), False)


def _from_condition(program: Program, holder: Computation, loop: Instruction) -> int | None:
    condition = program.computations[loop.called['condition']]
    inputs = holder.operand(loop, 0)
    if inputs is None or inputs.opcode != 'tuple':
        return None
    compared = _find_comparison(program, condition)
    if compared is None:
        return None
    counter, limit, direction = compared
    body = program.computations[loop.called['body']]
    bound = _constant(condition, limit)
    index = _tuple_index(condition, counter)
    limit_index = _tuple_index(condition, limit)
    if limit_index is not None and _tuple_index(body, body.operand(body.root, limit_index)) == limit_index:
        bound = _constant(holder, holder.operand(inputs, limit_index))  # no turn changes it
    if bound is None or index is None:
        return None
    first = _constant(holder, holder.operand(inputs, index))
    step = _step(program, body, index)
    if first is None or step is None:
        return None
    if direction == 'LE':
        bound += 1
    elif direction == 'GE':
        bound -= 1
    return max(0, -((first - bound) // step)) if (bound - first) * step > 0 else 0


def _find_comparison(
    program: Program, condition: Computation
) -> tuple[Instruction | None, Instruction | None, str] | None:
    """Counter, limit and direction of `counter < limit`, where that is what the condition is, alone or fused."""
    root, outer = condition.root, None
    if root.opcode in ('fusion', 'call'):
        outer = root
        inner = program.computations[root.called.get('calls') or root.called['to_apply']]
        root = inner.root
    else:
        inner = condition
    if root.opcode != 'compare':
        return None
    sides = [inner.operand(root, side) for side in (0, 1)]
    if outer is not None:
        sides = [_outside(condition, outer, side) for side in sides]
    direction = root.attribute(r'direction=(\w+)') or ''
    if _tuple_index(condition, sides[0]) is None:
        sides.reverse()
        direction = {'LT': 'GT', 'GT': 'LT', 'LE': 'GE', 'GE': 'LE'}.get(direction, direction)
    return (sides[0], sides[1], direction) if direction in ('LT', 'GT', 'LE', 'GE', 'NE') else None


def _outside(holder: Computation, fusion: Instruction, inner: Instruction | None) -> Instruction | None:
    """What a parameter of a fusion is outside of it; other instructions as they are."""
    if inner is not None and inner.opcode == 'parameter':
        return holder.operand(fusion, int(inner.argument))
    return inner


def _constant(holder: Computation, instruction: Instruction | None) -> int | None:
    while instruction is not None and instruction.opcode in _PASS:
        instruction = holder.operand(instruction, 0)
    if instruction is None or instruction.opcode != 'constant':
        return None
    text = instruction.argument.strip('{} ')
    return int(text) if text.lstrip('-').isdigit() else None


def _tuple_index(holder: Computation, instruction: Instruction | None) -> int | None:
    """Which part of the loop's state an instruction of its condition or body is."""
    while instruction is not None and instruction.opcode in _PASS:
        instruction = holder.operand(instruction, 0)
    if instruction is None or instruction.opcode != 'get-tuple-element':
        return None
    source = holder.operand(instruction, 0)
    index = instruction.attribute(r'index=(\d+)')
    return int(index) if source is not None and source.opcode == 'parameter' and index is not None else None


def _step(program: Program, body: Computation, index: int) -> int | None:
    """By how much a turn moves the counter."""
    if body.root.opcode != 'tuple':
        return None
    moved, holder = body.operand(body.root, index), body
    while moved is not None and moved.opcode in _PASS:
        moved = holder.operand(moved, 0)
    outer = None
    if moved is not None and moved.opcode in ('fusion', 'call'):
        outer = moved
        holder = program.computations[moved.called.get('calls') or moved.called['to_apply']]
        moved = holder.root
    if moved is None or moved.opcode not in ('add', 'subtract'):
        return None
    for side in (1, 0):
        part = holder.operand(moved, side)
        if outer is not None and part is not None and part.opcode == 'parameter':
            step = _constant(body, _outside(body, outer, part))
        else:
            step = _constant(holder, part)
        if step:
            return -step if moved.opcode == 'subtract' else step
    return None


def _blocks(program: Program, body: Computation) -> list[int]:
    """Into how many blocks each array that a loop's body cuts is cut, fusions included."""
    counts = [1]
    for instruction in body.instructions.values():
        if instruction.opcode in ('fusion', 'call', 'async-start'):
            counts += _blocks(
                program, program.computations[instruction.called.get('calls') or instruction.called['to_apply']]
            )
        if instruction.opcode not in _SLICES:
            continue
        whole = body.operand(instruction, 0)
        part = instruction if instruction.opcode == 'dynamic-slice' else body.operand(instruction, 1)
        if whole is not None and part is not None:
            sizes = zip(whole.shapes[0].dims, part.shapes[0].dims, strict=True)
            counts.append(max([-(-size // cut) for size, cut in sizes if cut] or [1]))
    return counts
