"""What a training run tells people: the console, a JSON-lines file and TensorBoard, all with the same figures."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath
from tqdm import tqdm

from transformer_jax.config import LoggingConfig
from transformer_jax.training.figure_files import JsonLines, TensorBoard

Clock = Callable[[], float]

# How often the split of the wall time is kept, at least.
_KEEP_SECONDS = 30.0

# What the wall time of a run is split into after its preparation; the rest is 'other'.
ACTIVITIES = ('data', 'step', 'compile', 'evaluation', 'checkpoint')


class Stopwatch:
    """Splits wall time among activities; while a nested one runs the outer one rests, so the parts sum to the whole."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._seconds: dict[str, float] = dict.fromkeys((*ACTIVITIES, 'other'), 0.0)
        self._stack = ['other']
        self._switches = 0

    @contextlib.contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        """Counts the time of the block as `activity`, one of `ACTIVITIES`."""
        if activity not in ACTIVITIES:
            raise ValueError(f'activity is {activity!r}; it must be one of {", ".join(map(repr, ACTIVITIES))}')
        self._settle()
        self._stack.append(activity)
        self._switches += 1
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()
            self._switches += 1

    def now_at(self) -> tuple[str, int]:
        """The activity that is running, and how often it has changed so far."""
        return self._stack[-1], self._switches

    def seconds(self) -> dict[str, float]:
        """Seconds of each activity and of 'other' since the start; they sum to `total`."""
        self._settle()
        return dict(self._seconds)

    def total(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def training(self) -> float:
        """Seconds that training itself took: all but compiling, evaluating and saving."""
        seconds = self.seconds()
        return seconds['data'] + seconds['step'] + seconds['other']

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._last
        self._last = now


class Reporter:
    """Tells the console, `figures_file` (JSON lines, appended) and TensorBoard how a run goes, in the same figures.

    On a terminal a live progress bar stays below the lines; elsewhere there are plain lines only. Before `begin` there
    is the console alone. Only one process of a run is `primary`; the others report nothing. Neither a terminal that
    went away nor a full disk stops the run: writes that failed are counted and named at the end. `stream` is the
    console, stderr if None. `keep` is given how the wall time of this start was spent: at the end, whenever figures are
    put on disk, and every so often between, so that a run that is killed has said it too. `seconds_before` were spent
    on preparing, and count as 'preparation'. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        figures_file: epath.PathLike,
        tensorboard_folder: epath.PathLike,
        config: LoggingConfig,
        *,
        total_steps: int,
        primary: bool = True,
        keep: Callable[[dict[str, Any]], None] | None = None,
        seconds_before: float = 0.0,
        stream: Any | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.stopwatch = Stopwatch(clock)
        self._keep_split, self._next_keep = keep, -math.inf
        self._seconds_before, self._started = seconds_before, time.time() - seconds_before
        self._figures_file, self._tensorboard_folder = epath.Path(figures_file), epath.Path(tensorboard_folder)
        self._config, self._clock = config, clock
        self._total_steps, self._start_step = total_steps, 0
        self._primary = primary
        self._console = _Console(sys.stderr if stream is None else stream)
        self._bar: tqdm | None = None
        self._writers: list[Any] = []
        self._lost = 0
        self._last_step, self._last_training, self._begun = 0, 0.0, 0.0
        self._closed = False

    def __enter__(self) -> 'Reporter':
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, start_step: int) -> None:
        """Opens the files; `start_step` updates were done before, by an earlier start.

        What that one wrote beyond them, before it was cut, stands no more: this one comes to the same steps again.
        """
        self._start_step = self._last_step = start_step
        if self._primary:
            self._open(lambda: JsonLines(self._figures_file, start_step))
            if self._config.tensorboard:
                self._open(lambda: TensorBoard(self._tensorboard_folder, start_step, self._clock))
            self._record({'event': 'resume' if start_step else 'start', 'step': start_step, 'time': time.time()})
        # What went before, such as restoring a checkpoint, says nothing of the pace of the updates.
        self._last_training, self._begun = self.stopwatch.training(), self._elapsed()

    def timing(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time of the block as `activity`, one of `ACTIVITIES`."""
        return self.stopwatch.timing(activity)

    def say(self, text: str) -> None:
        """A line on the console."""
        if not self._primary:
            return
        if self._bar is not None:
            self._bar.clear()
        self._console.write(text + '\n')
        if self._bar is not None:
            self._bar.refresh()

    def header(self, devices: Sequence[Any], num_parameters: int) -> None:
        """The first lines: on what the run stands and how large the model is."""
        kind = getattr(devices[0], 'device_kind', str(devices[0]))
        self.say(f'devices: {len(devices)} x {kind}')
        self.say(f'parameters: {num_parameters:,}')
        if self._start_step:
            self.say(f'resumes after step {self._start_step:,} of {self._total_steps:,}')
        self._record({'event': 'header', 'devices': len(devices), 'device_kind': kind, 'parameters': num_parameters})

    def compiled(self, program: str, seconds: float) -> None:
        """A program was compiled; call it once a program."""
        self.say(f'compiled {program} in {seconds:.1f} s')
        self._record({'event': 'compile', 'program': program, 'seconds': seconds})

    def advance(self, step: int) -> None:
        """Moves the progress bar to `step` updates done. Cheap: call it at every step."""
        if not (self._primary and self._console.isatty()):
            return
        if self._bar is None:
            self._bar = tqdm(
                total=self._total_steps,
                initial=self._start_step,
                file=self._console,
                unit='step',
                dynamic_ncols=self._console.knows_size(),
                ncols=80,  # read only where the terminal does not know its own size
                bar_format='{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}',
            )
        self._bar.update(step - self._bar.n)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of the updates since the last call (see `metrics.figures`), `step` updates being done.

        Adds target tokens a second, of the time that training itself took, and the seconds that the rest of the run
        will take at the pace so far, evaluation and saving included.
        """
        training = self.stopwatch.training()
        window, self._last_training = training - self._last_training, training
        elapsed, done = self._elapsed() - self._begun, step - self._start_step
        figures = dict(figures) | {
            'tokens_per_second': figures['target_tokens'] / window if window > 0 else math.nan,
            'steps_per_second': (step - self._last_step) / window if window > 0 else math.nan,
            'eta_seconds': elapsed / done * (self._total_steps - step) if done > 0 else math.nan,
        }
        self._last_step = step
        if self._clock() >= self._next_keep:
            self._keep()
        self._record({'event': 'train', 'step': step} | figures | {'seconds': self.stopwatch.total()})
        if self._bar is not None:
            self.advance(step)
            self._bar.set_postfix_str(_describe(figures), refresh=True)
        else:
            self.say(f'step {step:,}/{self._total_steps:,}  ' + _describe(figures))

    def evaluation(self, step: int, figures: Mapping[str, float], *, split: str = 'validation', note: str = '') -> None:
        """The figures of an evaluation after `step` updates; `note` ends the console's line ("best so far")."""
        words = '  '.join(f'{name.replace("_", " ")} {_short(value)}' for name, value in figures.items())
        self.say(f'{split} after step {step:,}: {words}' + (f'  ({note})' if note else ''))
        self._record({'event': 'evaluation', 'step': step, 'split': split} | dict(figures))
        self.flush()

    def flush(self) -> None:
        """Puts on disk what was reported."""
        for writer in self._writers:
            self._guard(writer.flush)
        self._keep()

    def close(self) -> None:
        """Ends the bar and says where the time went. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._keep()
        seconds = self._seconds()
        total = sum(seconds.values())
        goodput = seconds['step'] / total if total > 0 else 0.0
        split = ', '.join(f'{name} {_duration(value)}' for name, value in seconds.items())
        self.say(f'wall time {_duration(total)}: {split}; goodput {goodput:.1%} (steps / wall time)')
        record = {'event': 'end', 'step': self._last_step, 'wall_seconds': total, 'goodput': goodput}
        self._record(record | {f'{name}_seconds': value for name, value in seconds.items()})
        for writer in self._writers:
            self._guard(writer.close)
        if self._lost:
            self.say(f'WARNING: {self._lost} writes to the files of figures failed; they are incomplete')

    def _elapsed(self) -> float:
        """Seconds since the start but for those of compiling."""
        return self.stopwatch.total() - self.stopwatch.seconds()['compile']

    def _seconds(self) -> dict[str, float]:
        return {'preparation': self._seconds_before} | self.stopwatch.seconds()

    def _keep(self) -> None:
        keep = self._keep_split
        if keep is None or not self._primary:
            return
        self._next_keep = self._clock() + _KEEP_SECONDS
        seconds = self._seconds()
        total = sum(seconds.values())
        split = {
            'started': self._started,
            'from_step': self._start_step,
            'to_step': self._last_step,
            'wall_seconds': total,
            'shares': {name: value / total if total > 0 else 0.0 for name, value in seconds.items()},
        }
        self._guard(lambda: keep(split))

    def _record(self, record: dict[str, Any]) -> None:
        for writer in self._writers:
            self._guard(lambda writer=writer: writer.write(record))

    def _open(self, make: Callable[[], Any]) -> None:
        self._guard(lambda: self._writers.append(make()))

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            if not self._lost:
                self.say(f'WARNING: could not write figures: {error}; the run goes on')
            self._lost += 1


class _Console:
    """A text stream whose failures are swallowed: a run outlives the terminal it was started from."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.encoding = getattr(stream, 'encoding', None)

    def write(self, text: str) -> None:
        if self.encoding:  # a console of another encoding shows what it lacks as escapes
            text = text.encode(self.encoding, 'backslashreplace').decode(self.encoding)
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
            self._stream.write(text)
            self._stream.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def knows_size(self) -> bool:
        """False for a terminal that says 0 columns or lines, as those of containers may: no bar would fit into it."""
        try:
            return all(os.get_terminal_size(self.fileno()))
        except (OSError, ValueError):
            return False


def _describe(figures: Mapping[str, float]) -> str:
    words = [
        f'loss {figures["loss"]:.3f}',
        f'ppl {_short(figures["perplexity"])}',
        f'lr {figures["learning_rate"]:.1e}',
        f'{figures["tokens_per_second"]:,.0f} tok/s',
        f'pad {figures["padding"]:.1%}',
        f'ETA {_duration(figures["eta_seconds"])}',
    ]
    if figures['bad_steps']:
        words.append(f'SKIPPED {figures["bad_steps"]:,.0f} non-finite')
    return '  '.join(words)


def _short(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:,.4g}' if abs(value) < 1e6 else f'{value:.3e}'


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return '?'
    if seconds < 60:
        return f'{seconds:.1f} s'
    whole = round(seconds)
    return f'{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}'
