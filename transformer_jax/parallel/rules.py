"""Which mesh axis splits which logical axis of a parameter: one table, and the shardings made from it."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.mesh import DATA

# Logical axis -> mesh axis, or None where every device holds the whole axis. The data axis splits batches alone.
RULES: dict[str, str | None] = {
    'batch': DATA,
    'layers': None,
    'vocab': None,
    'embed': None,
    'heads': None,
    'kv_heads': None,
    'head_dim': None,
    'mlp': None,
}


def sharding_tree(logical_axes: Any, shapes: Any, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """A `NamedSharding` for each parameter.

    `logical_axes` has a tuple of logical names (or None) where `shapes` has anything with a `.shape`. Raises
    `ValueError` naming the parameter when trees or ranks differ, a logical axis has no rule, a rule names a mesh axis
    that the mesh lacks, one mesh axis would split two axes of a parameter, or a size is not divisible.
    """
    named, axes_tree = jax.tree_util.tree_flatten_with_path(logical_axes, is_leaf=_is_axes)
    sized, shapes_tree = jax.tree_util.tree_flatten_with_path(shapes)
    if axes_tree != shapes_tree:
        only_axes = {_name(path) for path, _ in named} - {_name(path) for path, _ in sized}
        only_shapes = {_name(path) for path, _ in sized} - {_name(path) for path, _ in named}
        raise ValueError(
            'logical axes and parameters are different trees; '
            f'only with axes: {sorted(only_axes)}, only with shapes: {sorted(only_shapes)}'
        )
    shardings = [
        NamedSharding(mesh, _partition(_name(path), axes, leaf.shape, mesh, rules))
        for (path, axes), (_, leaf) in zip(named, sized, strict=True)
    ]
    return jax.tree_util.tree_unflatten(shapes_tree, shardings)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')


def _partition(
    name: str, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, rules: Mapping[str, str | None]
) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(f'parameter {name} has shape {shape} but {len(axes)} logical axes {axes}')
    split: dict[str, str] = {}  # mesh axis -> the logical axis that took it
    spec: list[str | None] = []
    for logical, size in zip(axes, shape, strict=True):
        mesh_axis = _mesh_axis(name, logical, mesh, rules)
        spec.append(mesh_axis)
        if mesh_axis is None:
            continue
        if mesh_axis in split:
            raise ValueError(
                f'parameter {name}: mesh axis {mesh_axis!r} would split both {split[mesh_axis]!r} and {logical!r} of '
                f'{axes}; map one of them to None or to another of {mesh.axis_names}'
            )
        split[mesh_axis] = str(logical)
        ways = mesh.shape[mesh_axis]
        if size % ways:
            lower = size - size % ways
            fits = [ways_ for ways_ in range(1, ways) if size % ways_ == 0]
            raise ValueError(
                f'parameter {name}: axis {logical!r} of size {size} is not divisible by the {ways} ways of mesh axis '
                f'{mesh_axis!r}; a size of {f"{lower} or " if lower else ""}{lower + ways} would fit, and so would '
                f'{" or ".join(map(str, fits))} ways'
            )
    return PartitionSpec(*spec)


def _mesh_axis(name: str, logical: str | None, mesh: Mesh, rules: Mapping[str, str | None]) -> str | None:
    if logical is None:
        return None
    if logical not in rules:
        raise ValueError(f'parameter {name}: logical axis {logical!r} has no rule; rules exist for {sorted(rules)}')
    mesh_axis = rules[logical]
    if mesh_axis is not None and mesh_axis not in mesh.shape:
        raise ValueError(
            f'parameter {name}: the rule for {logical!r} names mesh axis {mesh_axis!r}, which this mesh does not have; '
            f'it has {mesh.axis_names}'
        )
    return mesh_axis
