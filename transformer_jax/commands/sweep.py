"""The verb `sweep`: trains and scores the points of a sweep that are missing, and writes them as one table."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax import files
from transformer_jax.config import ConfigError
from transformer_jax.data import make_source
from transformer_jax.data.text_files import SPLITS
from transformer_jax.sweeps import jobs, plots, table
from transformer_jax.sweeps.board import Board
from transformer_jax.sweeps.folder import Outcome, SweepFolder, TrialState, plain
from transformer_jax.sweeps.points import Sweep, Trial, load_sweep
from transformer_jax.sweeps.results import Row, make_rows

PROGRAM = (sys.executable, '-m', 'transformer_jax')
TrainCommand = Callable[['SweepRun', Trial], Sequence[str]]

_ELSEWHERE = 'by another call of this sweep'
_LOCK_SECONDS = 60.0  # how long another call may take to write the tables


def open_sweep(
    out: str | os.PathLike[str],
    config: str | None,
    changes: Mapping[str, str],
    *,
    seeds: Sequence[int] | None = None,
    runs: str | os.PathLike[str] | None = None,
    split: str | None = None,
    baseline: str | None = None,
    train_command: TrainCommand | None = None,
) -> 'SweepRun':
    """The sweep of a file and its folder. What is None, and all that `config` None leaves unsaid, is as it was there.

    Raises `ConfigError`.
    """
    record = SweepFolder(out).read_record() or {}
    if config is None:
        if not record:
            raise ConfigError(f'there is no sweep in {out} to go on with; give --config=FILE')
        changes = {**record['shared'], **changes}
        seeds = record['seeds'] if seeds is None else seeds
    folder = SweepFolder(out, runs or record.get('runs'))
    sweep = load_sweep(config or record['file'], changes, seeds)
    scored: str = split or record.get('split', 'test')
    _check_split(sweep, scored)
    return SweepRun(
        sweep,
        folder,
        split=scored,
        baseline=baseline or record.get('baseline'),
        train_command=train_command,
    )


def _check_split(sweep: Sweep, split: str) -> None:
    """Refuses a split that the data lack before every point is trained and then can't be scored."""
    data = sweep.config.data
    if any('data.source' in point.changes for point in sweep.points):
        return
    # TFDS may have to make its set first, and always has the three.
    splits = SPLITS if data.source == 'tfds' else make_source(sweep.config, lambda _: None).splits()
    if split not in splits:
        raise ConfigError(f'--split is {split!r}; the data of {sweep.base} have {", ".join(splits)}')


class SweepRun:
    """A sweep in its folder: what each training's state is, and what brings it further.

    Args:
        sweep: the points.
        folder: where they lie.
        split: what is scored.
        baseline: the point that others are compared with, by name or folder; None = the first.
        program: the command that trains and evaluates, without its verb; None = this package.
        train_command: makes the command that trains a trial, where that is not a process of this machine.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepFolder,
        *,
        split: str = 'test',
        baseline: str | None = None,
        program: Sequence[str] | None = None,
        train_command: TrainCommand | None = None,
    ) -> None:
        self.sweep, self.folder, self.split, self.baseline = sweep, folder, split, baseline
        self.program, self._train_command = tuple(program or PROGRAM), train_command or SweepRun.command_to_train
        base = sweep.points[0] if baseline is None else sweep.select([baseline])[0].point
        self.baseline_name = base.name
        self._board = Board()
        self._trials = {trial.name: trial for trial in sweep.trials()}
        self._before: dict[str, set[str]] = {}
        self._held: dict[str, Any] = {}
        self.states: dict[str, TrialState] = {}
        self.written: list[str] = []  # the tables and plots, by their names in the folder

    def start(self, *, may_write: bool, must_exist: bool = False) -> None:
        """Takes the folder, and reads where each training stands. Raises `ConfigError` for another sweep's folder."""
        entries = {'split': self.split, 'baseline': self.baseline}
        self.folder.start(self.sweep, may_write=may_write, must_exist=must_exist, **entries)
        self.states = {name: self.folder.state(self.sweep, trial, self.split) for name, trial in self._trials.items()}
        others = self.folder.others(self.sweep)
        if others:
            self._board.say(f'{self.folder.path} also holds points that are not in the sweep: {", ".join(others)}')

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those that are not finished."""
        return [trial for trial in trials if self.states[trial.name].status != 'finished']

    def run(self, trials: Sequence[Trial], *, at_once: int = 1) -> int | None:
        """Trains and scores what is missing of `trials`; returns the signal that stopped it."""
        todo = self.missing(trials)
        self._board.say(f'{len(trials) - len(todo)} of {len(trials)} trainings are finished, {len(todo)} to do')
        with jobs.Stop() as stop:
            self._refresh()
            stopped = jobs.run_jobs(
                self._begin(todo), at_once=at_once, stop=stop, on_end=self._end, on_wait=self._board.tick
            )
            for job in stopped:
                self._release(job.name)
            self._board.clear()
            return stop.signals[0] if stop.signals else None

    def commands(self, trial: Trial) -> list[tuple[str, Sequence[str]]]:
        """What brings a trial from nothing to its scores: what each command does, and the command."""
        return [('train', self._train_command(self, trial)), ('evaluate', self.command_to_evaluate(trial))]

    def rows(self) -> list[Row]:
        """The table as it stands."""
        return make_rows(self.folder, self.sweep, self.states, self.baseline)

    def write(self, *, with_plots: bool) -> list[Row]:
        """Writes the tables, and the plots where matplotlib is installed; returns the rows."""
        import filelock

        with filelock.FileLock(self.folder.results_lock, timeout=_LOCK_SECONDS):
            self._look_again()
            rows = self.rows()
            notes = table.explain(self.baseline_name, rows)
            files.write_whole(self.folder.path / 'results.csv', table.to_csv(rows))
            files.write_whole(self.folder.path / 'results.md', table.to_markdown(self.sweep.name, rows, notes))
            self.written = ['results.csv', 'results.md']
            if with_plots:
                try:
                    self.written += [path.name for path in plots.draw(Path(self.folder.path), rows, self.baseline_name)]
                except ImportError:
                    self._board.say("no plots: they need matplotlib; pip install 'transformer-jax[viz]' brings it")
        return rows

    def command_to_train(self, trial: Trial) -> list[str]:
        """A training on this machine."""
        return [*self.program, 'train', f'--run={self.folder.run_dir(trial)}', *self.sweep.arguments(trial)]

    def command_to_evaluate(self, trial: Trial) -> list[str]:
        """The scoring of a training, on this machine."""
        return [*self.program, 'evaluate', f'--run={self.folder.run_dir(trial)}', f'--split={self.split}']

    def _begin(self, trials: Sequence[Trial]) -> Iterator[jobs.Job]:
        """The jobs of what is still missing when its turn comes, each held against other calls."""
        for trial in trials:
            if not self._hold(trial):
                continue
            self._before[trial.name] = self.folder.evaluations(trial)
            self.states[trial.name] = TrialState('running')
            job = jobs.Job(trial.name, self.commands(trial), self.folder.log(trial))
            self._board.begin(job)
            self._refresh()
            yield job

    def _hold(self, trial: Trial) -> bool:
        """Takes a trial for this call, unless another has it or has finished it, or it has no config at all."""
        import filelock

        lock = filelock.FileLock(self.folder.lock(trial), thread_local=False)
        self.folder.log(trial).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            self.states[trial.name] = TrialState('running', _ELSEWHERE)
            return False
        self._held[trial.name] = lock
        self.states[trial.name] = self.folder.state(self.sweep, trial, self.split)
        if self.states[trial.name].status == 'finished':
            self._release(trial.name)
            return False
        self.folder.outcome(trial).unlink(missing_ok=True)
        try:
            self.sweep.resolve(trial)
        except ConfigError as error:
            self._close(trial, Outcome('failed', str(error), self.split, None, None))
            return False
        return True

    def _end(self, job: jobs.Job, failure: jobs.Failure | None) -> None:
        trial = self._trials[job.name]
        config = plain(self.sweep.resolve(trial))
        new = sorted(self.folder.evaluations(trial) - self._before[job.name])
        if failure is not None:
            outcome = Outcome('failed', failure.describe(job.log), self.split, config, None)
        elif not new:
            outcome = Outcome('failed', 'evaluate: it wrote no scores', self.split, config, None)
        else:
            outcome = Outcome('finished', '', self.split, config, new[-1])
        self._close(trial, outcome)

    def _close(self, trial: Trial, outcome: Outcome) -> None:
        self.folder.write_outcome(trial, outcome)
        self.states[trial.name] = TrialState(outcome.status, outcome.reason, outcome)
        self._release(trial.name)
        self._board.end(trial.name)
        rows = self.write(with_plots=False)
        self._board.show(rows)
        self._board.tell(trial.name, next(row for row in rows if row.point == trial.point.name))

    def _look_again(self) -> None:
        """Reads where each training stands that this call does not hold: another may have brought it further."""
        for name, trial in self._trials.items():
            if name in self._held:
                continue
            state = self.folder.state(self.sweep, trial, self.split)
            if self.states[name].reason != _ELSEWHERE or state.status in ('finished', 'failed'):
                self.states[name] = state

    def _release(self, name: str) -> None:
        lock = self._held.pop(name, None)
        if lock is not None:
            lock.release()

    def _refresh(self) -> None:
        if self._board.is_live:
            self._board.show(self.rows())


def finish(run: SweepRun, trials: Sequence[Trial]) -> bool:
    """Writes and prints the table; says what is not finished. True when nothing of `trials` failed."""
    rows = run.write(with_plots=True)
    for line in table.to_lines(rows):
        print(line)
    print()
    for note in table.explain(run.baseline_name, rows):
        print(note)
    failed = [trial.name for trial in trials if run.states[trial.name].status == 'failed']
    if failed:
        logs = run.folder.path / '<point>' / 'seed-N.log'
        print(f'{len(failed)} failed: {", ".join(failed)}; {logs} has their words, the same command tries again')
    print(f'{run.folder.path}: {", ".join(run.written)}')
    return not failed
