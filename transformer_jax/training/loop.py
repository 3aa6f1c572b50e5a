"""The training loop: restore, step, report, evaluate, save, stop. The order of these is the order of the code."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import jax
import numpy as np

from transformer_jax.checkpoints.store import Store
from transformer_jax.config import Config
from transformer_jax.data.batch import HostBatch
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.models.interface import Model
from transformer_jax.parallel.hosts import Hosts
from transformer_jax.parallel.mesh import place_batch
from transformer_jax.shapes import Params
from transformer_jax.training.metrics import Metrics, Window, figures
from transformer_jax.training.parameter_count import count_parameters
from transformer_jax.training.profiling import Profile
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.state import TrainState, make_state
from transformer_jax.training.stopping import StallWatch, Stopped, StopRequest
from transformer_jax.training.update import Update, make_update


class TrainingError(RuntimeError):
    """Training can't go on."""


class Evaluation(Protocol):
    """What the loop reads of an evaluation's result."""

    def score(self, name: str) -> float:
        """The figure of this name: 'loss' (less is better) or 'bleu'."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the numbers among them are reported."""
        ...


Evaluate = Callable[[Params], Evaluation]


@dataclass
class Progress:
    """The host's share of a checkpoint: where the data are, and how evaluation has gone."""

    batch_index: int = 0  # training batches used, accumulated ones counted singly
    evaluated_step: int = 0
    best_score: float | None = None
    evaluations_without_better: int = 0
    score_name: str | None = None  # which figure those two are about

    def look_at(self, score_name: str) -> None:
        """Forgets the best score when it was of another figure: the two can't be compared."""
        if self.score_name not in (None, score_name):
            self.best_score, self.evaluations_without_better = None, 0
        self.score_name = score_name


def train(
    config: Config,
    model: Model,
    batches: TrainingBatches,
    store: Store,
    reporter: Reporter,
    mesh: jax.sharding.Mesh,
    *,
    evaluate: Evaluate | None,
    hosts: Hosts | None = None,
    profile: Profile | None = None,
) -> int | None:
    """Trains until `config.train.steps` updates, early stopping, or a signal. Returns that signal, or None.

    A run that was cut goes on as if it had not been: state, data order and random keys are all functions of what the
    checkpoint holds. Raises `TrainingError` after `max_bad_steps` non-finite updates in a row.
    """
    hosts = hosts or Hosts()
    stall = StallWatch(reporter.stopwatch, config.execution.hosts.stall_seconds, hosts)
    with StopRequest(hosts) as stop, stall, jax.set_mesh(mesh):
        run = _Run(config, model, batches, store, reporter, mesh, evaluate, stop, profile or Profile(None, '.'))
        # A shared disk may show one of them a checkpoint later than another.
        hosts.compare({'the step that training goes on from': run.applied})
        run.until_done()
        return stop.signal


class _Run:
    """The loop's own variables, so that each stage can be a method that reads as a sentence."""

    def __init__(
        self,
        config: Config,
        model: Model,
        batches: TrainingBatches,
        store: Store,
        reporter: Reporter,
        mesh: jax.sharding.Mesh,
        evaluate: Evaluate | None,
        stop: StopRequest,
        profile: Profile,
    ) -> None:
        self.config, self.store, self.reporter, self.mesh = config, store, reporter, mesh
        self.evaluate, self.stop, self.profile = evaluate, stop, profile
        update = make_update(config, model, mesh)
        with reporter.timing('compile'):
            self.state, self.progress = _restore_or_start(config, model, update, store)
        self.progress.look_at(config.evaluation.score)
        self.applied = int(self.state.step)  # updates known to be done
        reporter.begin(self.applied)
        reporter.header(list(mesh.devices.flat), count_parameters(config.model, vocab_size=model.vocab_size))
        self.programs = _Programs(update, reporter)
        self.bad_in_row = int(self.state.bad_in_row)
        self.saved_step = self.applied or None
        self.window = Window()
        self.in_flight: tuple[Metrics, np.ndarray] | None = None  # a dispatched update, and the ids of its pairs
        self.feed = _micro_batches(batches.iterate(self.progress.batch_index), config.train.accumulation)
        self.stopped_early = False

    def until_done(self) -> None:
        """Updates, each followed by what is due after it."""
        total = self.config.train.steps
        if self.applied >= total:
            self.reporter.say(f'the run has its {self.applied:,} updates; config.train.steps asks for {total:,}')
        try:
            if self.applied < total and _is_due(self.applied, self.config.evaluation.every_steps):
                self._evaluate_and_save()  # unless that was done: a signal may have cut it short
            self._check_patience()
            while not (self.stop.due() or self.stopped_early):
                if self._maybe_applied() >= total:
                    self._settle()
                    if self.applied >= total:
                        break
                self.store.check()
                self._update()
                self._do_what_is_due()
            self._settle()
            if self.applied and self.applied >= total and not self.stopped_early:
                self._evaluate_and_save()
            elif self.applied:
                self._save()
        finally:
            self.feed.close()
            self.profile.end()
            with self.reporter.timing('checkpoint'):
                self.store.wait()
        if self.stop.requested:
            saved = f'after step {self.applied:,}, which is saved' if self.applied else 'before the first update'
            self.reporter.say(f'stopped by a signal {saved}; the same command goes on')

    def _update(self) -> None:
        number = self._maybe_applied() + 1
        if self.profile.is_over(number):
            self._settle()
            self.profile.end()
        self.profile.begin(number)
        with self.reporter.timing('data'):
            host_batches = next(self.feed)
            micro_batches = tuple(place_batch(one.batch, self.mesh) for one in host_batches)
        program = self.programs.of(self.state, micro_batches)
        with self.reporter.timing('step'), self.profile.annotate(number):
            self.state, metrics = program(self.state, micro_batches)
            # The result of the update before is read only now, when the device already has this one to work on.
            self._settle()
        self.in_flight = metrics, np.concatenate([one.pair_ids for one in host_batches])
        self.progress.batch_index += len(host_batches)

    def _settle(self) -> None:
        """Waits for the update in flight and learns whether it was applied."""
        if self.in_flight is None:
            return
        metrics, pair_ids = self.in_flight
        self.in_flight = None
        self.window.add(metrics)
        if not int(metrics.bad_steps):
            self.applied += 1
            self.bad_in_row = 0
            self.reporter.advance(self.applied)
            return
        self.bad_in_row += 1
        shown = ', '.join(map(str, pair_ids[:8])) + (', ...' if len(pair_ids) > 8 else '')
        self.reporter.say(f'update {self.applied + 1:,} was skipped: loss or gradient not finite (pairs {shown})')
        if self.bad_in_row > self.config.train.max_bad_steps:
            raise TrainingError(
                f'{self.bad_in_row} updates in a row were not finite, more than config.train.max_bad_steps '
                f'{self.config.train.max_bad_steps}; the last one held the training pairs {shown}. The parameters are '
                f'those of update {self.applied:,}; lower the learning rate or set config.optimizer.clip_norm'
            )

    def _maybe_applied(self) -> int:
        return self.applied + (self.in_flight is not None)

    def _do_what_is_due(self) -> None:
        config, step = self.config, self._maybe_applied()
        if step % config.logging.every_steps == 0 or step >= config.train.steps:
            self._settle()
            self.reporter.step(self.applied, figures(self.window.close()))
        if step >= config.train.steps:
            return  # the end evaluates and saves
        evaluation_due = _is_due(step, config.evaluation.every_steps)
        if not (evaluation_due or _is_due(step, config.checkpoint.every_steps)):
            return
        self._settle()
        if self.applied != step:
            return  # a skipped update: what is due comes with the next good one
        if evaluation_due:
            self._evaluate_and_save()
        else:
            self._save()

    def _evaluate_and_save(self) -> None:
        if self.evaluate is None or self.progress.evaluated_step == self.applied:
            self._save()
            return
        note = ''
        try:
            with self.reporter.timing('evaluation'), self.stop.interruptible():
                result = self.evaluate(self.state.evaluation_params())
        except Stopped:
            self.stop.due()
            self._save()
            return
        score = result.score(self.config.evaluation.score)
        self.progress.evaluated_step = self.applied
        if _is_better(score, self.progress.best_score, self.config.evaluation.score):
            self.progress.best_score, self.progress.evaluations_without_better = score, 0
            note = 'best so far'
        else:
            self.progress.evaluations_without_better += 1
        self.reporter.evaluation(self.applied, _numbers(result.to_dict()), note=note)
        self._save(score)
        self._check_patience()

    def _check_patience(self) -> None:
        patience = self.config.evaluation.patience
        if self.stopped_early or patience is None or self.progress.evaluations_without_better < patience:
            return
        self.stopped_early = True
        self.reporter.say(f'stopped early: {patience} evaluations without a better {self.config.evaluation.score}')

    def _save(self, score: float | None = None) -> None:
        """Saves what `applied` updates made, or gives the score to the checkpoint that has them already."""
        if self.applied == self.saved_step and score is None:
            return
        config, name = self.config.checkpoint, self.config.evaluation.score
        extra = dataclasses.asdict(self.progress) | {'seed': self.config.seed}
        kind: Any = {'score_name': name, 'higher_is_better': name != 'loss'}
        self.reporter.flush()  # figures of updates that no later start repeats
        with self.reporter.timing('checkpoint'):
            if self.applied == self.saved_step:  # a signal had cut its evaluation short
                self.store.add_score(self.applied, extra, score=score, **kind)
            else:
                snapshot = config.average_every_steps is None or _is_due(self.applied, config.average_every_steps)
                self.store.save(self.applied, self.state, extra, score=score, snapshot=snapshot, **kind)
        self.saved_step = self.applied


class _Programs:
    """The compiled update of each bucket."""

    def __init__(self, update: Update, reporter: Reporter) -> None:
        self._jitted = update.jitted
        self._compiled: dict[tuple, Any] = {}
        self._reporter = reporter

    def of(self, state: TrainState, micro_batches: tuple) -> Callable:
        """Compiles the update for these shapes the first time they come."""
        first = micro_batches[0]
        key = (len(micro_batches), first.inputs.shape, first.targets.shape)
        if key not in self._compiled:
            start = monotonic()
            with self._reporter.timing('compile'):
                self._compiled[key] = self._jitted.lower(state, micro_batches).compile()
            rows, source_length = first.inputs.shape
            name = f'the update of {rows} rows of {source_length} + {first.targets.shape[1]} subwords'
            self._reporter.compiled(name, monotonic() - start)
        return self._compiled[key]


def _restore_or_start(config: Config, model: Model, update: Update, store: Store) -> tuple[TrainState, Progress]:
    """The newest checkpoint, or fresh parameters drawn from the run's seed."""
    if store.latest() is None:

        def start() -> TrainState:
            params = model.init(jax.random.key(config.seed, impl='threefry2x32'))
            return make_state(params, update.optimizer, with_average=config.train.ema_decay is not None)

        return jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, update.state))(), Progress()
    _, state, extra = store.restore(update.state)
    names = {field.name for field in dataclasses.fields(Progress)}
    return state, Progress(**{name: value for name, value in extra.items() if name in names})


def _micro_batches(batches: Iterator[HostBatch], accumulation: int) -> Generator[list[HostBatch], None, None]:
    """The batches of one update at a time."""
    try:
        while True:
            yield [next(batches) for _ in range(accumulation)]
    finally:
        batches.close()  # type: ignore[attr-defined]


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0


def _is_better(score: float, best: float | None, name: str) -> bool:
    if not np.isfinite(score):
        return False
    return best is None or (score < best if name == 'loss' else score > best)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The figures of an evaluation, flat: numbers as they are, and each score by its name."""
    flat: dict[str, float] = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return flat | {score['name']: score['value'] for score in values.get('scores', ())}
