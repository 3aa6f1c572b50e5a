"""Arrays on disk: the one place that knows Orbax.

A tree is stored as *parts*, one for each child of its root, so that parameters can be read without the optimizer. In a
part every leaf has a path such as `encoder/layers/kernel`; the tree's node types come from the tree that is asked for,
so tuples, dataclasses and optimizer states return as what they were.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.checkpoints.digests import CheckpointError, DamagedError, RequestError

Parts = dict[str, dict[str, Any]]  # part -> path -> leaf
ROOT = 'root'  # the part of leaves that hang on the root itself
_GENERATORS = {'key<fry>': 'threefry2x32', 'key<rbg>': 'rbg', 'key<urbg>': 'unsafe_rbg'}
_SHOWN = 8  # differences an error lists


class MismatchError(RequestError):
    """A sound checkpoint of another tree than the one asked for."""


class NonFiniteError(CheckpointError):
    """State that holds NaN or infinity, which is never saved."""


def split(tree: Any) -> Parts:
    """The leaves of a tree by part and path. Raises CheckpointError when two leaves would share a path."""
    parts: Parts = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        part, path = _locate(keys)
        leaves = parts.setdefault(part, {})
        if path in leaves:
            raise CheckpointError(f'two leaves of the tree have the path {part}/{path}')
        leaves[path] = leaf
    return parts


def join(like: Any, parts: Parts) -> Any:
    """The inverse of `split`: a tree of the structure of `like` with the leaves of `parts`."""

    def find(keys: Any, _: Any) -> Any:
        part, path = _locate(keys)
        return parts[part][path]

    return jax.tree_util.tree_map_with_path(find, like)


def nest(leaves: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The leaves of one part, as a manifest describes them, as nested dicts of ShapeDtypeStructs."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *groups, name = path.split('/')
        here = tree
        for group in groups:
            here = here.setdefault(group, {})
        here[name] = jax.ShapeDtypeStruct(tuple(leaf['shape']), jnp.dtype(leaf['dtype']))
    return tree


def as_arrays(parts: Parts) -> Parts:
    """The same with numpy leaves as jax arrays. Raises CheckpointError for a leaf that is neither, or would be cast."""
    return {part: {path: _as_array(part, path, x) for path, x in leaves.items()} for part, leaves in parts.items()}


def describe(parts: Parts) -> dict[str, dict[str, dict[str, Any]]]:
    """Shape and dtype of every leaf, as JSON; a PRNG key's dtype names its generator, as in `key<rbg>`."""
    return {
        part: {path: {'shape': list(x.shape), 'dtype': str(x.dtype)} for path, x in leaves.items()}
        for part, leaves in parts.items()
    }


def check_finite(parts: Parts) -> None:
    """Raises NonFiniteError naming the leaves that hold NaN or infinity, in any process's share of them."""
    bad = [f'{part}/{path}' for part, leaves in parts.items() for path, x in leaves.items() if not _is_finite(x)]
    anywhere = bool(bad)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        anywhere = bool(np.any(multihost_utils.process_allgather(np.array(anywhere))))
    if anywhere:
        names = ', '.join(bad[:_SHOWN]) or 'a leaf held by another process'
        more = f' and {len(bad) - _SHOWN} more' if len(bad) > _SHOWN else ''
        raise NonFiniteError(f'the state is not finite, so it is not saved: {names}{more} hold NaN or infinity')


def check_leaves(folder: epath.Path, recorded: dict[str, Any], wanted: Parts) -> None:
    """Compares the parts of `wanted` with those in the manifest. Raises MismatchError listing what differs."""
    problems = []
    expected = describe(wanted)
    for part, leaves in expected.items():
        stored = recorded.get(part, {})
        for path, leaf in leaves.items():
            name = f'{part}/{path}'
            if path not in stored:
                problems.append(f'{name} is not in the checkpoint')
                continue
            for what in ('shape', 'dtype'):
                if stored[path][what] != leaf[what]:
                    found, asked = (_show(each[what]) for each in (stored[path], leaf))
                    problems.append(f'{name} has {what} {found} in the checkpoint and {asked} in this run')
        problems += [f'{part}/{path} is in the checkpoint only' for path in stored if path not in leaves]
    if problems:
        shown = problems[:_SHOWN] + ([f'and {len(problems) - _SHOWN} more'] if len(problems) > _SHOWN else [])
        raise MismatchError(f'{folder} holds another tree than this run needs:\n  ' + '\n  '.join(shown))


def start_writing(folder: epath.Path, parts: Parts) -> Any:
    """Copies the arrays to the host and starts writing; `.result()` of what is returned waits and raises."""
    from orbax.checkpoint import v1 as orbax

    stored = {part: {path: _raw(x) for path, x in leaves.items() if x.size} for part, leaves in parts.items()}
    logging.getLogger('absl').addFilter(_is_news)
    with _context(orbax):
        return orbax.save_checkpointables_async(folder, {part: leaves for part, leaves in stored.items() if leaves})


def read(folder: epath.Path, wanted: Parts) -> Parts:
    """Reads the leaves that `wanted` describes onto its shardings. Check manifest, digests and leaves first."""
    from orbax.checkpoint import v1 as orbax

    abstract = {part: {path: _raw_abstract(x) for path, x in leaves.items()} for part, leaves in wanted.items()}
    stored = {part: {path: x for path, x in leaves.items() if x.size} for part, leaves in abstract.items()}
    try:
        with _context(orbax):
            found = orbax.load_checkpointables(folder, {part: leaves for part, leaves in stored.items() if leaves})
    except Exception as error:
        cause = error.__cause__ or error
        raise DamagedError(f'{folder} could not be read: {type(cause).__name__}: {cause}') from error
    return {
        part: {path: _cooked(found.get(part, {}).get(path), x) for path, x in leaves.items()}
        for part, leaves in wanted.items()
    }


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the log says what nobody else will.

    Orbax logs the traceback of every background thread that a failed write goes through; `.result()` raises the same.
    """
    return '_SignalingThread.run() raised an exception' not in record.getMessage()


def _context(orbax: Any) -> Any:
    context = orbax.Context()
    context.array.saving.use_compression = False  # float noise shrinks by 8 % and costs twice the processor time
    context.array.saving.enable_write_sharding_file = False  # a restore always says where it wants its arrays
    return context


def _locate(keys: Any) -> tuple[str, str]:
    if not keys:
        raise CheckpointError('a checkpoint holds a tree with named children, not a bare array')
    if len(keys) == 1:
        return ROOT, jax.tree_util.keystr(keys, simple=True)
    return jax.tree_util.keystr(keys[:1], simple=True), jax.tree_util.keystr(keys[1:], simple=True, separator='/')


def _as_array(part: str, path: str, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    if not isinstance(leaf, np.ndarray | np.generic):
        raise CheckpointError(f'{part}/{path} is a {type(leaf).__name__}; a checkpoint holds arrays')
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise CheckpointError(f'{part}/{path} has dtype {leaf.dtype}, which jax would cast; cast it first')
    return jnp.asarray(leaf)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_finite(leaf: jax.Array) -> bool:
    if _is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return True
    shards = (shard.data for shard in leaf.addressable_shards if shard.replica_id == 0)  # replicas are equal
    return all(bool(np.isfinite(np.asarray(block)).all()) for block in shards)


def _raw(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _raw_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    raw = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=_sharding(leaf))


def _cooked(found: jax.Array | None, leaf: Any) -> jax.Array:
    if found is None:  # without elements, so nothing was stored
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _sharding(leaf))
    if not _is_key(leaf):
        return found
    return jax.random.wrap_key_data(found, impl=_GENERATORS[str(leaf.dtype)])


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
