"""Which mesh axis splits which logical axis: one table, the shardings made from it, and a hint to the compiler."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError
from transformer_jax.parallel.mesh import FSDP, MODEL, ROWS, SEQUENCE
from transformer_jax.shapes import Array

MeshAxes = str | tuple[str, ...] | None

# Logical axis -> what splits it, or None where every device holds the whole axis. Parameters have the axes from
# 'layers' on; the width of activations is never split, so they call it None.
RULES: dict[str, MeshAxes] = {
    'batch': ROWS,
    'length': SEQUENCE,
    'layers': None,
    'vocab': MODEL,
    'embed': FSDP,
    'heads': MODEL,
    'kv_heads': MODEL,
    'head_dim': None,
    'mlp': MODEL,
}


def constrain(array: Array, *logical_axes: str | None) -> Array:
    """Tells the compiler to lay an activation as the rules say on the mesh of `jax.set_mesh`; without one, nothing.

    Values are the same either way. An axis that the mesh does not divide evenly is left whole: the rows of a decode may
    be few, while those of a training batch and the parameters were checked.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, activation_spec(array.shape, logical_axes, mesh))


def replicate(tree: Any) -> Any:
    """Lays a whole copy of each array on every device of the mesh of `jax.set_mesh`, for hosts that read it."""
    return tree if ambient_mesh() is None else jax.lax.with_sharding_constraint(tree, PartitionSpec())


def ambient_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` where it has more than one device, outside of `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def activation_spec(
    shape: tuple[int, ...], logical_axes: tuple[str | None, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Over which mesh axes an activation lies: those of the rules that split anything and divide its sizes."""
    spec: list[MeshAxes] = []
    for size, logical in zip(shape, logical_axes, strict=True):
        rule = None if logical is None else RULES[logical]
        names = (rule,) if isinstance(rule, str) else rule or ()
        axes = tuple(axis for axis in names if mesh.shape.get(axis, 1) > 1)
        if size % math.prod(mesh.shape[axis] for axis in axes):
            axes = ()
        spec.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*spec)


def sharding_tree(logical_axes: Any, shapes: Any, mesh: Mesh, rules: Mapping[str, MeshAxes] = RULES) -> Any:
    """A `NamedSharding` for each parameter.

    `logical_axes` has a tuple of logical names (or None) where `shapes` has anything with a `.shape`. Raises
    `ConfigError` naming the parameter when a size is not divisible, and `ValueError` when trees or ranks differ, a
    logical axis has no rule, a rule names a mesh axis that the mesh lacks, or one mesh axis would split two axes of a
    parameter.
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
    name: str, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, rules: Mapping[str, MeshAxes]
) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(f'parameter {name} has shape {shape} but {len(axes)} logical axes {axes}')
    split: dict[str, str] = {}  # mesh axis -> the logical axis that took it
    spec: list[MeshAxes] = []
    for logical, size in zip(axes, shape, strict=True):
        mesh_axes = _mesh_axes(name, logical, mesh, rules)
        spec.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
        for mesh_axis in mesh_axes:
            if mesh_axis in split:
                raise ValueError(
                    f'parameter {name}: mesh axis {mesh_axis!r} would split both {split[mesh_axis]!r} and {logical!r} '
                    f'of {axes}; map one of them to None or to another of {mesh.axis_names}'
                )
            split[mesh_axis] = str(logical)
        ways = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
        if size % ways:
            raise ConfigError(_say_what_fits(name, str(logical), size, mesh_axes, ways))
    return PartitionSpec(*spec)


def _say_what_fits(name: str, logical: str, size: int, mesh_axes: tuple[str, ...], ways: int) -> str:
    lower = size - size % ways
    fits = [str(fewer) for fewer in range(1, ways) if size % fewer == 0]
    axis = ' x '.join(mesh_axes)
    padded = f'; config.model.vocab_pad_multiple={ways} would pad it to {lower + ways}' if logical == 'vocab' else ''
    return (
        f'parameter {name}: axis {logical!r} of size {size} is not divisible by the {ways} ways of mesh axis '
        f'{axis!r}; a size of {f"{lower} or " if lower else ""}{lower + ways} would fit, and so would '
        f'config.execution.mesh.{axis}={" or ".join(fits)}{padded}'
    )


def _mesh_axes(name: str, logical: str | None, mesh: Mesh, rules: Mapping[str, MeshAxes]) -> tuple[str, ...]:
    if logical is None:
        return ()
    if logical not in rules:
        raise ValueError(f'parameter {name}: logical axis {logical!r} has no rule; rules exist for {sorted(rules)}')
    rule = rules[logical]
    mesh_axes = (rule,) if isinstance(rule, str) else rule or ()
    for mesh_axis in mesh_axes:
        if mesh_axis not in mesh.shape:
            raise ValueError(
                f'parameter {name}: the rule for {logical!r} names mesh axis {mesh_axis!r}, which this mesh does not '
                f'have; it has {mesh.axis_names}'
            )
    return mesh_axes
