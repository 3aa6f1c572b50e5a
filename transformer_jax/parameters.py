"""What attention variants and position schemes say of the parameters they want made for them."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from transformer_jax.shapes import Params


class Parameter(NamedTuple):
    """A parameter of a variant or of a position scheme: drawn by `initializer(rng, shape, dtype)`, float32."""

    initializer: Callable
    shape: tuple[int, ...]
    logical_axes: tuple[str | None, ...]


def heads_axis(num_heads: int) -> str | None:
    """The logical axis of heads. A single head, which recurrent decoders attend with, is never split and has none."""
    return 'heads' if num_heads > 1 else None


def shapes_by_name(params: Params) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf of a tree of parameters, by its path with slashes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape for path, leaf in leaves}
