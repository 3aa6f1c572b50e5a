"""Checkpoints of one run: saved in the background, kept by three rules, and restored only when every byte is right."""

import concurrent.futures
import logging
import math
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self

from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints import arrays, digests, parameters
from transformer_jax.checkpoints.digests import CheckpointError, DamagedError, RequestError
from transformer_jax.checkpoints.entries import Entries, Entry, Report, name_of
from transformer_jax.checkpoints.keeping import rank, superfluous
from transformer_jax.checkpoints.parameters import read_parameters, write_parameters
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.writing import Writing, copy_part, explain
from transformer_jax.config import CheckpointConfig
from transformer_jax.shapes import Params

__all__ = ['CheckpointError', 'Store', 'read_parameters', 'write_parameters']

_log = logging.getLogger(__name__)


class Store:
    """The checkpoints and snapshots of a run folder.

    A checkpoint is all of the training state; a snapshot is the parameters alone, kept to be averaged. At most one is
    being written. `report` gets a line for everything that was ignored, removed or found damaged.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig, *, report: Report | None = None) -> None:
        self._folder = folder
        self._config = config
        self._report = report or _log.warning
        self._checkpoints = Entries(folder.checkpoints, self._report)
        self._snapshots = Entries(folder.snapshots, self._report)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
        self._running: concurrent.futures.Future[None] | None = None
        self._saving = 0  # the step of the last save that was started
        if folder.may_write and folder.primary:
            self._clean()

    def save(
        self,
        step: int,
        state: Any,
        extra: dict[str, Any],
        *,
        score: float | None = None,
        higher_is_better: bool = True,
        score_name: str = 'score',
        snapshot: bool = False,
    ) -> None:
        """Starts saving and returns when the state is copied, so that its buffers may be donated.

        `state` is a tree of jax arrays with named children, one of them `params`; `extra` is JSON and comes back from
        `restore` as JSON does. With `snapshot` the parameters are kept as a snapshot too. A score that is not finite
        counts as none; scores compare only under the same name and direction. Nothing older is deleted before this
        one is complete and visible. Raises CheckpointError when the save before failed, when the state is not finite,
        or when the step exists.
        """
        self.wait()
        self._check_may_write()
        scored = self._scored(step, score, score_name, higher_is_better=higher_is_better)
        content = parameters.manifest_content('checkpoint', step=step, info=extra) | scored
        parts = arrays.split(state)
        if snapshot and parameters.PART not in parts:
            raise CheckpointError(f'a snapshot needs a child named {parameters.PART!r}; the state has {list(parts)}')
        target = self._folder.checkpoints / name_of(step)
        if self._folder.primary:
            self._clean()
            self._make_room(target)

        def tidy() -> None:
            self._apply_keep_rules(step)
            if snapshot:
                self._copy_snapshot(step, target)

        self._launch(step, lambda: Writing(target, parts, content), tidy)

    def add_score(
        self,
        step: int,
        extra: dict[str, Any],
        *,
        score: float | None,
        higher_is_better: bool = True,
        score_name: str = 'score',
    ) -> None:
        """Gives a saved checkpoint the score of a later evaluation, and the `extra` that goes with it.

        Its arrays are not touched; a process that dies leaves it as it was or as it shall be. Then the keep rules count
        anew. Raises RequestError when there is no such step.
        """
        self.wait()
        self._check_may_write()
        entry = self._entry(step)
        scored = self._scored(step, score, score_name, higher_is_better=higher_is_better)
        if self._folder.primary:
            digests.write_manifest(entry.folder, entry.manifest | {'info': extra} | scored)
            self._apply_keep_rules(step)

    def save_snapshot(self, step: int, params: Params) -> None:
        """Starts saving parameters alone, as `save` does; an earlier snapshot of the same step is replaced."""
        self.wait()
        self._check_may_write()
        target = self._folder.snapshots / name_of(step)
        if self._folder.primary:
            self._clean()
            self._remove_snapshot(target)
        content = parameters.manifest_content('snapshot', step=step, info={})
        parts = arrays.split({parameters.PART: params})
        self._launch(step, lambda: Writing(target, parts, content), self._keep_newest_snapshots)

    def check(self) -> None:
        """Raises CheckpointError, as `wait` does, when a save has failed by now; cheap, and waits for none."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being saved any more. Raises CheckpointError when the last save failed."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result()
        except Exception as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Waits for the running save, then ends the background thread. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The complete checkpoints by number; a save that is still running does not count."""
        return [entry.step for entry in self._checkpoints.find()]

    def snapshots(self) -> list[int]:
        """The complete snapshots by number."""
        return [entry.step for entry in self._snapshots.find()]

    def latest(self) -> int | None:
        """The highest complete step, or None before the first. Raises DamagedError when there are only damaged ones."""
        entries = self._checkpoints.find()
        if entries:
            return entries[-1].step
        self._refuse_only_broken()
        return None

    def best(self) -> int | None:
        """The step of the best score, the earliest of equals; None when none has a score."""
        ranked = rank(self._checkpoints.find())
        return ranked[0].step if ranked else None

    def scores(self) -> dict[int, float]:
        """The score of each complete checkpoint that has one."""
        return {entry.step: entry.score for entry in self._checkpoints.find() if entry.score is not None}

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """Step, state and extra of the newest good checkpoint, or of `step`.

        `abstract_state` is a tree of ShapeDtypeStructs whose shardings say where each leaf goes. Every file is checked
        before use. When the newest is damaged that is reported, it is moved aside, and the one before is taken; a
        damaged `step` raises. Raises RequestError when there is none, MismatchError when the tree is another.
        """
        self.wait()

        def candidates() -> list[Entry]:
            return self._checkpoints.find()[::-1] if step is None else [self._entry(step)]

        entry, state = self._first_good(
            candidates, lambda entry: parameters.read_tree(entry.folder, entry.manifest, abstract_state)
        )
        return entry.step, state, entry.manifest['info']

    def restore_params(
        self,
        abstract_params: Params,
        step: int | Literal['best', 'latest'] | str | os.PathLike[str] | None = None,
        *,
        part: str = parameters.PART,
    ) -> tuple[Params, dict[str, Any]]:
        """Parameters without the optimizer, and what is known of them: kind, step, score, info.

        `step` is a number (a checkpoint, else a snapshot), 'best', 'latest', None (the best when there are scores, else
        the latest), or the path of a folder of `write_parameters`. `part` is the child of the state that is read, such
        as a moving average; snapshots and exports hold `params` alone, and give that. A damaged best or latest is
        reported and the next in that order taken.
        """
        self.wait()
        if isinstance(step, os.PathLike) or (isinstance(step, str) and step not in ('best', 'latest')):
            return read_parameters(step, abstract_params, part=part)
        entry, params = self._first_good(
            lambda: self._choose(step),
            lambda entry: parameters.read_part(entry.folder, entry.manifest, part, abstract_params),
        )
        return params, parameters.describe(entry.manifest)

    def parts(self, step: int) -> tuple[str, ...]:
        """The children of the state that the checkpoint of this step holds, as `restore_params` takes them."""
        return tuple(self._entry(step).manifest['leaves'])

    def _launch(self, step: int, start: Callable[[], Writing], then: Callable[[], None]) -> None:
        """Copies the arrays here and now, and does the rest in the background."""
        self._saving = step
        try:
            writing = start()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failure(error) from error
        self._running = self._worker.submit(writing.finish, then)

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f'saving step {self._saving} in {self._folder.path} failed: {explain(error)}. '
            'Earlier checkpoints are untouched'
        )

    def _scored(
        self, step: int, score: float | None, score_name: str, *, higher_is_better: bool
    ) -> dict[str, float | str | bool | None]:
        if score is not None and not math.isfinite(score):
            self._report(f'the score of step {step} is {score}, which counts as no score')
            score = None
        return {'score': score, 'score_name': score_name, 'higher_is_better': higher_is_better}

    def _check_may_write(self) -> None:
        if not self._folder.may_write:
            raise CheckpointError(f'{self._folder.path} is open for reading only; nothing is saved there')

    def _clean(self) -> None:
        self._checkpoints.clean()
        self._snapshots.clean()

    def _make_room(self, target: epath.Path) -> None:
        if not target.exists():
            return
        try:
            manifest = digests.read_manifest(target)
            digests.check_digests(target, manifest, manifest['leaves'])
        except DamagedError as error:
            self._report(str(error))
            self._checkpoints.move_aside(target)
            return
        raise CheckpointError(f'{target} exists already and is not overwritten')

    def _apply_keep_rules(self, newest: int) -> None:
        for entry in superfluous(self._checkpoints.find(), newest, self._config):
            self._checkpoints.remove(entry)

    def _copy_snapshot(self, step: int, checkpoint: epath.Path) -> None:
        target = self._folder.snapshots / name_of(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._remove_snapshot(target)
        copy_part(checkpoint, parameters.PART, target, parameters.manifest_content('snapshot', step=step, info={}))
        self._keep_newest_snapshots()

    def _remove_snapshot(self, target: epath.Path) -> None:
        # A run that went back to an earlier checkpoint makes the same snapshot again.
        if target.exists():
            files.remove_folder(target)

    def _keep_newest_snapshots(self) -> None:
        for entry in self._snapshots.find()[: -self._config.average_keep]:
            self._snapshots.remove(entry)

    def _entry(self, step: int, *, snapshots: bool = False) -> Entry:
        found = self._checkpoints.find() + (self._snapshots.find() if snapshots else [])
        for entry in found:
            if entry.step == step:
                return entry
        have = ', '.join(str(number) for number in sorted({entry.step for entry in found})) or 'none'
        raise RequestError(f'{self._folder.path} has no complete checkpoint of step {step}; there are: {have}')

    def _choose(self, step: int | str | None) -> list[Entry]:
        """Where parameters may come from, in order of preference."""
        if isinstance(step, int):
            return [self._entry(step, snapshots=True)]
        entries = self._checkpoints.find()
        ranked = [] if step == 'latest' else rank(entries)
        if step == 'best' and not ranked:
            raise RequestError(f'no checkpoint in {self._folder.checkpoints} has a score, so none is best')
        return ranked + [entry for entry in entries[::-1] if entry not in ranked]

    def _first_good(self, find: Callable[[], list[Entry]], read: Callable[[Entry], Any]) -> tuple[Entry, Any]:
        problems: dict[epath.Path, str] = {}
        while untried := [entry for entry in find() if entry.folder not in problems]:
            entry = untried[0]
            try:
                content = read(entry)
            except DamagedError as error:
                if entry.folder.exists():  # else the live run's keep rules deleted it while it was read: look again
                    problems[entry.folder] = str(error)
                    self._report(f'{error}. Step {entry.step} is not used')
                continue
            if problems:
                self._report(f'went back to step {entry.step}, the next good checkpoint')
                self._move_aside(problems)
            return entry, content
        if problems:
            raise DamagedError(
                'no good checkpoint is left:\n  ' + '\n  '.join(problems.values()) + self._say_snapshots()
            )
        self._refuse_only_broken()
        raise RequestError(f'there is no checkpoint in {self._folder.checkpoints}')

    def _move_aside(self, damaged: Iterable[epath.Path]) -> None:
        # Their numbers must be free when the run comes to these steps again, and no keep rule may count them.
        if self._folder.may_write and self._folder.primary:
            for folder in damaged:
                self._checkpoints.move_aside(folder)

    def _refuse_only_broken(self) -> None:
        broken = self._checkpoints.broken()
        if broken:
            raise DamagedError(
                f'none of the checkpoints in {self._folder.checkpoints} is complete: {", ".join(broken)}'
                + self._say_snapshots()
            )

    def _say_snapshots(self) -> str:
        kept = self.snapshots()
        if not kept:
            return ''
        return f'\nparameters alone are kept in {self._folder.snapshots / name_of(kept[-1])}, which --checkpoint takes'
