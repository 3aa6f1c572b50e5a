"""The steps that lie in a folder, found by number; what is no sound step is named, never used and never touched."""

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints import digests

Report = Callable[[str], None]

_STEP = re.compile(r'step_(\d+)')
_UNFINISHED = re.compile(r'step_\d+\.(writing|deleting)')


class Entry(NamedTuple):
    """One step folder whose manifest is sound and whose files have their sizes."""

    step: int
    folder: epath.Path
    manifest: dict[str, Any]

    @property
    def score(self) -> float | None:
        return self.manifest['score']


def name_of(step: int) -> str:
    return f'step_{step:08d}'


class Entries:
    """The step folders in one folder."""

    def __init__(self, folder: epath.Path, report: Report) -> None:
        self.folder = folder
        self._report = report
        self._named: set[str] = set()

    def find(self) -> list[Entry]:
        """Complete steps, lowest first. Whatever else lies there is reported, once."""
        found: dict[int, Entry] = {}
        for path in self._paths():
            match = _STEP.fullmatch(path.name)
            if not match:
                if not _UNFINISHED.fullmatch(path.name):
                    self._name_once(path, f'{path} is no checkpoint and is left alone')
                continue
            step = int(match[1])
            if step in found:
                self._name_once(path, f'{path} is ignored: {found[step].folder.name} is the same step')
                continue
            try:
                manifest = digests.read_manifest(path)
                digests.check_sizes(path, manifest)
            except digests.DamagedError as error:
                if path.exists():  # else it was deleted while we looked, as the keep rules ask
                    self._name_once(path, f'{error}. It is not used')
                continue
            if manifest['step'] != step:
                self._name_once(path, f'{path} is not used: its manifest says step {manifest["step"]}')
                continue
            found[step] = Entry(step, path, manifest)
        return [found[step] for step in sorted(found)]

    def broken(self) -> list[str]:
        """Names of folders that are called like a step and are none that can be used."""
        good = {entry.folder.name for entry in self.find()}
        return [path.name for path in self._paths() if _STEP.fullmatch(path.name) and path.name not in good]

    def clean(self) -> int:
        """Removes what a process that died left half-written or half-deleted. Only the writer of the folder may."""
        doomed = [path for path in self._paths() if _UNFINISHED.fullmatch(path.name)]
        if not files.is_local(self.folder):  # no rename there: a step without its manifest was never finished
            steps = [path for path in self._paths() if _STEP.fullmatch(path.name)]
            doomed += [path for path in steps if not (path / digests.MANIFEST).exists()]
        for path in doomed:
            path.rmtree()
        if doomed:
            names = ', '.join(path.name for path in doomed)
            self._report(f'removed {len(doomed)} unfinished in {self.folder}: {names}')
        return len(doomed)

    def move_aside(self, entry: epath.Path) -> epath.Path:
        """Renames a damaged step so that its number is free; nothing is deleted."""
        number = 0
        while (aside := entry.parent / f'{entry.name}.damaged{number or ""}').exists():
            number += 1
        entry.rename(aside)
        self._report(f'moved the damaged {entry} to {aside.name}')
        self._named.add(aside.name)
        return aside

    def remove(self, entry: Entry) -> None:
        """Removes a step that no keep rule asks for; a failure is reported and changes nothing else."""
        try:
            files.remove_folder(entry.folder)
        except OSError as error:
            self._report(f'{entry.folder} should have been deleted and could not be: {error}')

    def _paths(self) -> list[epath.Path]:
        # The canonical name of a step comes before another spelling of the same number.
        paths: list[epath.Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths = list(self.folder.iterdir())
        return sorted(paths, key=lambda path: (not _is_canonical(path.name), path.name))

    def _name_once(self, path: epath.Path, message: str) -> None:
        if path.name not in self._named:
            self._named.add(path.name)
            self._report(message)


def _is_canonical(name: str) -> bool:
    match = _STEP.fullmatch(name)
    return match is not None and name_of(int(match[1])) == name
