"""Parameters on their own: exported, averaged or imported, in a folder like a checkpoint's without the optimizer."""

import os
from collections.abc import Iterable
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints import arrays, digests
from transformer_jax.checkpoints.digests import CheckpointError, RequestError
from transformer_jax.checkpoints.writing import Writing, explain
from transformer_jax.shapes import Params

PART = 'params'


def write_parameters(path: str | os.PathLike[str], params: Params, info: dict[str, Any]) -> None:
    """Writes parameters and what is known of them (JSON) into a new folder, whole or not at all.

    Raises RequestError when something lies there already, CheckpointError when the parameters are not finite or when
    writing fails.
    """
    final = require_free(path)
    content = manifest_content('parameters', info=info)
    try:
        Writing(final, arrays.split({PART: params}), content).finish()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f'writing parameters to {final} failed: {explain(error)}') from error


def require_free(path: str | os.PathLike[str]) -> epath.Path:
    """The absolute path of a folder that may be written. Raises RequestError when something lies there already."""
    final = files.make_absolute(path)
    if final.exists():
        raise RequestError(f'{final} exists already and is not overwritten; remove it or give another name')
    unfinished = final.parent / f'{final.name}.writing'
    if unfinished.exists():
        raise RequestError(
            f'{unfinished} exists: another process writes it, or one that was cut off left it; remove it'
        )
    return final


def read_parameters(
    path: str | os.PathLike[str], abstract: Params | None = None, *, part: str = PART
) -> tuple[Params, dict[str, Any]]:
    """Parameters and info from a folder of `write_parameters`, a snapshot, or (its `part`) a checkpoint.

    `abstract` is a tree of ShapeDtypeStructs; each leaf comes onto its sharding, or the first device when it has none.
    None takes them as they were saved, as nested dicts. Every file is checked before use. Raises DamagedError, or
    MismatchError when the tree is another.
    """
    folder = files.make_absolute(path)
    manifest = digests.read_manifest(folder)
    if abstract is None:
        abstract = arrays.nest(manifest['leaves'].get(_part_of(manifest, part), {}))
    return read_part(folder, manifest, part, abstract), describe(manifest)


def read_part(folder: epath.Path, manifest: dict[str, Any], part: str, abstract: Any) -> Any:
    """One part of a checkpoint, checked and placed; of a snapshot or an export, which hold only that, `params`."""
    part = _part_of(manifest, part)
    return read_tree(folder, manifest, {part: abstract}, (part,))[part]


def read_tree(folder: epath.Path, manifest: dict[str, Any], abstract: Any, parts: Iterable[str] | None = None) -> Any:
    """The tree `abstract` describes. With `parts` None the checkpoint must hold nothing beyond it."""
    wanted = arrays.split(abstract)
    recorded = manifest['leaves']
    for part in recorded if parts is None else ():
        wanted.setdefault(part, {})
    arrays.check_leaves(folder, recorded, wanted)
    digests.check_digests(folder, manifest, wanted)
    return arrays.join(abstract, arrays.read(folder / digests.ARRAYS, wanted))


def manifest_content(kind: str, *, step: int | None = None, info: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a manifest says beside the arrays; `kind` is checkpoint, snapshot or parameters."""
    return {'kind': kind, 'step': step, 'score': None, 'info': info} | more


def describe(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a reader may want to say of the parameters it loaded: kind, step, score, and the info they came with."""
    own = {name: manifest[name] for name in ('kind', 'step', 'score')}
    return own | (manifest['info'] if manifest['kind'] != 'checkpoint' else {})


def _part_of(manifest: dict[str, Any], part: str) -> str:
    return part if manifest['kind'] == 'checkpoint' else PART
