"""One model of several: the mean of their parameters, leaf by leaf. Paper section 6.1 averages the last checkpoints."""

import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.checkpoints.digests import RequestError
from transformer_jax.checkpoints.entries import Entries, Report
from transformer_jax.checkpoints.parameters import read_parameters, require_free, write_parameters
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.shapes import Params


def average(trees: Iterable[Params]) -> Params:
    """The mean of trees of parameters, as numpy arrays of the dtypes that came in.

    Takes one tree at a time, so a generator needs two in memory. Sums are float64, so that the mean is the float32 (or
    bfloat16) number next to the true one, and the mean of one tree is that tree. Raises ValueError for no tree, for
    trees of different structure, and for leaves that are not floating point.
    """
    trees = iter(trees)
    try:
        first = next(trees)
    except StopIteration:
        raise ValueError('there is nothing to average') from None
    paths, structure = jax.tree_util.tree_flatten_with_path(first)
    names = [jax.tree_util.keystr(keys, simple=True, separator='/') for keys, _ in paths]
    dtypes = [leaf.dtype for _, leaf in paths]
    for name, dtype in zip(names, dtypes, strict=True):
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f'{name} has dtype {dtype}; only floating point parameters have a mean')
    sums = [np.asarray(leaf).astype(np.float64) for _, leaf in paths]
    del first, paths
    count = 1
    for tree in trees:
        if jax.tree.structure(tree) != structure:
            raise ValueError(f'the trees to average differ: {structure} and {jax.tree.structure(tree)}')
        for name, total, leaf in zip(names, sums, jax.tree.leaves(tree), strict=True):
            if leaf.shape != total.shape:
                raise ValueError(f'{name} has shape {total.shape} in one tree and {leaf.shape} in another')
            total += np.asarray(leaf)
        count += 1
    means = [(total / count).astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]
    return jax.tree.unflatten(structure, means)


def average_folders(folders: list[epath.Path], abstract_params: Params | None = None) -> Params:
    """The mean of the parameters in these folders (checkpoints, snapshots or exports), read one after the other."""
    return average(read_parameters(folder, abstract_params)[0] for folder in folders)


def average_run(
    folder: RunFolder | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    last: int | None = None,
    steps: list[int] | None = None,
    abstract_params: Params | None = None,
    report: Report = print,
) -> list[int]:
    """Writes the mean of the `last` snapshots or of the named `steps` as a parameters folder `out`; returns the steps.

    Named steps may be snapshots or checkpoints. The steps go into the info of `out`. Without `abstract_params` the
    parameters are taken as they were saved, as nested dicts. Raises ValueError unless exactly
    one of `last` and `steps` is given, and RequestError when there are fewer than asked for, or `out` exists.
    """
    if (last is None) == (steps is None):
        raise ValueError(f'give either last or steps to average; last is {last} and steps is {steps}')
    if last is not None and last < 1:
        raise ValueError(f'last is {last}; it must be at least 1')
    if steps is not None and (not steps or len(set(steps)) != len(steps)):
        raise ValueError(f'steps is {steps}; name at least one step, and each once')
    require_free(out)  # before minutes of work
    if not isinstance(folder, RunFolder):
        folder = RunFolder.open(folder)
    snapshots = {entry.step: entry.folder for entry in Entries(folder.snapshots, report).find()}
    chosen = _last(snapshots, last) if last is not None else _named(folder, snapshots, steps or [], report)
    mean = average_folders([chosen[step] for step in sorted(chosen)], abstract_params)
    write_parameters(out, mean, {'averaged_steps': sorted(chosen), 'run': os.fspath(folder.path)})
    return sorted(chosen)


def _last(snapshots: dict[int, epath.Path], last: int) -> dict[int, epath.Path]:
    if len(snapshots) < last:
        raise RequestError(
            f'{last} snapshots are to be averaged, but there are {len(snapshots)}: {_list(snapshots)}. '
            'config.checkpoint.average_keep says how many are kept'
        )
    return {step: snapshots[step] for step in sorted(snapshots)[-last:]}


def _named(
    folder: RunFolder, snapshots: dict[int, epath.Path], steps: list[int], report: Report
) -> dict[int, epath.Path]:
    found = {entry.step: entry.folder for entry in Entries(folder.checkpoints, report).find()} | snapshots
    missing = [step for step in steps if step not in found]
    if missing:
        raise RequestError(f'there are no snapshots or checkpoints of steps {_list(missing)}; there are {_list(found)}')
    return {step: found[step] for step in steps}


def _list(steps: Iterable[Any]) -> str:
    return ', '.join(str(step) for step in sorted(steps)) or 'none'
