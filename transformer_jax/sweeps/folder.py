"""The folder of a sweep: where each training lies, what became of it, and whether it is still what the sweep asks for.

Under the folder a point has its own: `<point>/seed-N` is a run folder like any other, `<point>/seed-N.log` what its
programs said, `<point>/seed-N.json` how it ended.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints.run_folder import RunFolder, RunFolderError, read_json
from transformer_jax.config import Config
from transformer_jax.overlay import config_to_dict, fixed_differences
from transformer_jax.sweeps.points import Sweep, Trial

Status = Literal['waiting', 'running', 'finished', 'failed', 'unfinished']


@dataclass(frozen=True)
class Outcome:
    """How a training and its evaluation ended, kept in the sweep's folder."""

    status: Literal['finished', 'failed']
    reason: str  # of a failure; '' otherwise
    split: str  # that was evaluated
    config: Mapping[str, Any] | None  # what was trained; None when there is no such config
    evaluation: str | None  # the folder of the scores, within the run folder


@dataclass(frozen=True)
class TrialState:
    """Where a training stands: from its outcome if that is still what is asked for."""

    status: Status
    reason: str = ''
    outcome: Outcome | None = None


class SweepFolder:
    """The places of one sweep. Its run folders may lie elsewhere, as on an object store: under `runs`."""

    def __init__(self, path: str | os.PathLike[str], runs: str | os.PathLike[str] | None = None) -> None:
        self.path = files.make_absolute(path)
        self.runs = self.path if runs is None else files.make_absolute(runs)

    @property
    def record(self) -> epath.Path:
        """Which sweep lies here, and with which changes and seeds."""
        return self.path / 'sweep.json'

    def run_dir(self, trial: Trial) -> epath.Path:
        return self.runs / trial.point.folder / f'seed-{trial.seed}'

    def log(self, trial: Trial) -> epath.Path:
        """What the programs of a training wrote, start after start."""
        return self._beside(trial, 'log')

    def outcome(self, trial: Trial) -> epath.Path:
        return self._beside(trial, 'json')

    def lock(self, trial: Trial) -> epath.Path:
        """Held while a training is under way."""
        return self._beside(trial, 'lock')

    @property
    def results_lock(self) -> epath.Path:
        """Held while tables are written, which several calls may come to at once."""
        return self.path / 'results.lock'

    def read_record(self) -> dict[str, Any] | None:
        """What `start` wrote; None for a folder that holds no sweep."""
        return read_json(self.record) if self.record.exists() else None

    def start(self, sweep: Sweep, *, may_write: bool, must_exist: bool = False, **entries: Any) -> None:
        """Makes the folder of a new sweep if it `may_write`, or sees that the one here is this one. RunFolderError.

        Trainings that are here must be what the sweep now asks for, up to fields that a resume may change. The record
        takes the sweep's file, changes and seeds, and `entries`.
        """
        record = self.read_record()
        if not files.is_local(self.path):
            raise RunFolderError(f'{self.path} is on an object store; only the run folders of a sweep may lie there')
        if record is None and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunFolderError(f'{self.path} is not empty and holds no sweep (no sweep.json); give a new folder')
        if record is None and must_exist:
            raise RunFolderError(f'there is no sweep in {self.path}')
        if record is not None and record.get('name') != sweep.name:
            raise RunFolderError(
                f'{self.path} holds the sweep {record.get("name")!r}, not {sweep.name!r}; give another'
            )
        if record is not None and record.get('runs') != str(self.runs):
            raise RunFolderError(f'the run folders of {self.path} are in {record.get("runs")}, not in {self.runs}')
        self._refuse_changed(sweep)
        new = {'name': sweep.name, 'file': str(sweep.file), 'runs': str(self.runs), 'shared': dict(sweep.shared)}
        new |= {'seeds': None if sweep.seeds is None else list(sweep.seeds)} | entries
        if may_write and new != record:
            self.path.mkdir(parents=True, exist_ok=True)
            files.write_json(self.record, new)

    def state(self, sweep: Sweep, trial: Trial, split: str) -> TrialState:
        """Where a training stands, by what is on disk."""
        outcome = self._read_outcome(trial)
        if outcome is None:
            return TrialState('unfinished' if self.log(trial).exists() else 'waiting')
        if outcome.status == 'failed':
            return TrialState('failed', outcome.reason, outcome)
        changed = _differences(outcome.config or {}, plain(sweep.resolve(trial)))
        if outcome.split != split:
            changed = [*changed, f'scores of the {split} split instead of {outcome.split}']
        return TrialState('unfinished', f'asked for now: {"; ".join(changed)}') if changed else _finished(outcome)

    def write_outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Keeps how a training ended; replaces how an earlier start of it did."""
        path = self.outcome(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, dataclasses.asdict(outcome))

    def evaluations(self, trial: Trial) -> set[str]:
        """The names of all evaluations of a training, within its run folder."""
        folder = RunFolder(self.run_dir(trial)).evaluations
        return {f'{folder.name}/{entry.name}' for entry in folder.iterdir()} if folder.exists() else set()

    def others(self, sweep: Sweep) -> list[str]:
        """Points that have a folder here and are not of the sweep."""
        known = {point.folder for point in sweep.points}
        if not self.path.exists():
            return []
        return sorted(
            entry.name
            for entry in self.path.iterdir()
            if entry.name not in known
            and entry.is_dir()
            and any(one.name.startswith('seed-') for one in entry.iterdir())
        )

    def _beside(self, trial: Trial, kind: str) -> epath.Path:
        return self.path / trial.point.folder / f'seed-{trial.seed}.{kind}'

    def _read_outcome(self, trial: Trial) -> Outcome | None:
        path = self.outcome(trial)
        if not path.exists():
            return None
        try:
            return Outcome(**read_json(path))
        except TypeError as error:
            raise RunFolderError(f'{path} holds no outcome of a training: {error}') from error

    def _refuse_changed(self, sweep: Sweep) -> None:
        rows = []
        for trial in sweep.trials():
            config, trained = self._resolve(sweep, trial), self._read_trained(trial)
            if config is None or trained is None:
                continue
            for name, old, new in fixed_differences(trained, plain(config)):
                rows.append(f'  {trial.name}: {name} was {old!r}, is {new!r} now')
        if rows:
            raise RunFolderError(
                f'{self.path} holds trainings that are no longer what the sweep asks for:\n' + '\n'.join(rows) + '\n'
                'Give another folder, or move these trainings away to have them done anew'
            )

    def _read_trained(self, trial: Trial) -> Mapping[str, Any] | None:
        """The config of a training; None before it has one, and while it has one on an object store alone."""
        if files.is_local(self.runs):
            run = RunFolder(self.run_dir(trial))
            return run.read_config() if run.config.exists() else None
        outcome = self._read_outcome(trial)
        return None if outcome is None else outcome.config

    @staticmethod
    def _resolve(sweep: Sweep, trial: Trial) -> Config | None:
        try:
            return sweep.resolve(trial)
        except ValueError:
            return None  # fails when its turn comes, and says why in its row


def plain(config: Config) -> dict[str, Any]:
    """A config as it is read back from JSON."""
    return json.loads(json.dumps(config_to_dict(config)))


def _finished(outcome: Outcome) -> TrialState:
    return TrialState('finished', outcome=outcome)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = 'config') -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after, f'{prefix}.{name}')
        elif before != after:
            found.append(f'{prefix}.{name} {after!r} instead of {before!r}')
    return found
