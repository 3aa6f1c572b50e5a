"""Floating point operations of a traced function: of its matrix products, and of each custom kernel that it calls."""

from collections.abc import Iterator
from math import prod
from typing import Any

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_DTYPES = {'bool': 'pred', 'bfloat16': 'bf16'}  # as programs write them; the others are f32, s8, u32


class UnknownTurnsError(ValueError):
    """A loop whose turns depend on data."""


def count_flops(jaxpr: Any) -> float:
    """Of matrix products and convolutions, 2 for a multiply-add.

    `lax.scan` counts as often as it runs, of the branches of `lax.cond` the dearest, a kernel as `kernel_flops` has it.
    Raises `UnknownTurnsError` for a `while` with products in it, whose turns nothing tells.
    """
    return sum(_equation_flops(equation) for equation in _open(jaxpr).eqns)


def find_kernels(jaxpr: Any) -> dict[tuple[str, Shapes], float | None]:
    """The FLOPs of one call of each Pallas kernel, by its name and the shapes of its results.

    None for a kernel with a loop whose turns depend on data.
    """
    found: dict[tuple[str, Shapes], float | None] = {}
    for equation in _open(jaxpr).eqns:
        if equation.primitive.name == 'pallas_call':
            results = tuple(_describe(variable.aval) for variable in equation.outvars)
            try:
                found[kernel_name(equation), results] = kernel_flops(equation)
            except UnknownTurnsError:
                found[kernel_name(equation), results] = None
        for inner in _inner(equation):
            found |= find_kernels(inner)
    return found


def kernel_name(equation: Any) -> str:
    """What a Pallas kernel is called in a compiled program."""
    params = equation.params
    info = params.get('name_and_src_info')
    return str(info.name if info is not None else params.get('name'))


def kernel_flops(equation: Any) -> float:
    """The products of one place of the grid, whatever a condition may skip there, times the places."""
    grid = equation.params['grid_mapping'].grid
    return count_flops(equation.params['jaxpr']) * prod(int(size) for size in grid)


def _equation_flops(equation: Any) -> float:
    name = equation.primitive.name
    if name == 'dot_general':
        return _dot_flops(equation)
    if name == 'conv_general_dilated':
        return _convolution_flops(equation)
    if name == 'pallas_call':
        return kernel_flops(equation)
    parts = [count_flops(inner) for inner in _inner(equation)]
    if name == 'scan':
        return parts[0] * equation.params['length']
    if name == 'cond' and not _all_run(equation):
        return max(parts, default=0)
    if name == 'while' and sum(parts):
        raise UnknownTurnsError('a while loop has matrix products in it; how often it runs can not be read')
    if name == 'shard_map':
        return sum(parts) * prod(equation.params['mesh'].shape.values())
    return sum(parts)


def _all_run(equation: Any) -> bool:
    """A condition inside a kernel, as `pl.when`, guards what most places of the grid do."""
    return not equation.outvars


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params['dimension_numbers']
    left = equation.invars[0].aval.shape
    return 2.0 * prod(equation.outvars[0].aval.shape) * prod(left[axis] for axis in contracted)


def _convolution_flops(equation: Any) -> float:
    params = equation.params
    kernel = equation.invars[1].aval.shape
    spec = params['dimension_numbers'].rhs_spec  # output features, input features, then the window
    per_output = prod(kernel[axis] for axis in spec[1:])
    return 2.0 * prod(equation.outvars[0].aval.shape) * per_output


def _inner(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, a kernel's own left out."""
    if equation.primitive.name == 'pallas_call':
        return
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, 'eqns') or hasattr(getattr(one, 'jaxpr', None), 'eqns'):
                yield one


def _open(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, 'eqns') else jaxpr.jaxpr


def _describe(aval: Any) -> tuple[str, tuple[int, ...]]:
    name = str(aval.dtype)
    kind = name.rstrip('0123456789')
    letter = {'float': 'f', 'int': 's', 'uint': 'u'}.get(kind, kind)
    return _DTYPES.get(name, f'{letter}{name[len(kind) :]}'), tuple(aval.shape)
