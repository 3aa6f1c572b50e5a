"""One folder a run: where everything of it lies, and who may write there.

A run folder belongs to one run. The same command again resumes it; another fixed field, another vocabulary or a second
live process is refused, and so is a folder that holds something else.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints.run_lock import RunFolderError, now, take_lock

__all__ = ['RunFolder', 'RunFolderError', 'versions']

Differences = Callable[[dict[str, Any], dict[str, Any]], list[tuple[str, Any, Any]]]

_PACKAGES = ('transformer-jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain', 'sentencepiece')
_SHOWN = 8  # names an error lists


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that shape a run's numbers; packages not installed are left out."""
    found = {'python': platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class RunFolder:
    """The places of one run, local or on an object store. Made by `open` (to read) or `start` (to write)."""

    def __init__(self, path: str | os.PathLike[str], *, may_write: bool = False, primary: bool = True) -> None:
        self.path = files.make_absolute(path)
        self.may_write = may_write
        self.primary = primary  # of several processes, the one that writes what is not an array
        self._lock: Any = None
        self._made_folder = self._made_config = False  # by this start, so that it may take them back
        self._withdrawn = False

    @property
    def config(self) -> epath.Path:
        return self.path / 'config.json'

    @property
    def earlier_configs(self) -> epath.Path:
        """One JSON line for each config that a resume replaced."""
        return self.path / 'earlier_configs.jsonl'

    @property
    def vocabulary(self) -> epath.Path:
        return self.path / 'vocabulary'

    @property
    def data(self) -> epath.Path:
        return self.path / 'data'

    @property
    def checkpoints(self) -> epath.Path:
        return self.path / 'checkpoints'

    @property
    def snapshots(self) -> epath.Path:
        return self.path / 'snapshots'

    @property
    def metrics(self) -> epath.Path:
        return self.path / 'metrics.jsonl'

    @property
    def tensorboard(self) -> epath.Path:
        return self.path / 'tensorboard'

    @property
    def record(self) -> epath.Path:
        """Versions, devices and what was chosen for this machine."""
        return self.path / 'record.json'

    @property
    def evaluations(self) -> epath.Path:
        return self.path / 'evaluations'

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A run folder to read from, also while the run is live. Raises RunFolderError when it is none."""
        folder = cls(path)
        files.require_store(folder.path)
        if not folder.path.exists():
            raise RunFolderError(f'there is no run folder {folder.path}')
        if not folder.path.is_dir():
            raise RunFolderError(f'{folder.path} is a file, not a run folder')
        if not folder.config.exists():
            raise RunFolderError(f'{folder.path} is no run folder: it has no config.json; {_contents(folder.path)}')
        folder.read_config()
        return folder

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        config: dict[str, Any],
        differences: Differences,
        *,
        primary: bool = True,
    ) -> Self:
        """A run folder to write to: made with `config`, or resumed when it holds the same run.

        `differences(old, new)` gives `(field, old value, new value)` of the fixed fields that differ; any of them
        refuses. When only free fields differ, config.json takes the new ones and the old go to earlier_configs.jsonl.
        Of several processes one is `primary`, and the others must start after it: only the primary takes the lock
        and writes. An object store has no lock. Raises RunFolderError.
        """
        folder = cls(path, may_write=True, primary=primary)
        files.require_store(folder.path)
        if folder.path.exists() and not folder.path.is_dir():
            raise RunFolderError(f'{folder.path} is a file; give a folder for the run')
        if primary:
            folder._refuse_foreign()
            folder._made_folder = not folder.path.exists()
            folder.path.mkdir(parents=True, exist_ok=True)
            if files.is_local(folder.path):
                folder._lock = take_lock(folder.path)
        try:
            folder._adopt(config, differences)
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Gives the lock back; the folder is for reading from then on."""
        self.may_write = False
        if self._lock is not None:
            (self.path / 'owner.json').unlink(missing_ok=True)
            if self._withdrawn:
                (self.path / 'run.lock').unlink(missing_ok=True)
            self._lock.release()
            self._lock = None
        if self._withdrawn and self._made_folder and files.is_local(self.path):
            with contextlib.suppress(OSError):  # not empty: somebody else has put something there
                os.rmdir(self.path)  # noqa: PTH106 - the method of epath raises something else

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_config(self) -> dict[str, Any]:
        """The config as it was resolved at the last start. Raises RunFolderError when it can't be read."""
        return read_json(self.config)

    def read_record(self) -> dict[str, Any]:
        """What record.json holds; empty before the first `update_record`."""
        return read_json(self.record) if self.record.exists() else {}

    def update_record(self, **entries: Any) -> None:
        """Adds entries to record.json, over those of the same name; of several processes only the primary writes."""
        if not self.may_write:
            raise RunFolderError(f'{self.path} is open for reading only')
        if self.primary:
            files.write_json(self.record, self.read_record() | entries)

    def withdraw(self) -> None:
        """Takes a start back that came to nothing, so that another config may start here; an earlier start's run stays.

        Removes what this start made, and at `close` the folder itself where it made that too.
        """
        if not (self.may_write and self.primary) or self.checkpoints.exists():
            return
        if not self._made_config and self.vocabulary.exists():
            return
        for path in (self.vocabulary, self.data):
            if path.exists():
                path.rmtree()
        for path in (self.record, self.config):
            path.unlink(missing_ok=True)
        self._withdrawn = True

    def check_text(self, contents: dict[str, dict[str, str]]) -> None:
        """Refuses other text than the run was started with. A run open for writing remembers the first it is shown.

        `contents` has for each split a digest of all that it is read from, by name. What was moved since the start has
        another name, and is the same.
        """
        known = self.read_record().get('text')
        if known is None:
            if self.may_write:
                self.update_record(text=contents)
            return
        changed = []
        for split in sorted({*known, *contents}):
            pairs = itertools.zip_longest(known.get(split, {}).items(), contents.get(split, {}).items())
            changed += [f'{(new or old)[0]} ({split})' for old, new in pairs if not (old and new and old[1] == new[1])]
        if changed:
            raise RunFolderError(
                f'the text of the run in {self.path} is no longer what the run was started with: {", ".join(changed)} '
                'changed. Give it the same content again, or start another run folder'
            )

    def check_vocabulary(self, fingerprint: str) -> None:
        """Refuses another vocabulary than the run's. A run open for writing remembers the first one it is shown."""
        known = self.read_record().get('vocabulary')
        if known is None:
            if self.may_write:
                self.update_record(vocabulary=fingerprint)
            return
        if known != fingerprint:
            raise RunFolderError(
                f'{self.path} was trained with the vocabulary of fingerprint {known}, but this one has {fingerprint}; '
                'ids would mean other words. Give the vocabulary of the run, or start another run folder'
            )

    def _refuse_foreign(self) -> None:
        if not self.path.exists() or self.config.exists():
            return
        # A start that was killed, or met a full disk, leaves no more than these.
        ours = {'run.lock', 'owner.json', 'owner.json.writing', 'config.json.writing'}
        if any(entry.name not in ours for entry in self.path.iterdir()):
            raise RunFolderError(
                f'{self.path} is not empty and holds no run (no config.json); {_contents(self.path)}. '
                'Give an empty or a new folder'
            )

    def _adopt(self, config: dict[str, Any], differences: Differences) -> None:
        config = json.loads(json.dumps(config))  # tuples become lists, as they will be when read
        if not self.config.exists():
            if not self.primary:
                raise RunFolderError(
                    f'{self.path} has no config.json, though the first process has written one: the run folder of '
                    'several processes must be on a disk that they all share, or on an object store'
                )
            files.write_json(self.config, config)
            self._made_config = True
            return
        old = self.read_config()
        changed = differences(old, config)
        if changed:
            rows = '\n'.join(f'  {field}: {before!r} in the run, {after!r} now' for field, before, after in changed)
            raise RunFolderError(
                f'{self.path} holds a run with other settings, which a resume must not change:\n{rows}\n'
                'Use the settings of the run, or another folder'
            )
        if self.primary and old != config:
            lines = self.earlier_configs.read_text() if self.earlier_configs.exists() else ''
            lines += json.dumps({'replaced': now(), 'config': old}, ensure_ascii=False) + '\n'
            files.write_whole(self.earlier_configs, lines)
            files.write_json(self.config, config)


def read_json(path: epath.Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises `RunFolderError`."""
    try:
        content = json.loads(path.read_bytes().decode('utf-8'))
    except (OSError, ValueError) as error:
        raise RunFolderError(f'{path} could not be read: {error}') from error
    if not isinstance(content, dict):
        raise RunFolderError(f'{path} holds {type(content).__name__}, not an object')
    return content


def _contents(folder: epath.Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return 'it is empty'
    more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
    return f'it holds {", ".join(names[:_SHOWN])}{more}'
