"""The manifest of a checkpoint folder: what every file must hash to, and a digest of the manifest itself."""

import concurrent.futures
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.config import ConfigError

MANIFEST = 'manifest.json'
ARRAYS = 'arrays'  # the folder beside the manifest that holds a folder for each part
FORMAT = 1
_BLOCK = 1 << 20  # bytes read at a time
_READERS = 4  # files hashed at once


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, found or used; the message names the folder and what is wrong with it."""


class RequestError(CheckpointError, ConfigError):
    """A request that what is there can't meet: bad use, not a failure. The message names what there is."""


class DamagedError(CheckpointError):
    """A checkpoint folder whose files are not those that were written."""


def digest_file(path: epath.Path) -> dict[str, Any]:
    """Size in bytes and sha256 of one file."""
    digest, size = hashlib.sha256(), 0
    with path.open('rb') as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {'size': size, 'sha256': digest.hexdigest()}


def digest_folder(folder: epath.Path, share: tuple[int, int] = (0, 1)) -> dict[str, dict[str, Any]]:
    """Digests by name relative to `folder`, manifest left out; `share` (i, n) is every n-th file from the i-th on."""
    first, stride = share
    names = sorted(name for name in _walk(folder) if name != MANIFEST)[first::stride]
    return _digest(folder, names)


def write_manifest(folder: epath.Path, content: dict[str, Any]) -> None:
    """Writes `manifest.json`, the last file of a checkpoint, and waits until it is on the disk."""
    text = check_json(content | {'format': FORMAT}, folder)
    sealed = json.loads(text) | {'digest': _sha256(text)}
    files.write_json(folder / MANIFEST, sealed)


def check_json(content: dict[str, Any], folder: epath.Path) -> str:
    """The content as JSON in one spelling. Raises CheckpointError for what JSON can't hold."""
    try:
        return _canonical(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f'what is saved beside the arrays in {folder} must be JSON: {error}') from error


def belongs(name: str, *parts: str) -> bool:
    """Whether a file, by its name within the folder, is of one of these parts or of the checkpoint as a whole."""
    place = name.split('/')
    return place[0] != ARRAYS or len(place) == 2 or place[1] in parts


def read_manifest(folder: epath.Path) -> dict[str, Any]:
    """The manifest, its own digest checked. Raises DamagedError when it is missing, unreadable or altered."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode('utf-8')
        content = json.loads(text)
        spelled_as_written = text == files.spell_json(content)
        digest = content.pop('digest')
        intact = spelled_as_written and digest == _sha256(_canonical(content))
    except FileNotFoundError as error:
        raise DamagedError(f'{folder} is incomplete: it has no {MANIFEST}, which is written last') from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f'{path} is damaged: {type(error).__name__}: {error}') from error
    if not intact:
        raise DamagedError(f'{path} is damaged: its content does not match its own digest')
    if content['format'] != FORMAT:
        raise CheckpointError(f'{path} has format {content["format"]}; this version of transformer_jax reads {FORMAT}')
    return content


def check_sizes(folder: epath.Path, manifest: dict[str, Any]) -> None:
    """A cheap look: every file is there with its size. Raises DamagedError naming the first that is not."""
    for name, expected in manifest['files'].items():
        try:
            size = (folder / name).stat().length
        except OSError as error:
            raise DamagedError(f'{folder} is damaged: {name} is missing or unreadable ({error})') from error
        if size != expected['size']:
            raise DamagedError(f'{folder} is damaged: {name} has {size} bytes, {expected["size"]} were written')


def check_digests(folder: epath.Path, manifest: dict[str, Any], parts: Iterable[str]) -> None:
    """Reads every file of these parts, and those that belong to all. Raises DamagedError naming the first bad one."""
    check_sizes(folder, manifest)
    names = [name for name in manifest['files'] if belongs(name, *parts)]
    try:
        found = _digest(folder, names)
    except OSError as error:
        raise DamagedError(f'{folder} is damaged: {error}') from error
    for name in names:
        if found[name] != manifest['files'][name]:
            raise DamagedError(f'{folder} is damaged: the content of {name} is not what was written (sha256 differs)')


def _digest(folder: epath.Path, names: list[str]) -> dict[str, dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(names, readers.map(lambda name: digest_file(folder / name), names), strict=True))


def _walk(folder: epath.Path, prefix: str = '') -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f'{prefix}{entry.name}/')
        else:
            yield prefix + entry.name


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(json.loads(json.dumps(content)), sort_keys=True, separators=(',', ':'))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode('utf-8')).hexdigest()
