"""Whole runs of the training loop on strings to be copied, small enough to be made by the dozen."""

import dataclasses
import functools
import io
import json
import os
import signal
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import Config
from transformer_jax.data.batch import Batch, HostBatch
from transformer_jax.data.corpus import Corpus, open_corpus
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.interface import Model
from transformer_jax.overlay import config_to_dict, fixed_differences, overlay
from transformer_jax.parallel.mesh import make_mesh, num_data_shards
from transformer_jax.shapes import Array, Params, PRNGKey
from transformer_jax.training import loop, update
from transformer_jax.training.metrics import Metrics, Window
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.schedule import make_schedule
from transformer_jax.training.state import TrainState, abstract_state

CONFIG = overlay(
    Config(),
    {
        'seed': 7,
        'data.source': 'copying',
        'data.copying.num_symbols': 10,
        'data.copying.min_length': 2,
        'data.copying.max_length': 5,
        'data.copying.num_train': 83,
        'data.copying.num_validation': 7,
        'data.copying.num_test': 5,
        'data.max_length': 13,
        'data.batch_tokens': 77,
        'data.num_buckets': 1,
        'vocabulary.size': 25,
        'vocabulary.byte_fallback': False,
        'model.d_model': 16,
        'model.d_ff': 23,
        'model.num_encoder_layers': 2,
        'model.num_decoder_layers': 2,
        'model.max_length': 17,
        'model.attention.num_heads': 2,
        'model.attention.head_dim': 5,
        'optimizer.schedule.warmup_steps': 9,
        'train.steps': 20,
        'train.ema_decay': 0.9,
        'evaluation.bleu': False,
        'evaluation.score': 'loss',
        'checkpoint.every_steps': 6,
        'execution.unroll': 1,
        'logging.every_steps': 4,
        'logging.tensorboard': False,
    },
)

# Source positions that no real batch has; `MarkedModel` answers to them.
BAD_LOSS, BAD_GRADIENT = 1000, 2000


class MarkedModel(EncoderDecoder):
    """The encoder-decoder; a batch marked at a source position has a loss, or only a gradient, that is not finite."""

    def init(self, rng: PRNGKey) -> Params:
        """Waves whose phase is the key's, since normal draws take longer to compile than all else in a toy run."""
        phase = jax.random.key_data(rng).sum().astype(jnp.float32)

        def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> Array:
            name = jax.tree_util.keystr(path)
            wave = jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32) * 12.9898 + len(name) + phase).reshape(leaf.shape)
            return 0.3 * wave + ('scale' in name)

        return jax.tree_util.tree_map_with_path(draw, _trace_params(self))

    def logical_axes(self) -> Any:
        return _trace_axes(self)

    def hidden(self, params: Params, batch: Batch, *, dropout_rng: PRNGKey | None = None) -> Array:
        highest = batch.input_positions.max()
        unmarked = batch._replace(
            input_positions=jnp.where(batch.input_positions >= BAD_LOSS, 0, batch.input_positions)
        )
        hidden = super().hidden(params, unmarked, dropout_rng=dropout_rng)
        # The square root of 0 is 0, and its slope is infinite.
        root = jnp.sqrt(jnp.where(highest == BAD_GRADIENT, 0 * hidden.sum(), 1.0))
        hidden = hidden + jnp.where(highest == BAD_GRADIENT, root, 0.0)
        return hidden * jnp.where(highest == BAD_LOSS, jnp.nan, 1.0)


@functools.cache
def _trace_params(model: MarkedModel) -> Params:
    return jax.eval_shape(super(MarkedModel, model).init, jax.random.key(0))


@functools.cache
def _trace_axes(model: MarkedModel) -> Any:
    return super(MarkedModel, model).logical_axes()


def mark(batch: Batch, kind: int) -> Batch:
    positions = np.array(batch.input_positions)
    positions[0, 0] = kind
    return batch._replace(input_positions=positions)


class CrashError(Exception):
    """What a test raises in the middle of a run."""


Hook = Callable[[str, int], None]


def kill_at(*moments: tuple[str, int]) -> Hook:
    """Sends this process SIGTERM when an activity starts for the nth time (from 1)."""

    def hook(activity: str, count: int) -> None:
        if (activity, count) in moments:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def crash_at(activity: str, count: int) -> Hook:
    def hook(*now: object) -> None:
        if now == (activity, count):
            raise CrashError

    return hook


@dataclass(frozen=True)
class Score:
    """What the loop reads of an evaluation."""

    value: float

    def score(self, name: str) -> float:
        return self.value

    def to_dict(self) -> dict[str, Any]:
        return {'loss': self.value}


@dataclass
class Outcome:
    """What a call of `train` did; `ids` and `updates` are of this call alone."""

    signal: int | None = None
    ids: list[tuple[int, ...]] = field(default_factory=list)  # pairs of each batch that was taken
    updates: list[tuple[float, float, float, int]] = field(default_factory=list)  # loss, nll, learning rate, bad
    console: str = ''
    error: Exception | None = None

    @property
    def rates(self) -> list[float]:
        return [rate for _, _, rate, bad in self.updates if not bad]


class _RecordedBatches(TrainingBatches):
    """Training batches as they are taken, some of them marked."""

    def record(self, marks: dict[int, int], ids: list) -> None:
        self._marks, self._ids = marks, ids

    def iterate(self, start: int = 0) -> Generator[HostBatch, None, None]:
        batches = super().iterate(start)
        try:
            for index, one in enumerate(batches, start):
                self._ids.append(tuple(one.pair_ids))
                yield one._replace(batch=mark(one.batch, self._marks[index])) if index in self._marks else one
        finally:
            batches.close()


class _HookedReporter(Reporter):
    def __init__(self, *args: Any, hook: Hook | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hook, self._counts = hook, {}

    def timing(self, activity: str) -> Any:
        self._counts[activity] = self._counts.get(activity, 0) + 1
        if self._hook is not None:
            self._hook(activity, self._counts[activity])
        return super().timing(activity)


class Toy:
    """One corpus, and runs on it. Equal updates are traced and compiled once, whatever the number of runs."""

    def __init__(self, folder: Path) -> None:
        self.corpus: Corpus = open_corpus(
            CONFIG, epath.Path(folder / 'vocabulary'), epath.Path(folder / 'data'), report=lambda line: None
        )
        self._steps: dict[str, Any] = {}
        self._traced: dict[str, int] = {}

    def model(self, config: Config = CONFIG) -> Model:
        vocabulary = self.corpus.vocabulary
        return MarkedModel(config.model, vocabulary.size, vocabulary.start_id, config.execution)

    def batches(self, config: Config = CONFIG, *, shards: int = 1) -> '_RecordedBatches':
        return _RecordedBatches(
            self.corpus.prepared('train'),
            config.data,
            vocabulary=self.corpus.vocabulary,
            seed=config.seed,
            rows_multiple=shards,
            group=config.train.accumulation,
            report=lambda line: None,
        )

    def train(
        self,
        path: Path,
        changes: dict[str, Any] | None = None,
        *,
        evaluate: Any = None,
        hook: Hook | None = None,
        marks: dict[int, int] | None = None,
        devices: int = 1,
    ) -> Outcome:
        """Starts or resumes the run in `path`. An exception of the loop comes back in the outcome."""
        config = overlay(CONFIG, changes or {})
        mesh = make_mesh(config.execution.mesh, jax.devices()[:devices])
        outcome, console = Outcome(), io.StringIO()
        batches = self.batches(config, shards=num_data_shards(mesh))
        batches.record(marks or {}, outcome.ids)
        recorded: list[Metrics] = []

        class RecordingWindow(Window):
            def add(self, metrics: Metrics) -> None:
                recorded.append(jax.device_get(metrics))
                super().add(metrics)

        with (
            mock.patch.object(loop, 'Window', RecordingWindow),
            mock.patch.object(update, 'make_train_step', self._remember_steps(config)),
            RunFolder.start(path, config_to_dict(config), fixed_differences) as folder,
            Store(folder, config.checkpoint, report=lambda line: console.write(line + '\n')) as store,
            _HookedReporter(
                folder.metrics,
                folder.tensorboard,
                config.logging,
                total_steps=config.train.steps,
                stream=console,
                hook=hook,
            ) as reporter,
        ):
            try:
                outcome.signal = loop.train(
                    config, self.model(config), batches, store, reporter, mesh, evaluate=evaluate
                )
            except Exception as error:  # noqa: BLE001 - the test looks at it
                outcome.error = error
        outcome.updates = [
            (float(m.loss_sum), float(m.nll_sum), float(m.learning_rate), int(m.bad_steps)) for m in recorded
        ]
        outcome.console = console.getvalue()
        return outcome

    def times_traced(self, changes: dict[str, Any] | None = None) -> int:
        """How many programs were made so far of the update on one device that this config asks for."""
        return self._traced[_describe_update(overlay(CONFIG, changes or {}), 1)]

    def _remember_steps(self, config: Config) -> Callable[..., Any]:
        make = update.make_train_step

        def remembered(model: Model, optimizer: Any, schedule: Any, train: Any, *, seed: int, mesh: Any) -> Any:
            key = _describe_update(config, mesh.size)
            if key not in self._steps:
                step = make(model, optimizer, schedule, train, seed=seed, mesh=mesh)

                def counted(*arguments: Any) -> Any:
                    self._traced[key] = self._traced.get(key, 0) + 1
                    return step(*arguments)

                self._steps[key] = counted
            return self._steps[key]

        return remembered

    def restore(
        self, path: Path, step: int | None = None, changes: dict[str, Any] | None = None
    ) -> tuple[int, TrainState, dict[str, Any]]:
        config = overlay(CONFIG, changes or {})
        optimizer = make_optimizer(
            config.optimizer, make_schedule(config.optimizer.schedule, config.model.d_model, config.train.steps)
        )
        abstract = abstract_state(self.model(config), optimizer, with_average=config.train.ema_decay is not None)
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract)
        with open_store(path, config) as store:
            return store.restore(target, step)


def _describe_update(config: Config, num_devices: int) -> str:
    """All that the traced update depends on, and the number of batches beside it."""
    train = dataclasses.replace(config.train, steps=1, max_bad_steps=0)
    return repr((config.model, config.execution, config.optimizer, train, config.seed, num_devices))


def open_store(path: Path, config: Config = CONFIG) -> Store:
    return Store(RunFolder.open(path), config.checkpoint, report=lambda line: None)


def read_events(path: Path, event: str) -> list[dict[str, Any]]:
    lines = (path / 'metrics.jsonl').read_text().splitlines()
    return [record for record in map(json.loads, lines) if record['event'] == event]


def bits(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every leaf by its path, to the last bit."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in leaves}


def differing(one: Any, other: Any) -> list[str]:
    """Paths of the leaves that differ in any bit."""
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    return [path for path in first if first[path] != second[path]]


def joined(outcomes: Iterable[Outcome], name: str) -> list[Any]:
    return [item for outcome in outcomes for item in getattr(outcome, name)]
