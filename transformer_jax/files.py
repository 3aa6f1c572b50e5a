"""Files that are whole or absent: durable writes, the rename that makes a folder visible, and removal."""

import contextlib
import json
import os
from typing import Any

from etils import epath

from transformer_jax.config import ConfigError


def is_local(path: epath.Path) -> bool:
    """Whether `path` is on a file system with an atomic rename; object stores (`gs://`, `s3://`) have none."""
    return '://' not in os.fspath(path)


def make_absolute(path: str | os.PathLike[str]) -> epath.Path:
    """The path from the root, `~` resolved; Orbax takes no other. One on an object store stays as it is."""
    path = epath.Path(path)
    return epath.Path(os.path.abspath(path.expanduser())) if is_local(path) else path  # noqa: PTH100


def require_store(path: epath.Path) -> None:
    """Raises `ConfigError` where the package that reaches the path's object store is missing."""
    if is_local(path):
        return
    import fsspec

    scheme = os.fspath(path).partition('://')[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        install = """; pip install 'transformer-jax[gcs]'""" if scheme == 'gs' else ''
        raise ConfigError(f'{path} can not be reached: {error}{install}') from error


def sync_to_disk(path: epath.Path) -> None:
    """Returns once a local file's content, or a local folder's list of names, is on the disk."""
    if not is_local(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part; text is in UTF-8."""
    content = content.encode() if isinstance(content, str) else content
    if not is_local(path):  # an object appears whole
        path.write_bytes(content)
        return
    unfinished = path.parent / f'{path.name}.writing'
    try:
        unfinished.write_bytes(content)
        sync_to_disk(unfinished)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # a full disk does not say which one
        raise
    unfinished.replace(path)
    sync_to_disk(path.parent)


def write_json(path: epath.Path, content: Any) -> None:
    """Writes readable JSON with `write_whole`. Raises TypeError for what JSON can't hold."""
    write_whole(path, spell_json(content))


def spell_json(content: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(content, indent=2, ensure_ascii=False) + '\n'


def publish(unfinished: epath.Path, final: epath.Path) -> None:
    """Gives a finished folder its final name by one rename. On an object store both are the same folder."""
    if unfinished == final:
        return
    unfinished.rename(final)
    sync_to_disk(final.parent)


def remove_folder(folder: epath.Path) -> None:
    """Removes a folder of ours; it leaves the visible names first, so that no reader finds a half of it."""
    if is_local(folder) and not folder.name.endswith('.deleting'):
        doomed = folder.parent / f'{folder.name}.deleting'
        with contextlib.suppress(FileNotFoundError):
            doomed.rmtree()
        folder.rename(doomed)
        folder = doomed
    folder.rmtree()
