"""Traces of a few updates, as TensorBoard's profile page reads them."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from etils import epath

from transformer_jax import files
from transformer_jax.config import ConfigError


def parse_steps(text: str) -> tuple[int, int]:
    """The first and the last update of 'A:B'. Raises `ConfigError`."""
    first, colon, last = text.partition(':')
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(
            f'--profile-steps is {text!r}; it must be A:B, the first and the last update to trace, such as 20:25 '
            '(updates count from 1, and the first ones also compile)'
        )
    return int(first), int(last)


class Profile:
    """Traces updates `steps[0]` to `steps[1]` into `folder`; None = none. At most one trace a start of the run.

    The trace lies under `plugins/profile`, where TensorBoard looks for it, and holds what this process did: its
    Python calls, its dispatches, and each operation on its devices.
    """

    def __init__(
        self, steps: tuple[int, int] | None, folder: epath.PathLike, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._steps, self._folder, self._say = steps, epath.Path(folder), say
        self._traces_to: Path | None = None
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def is_over(self, update: int) -> bool:
        """Whether a trace is being made and this update lies behind it."""
        return self._traces_to is not None and self._steps is not None and update > self._steps[1]

    def begin(self, update: int) -> None:
        """Starts the trace when this update is the first of it."""
        if self._steps is None or self._traces_to is not None or update < self._steps[0]:
            return
        if update > self._steps[1]:
            first, last = self._steps
            self._say(f'updates {first:,} to {last:,} were done before, so there is no trace of them')
            self._steps = None
            return
        import jax

        if not files.is_local(self._folder):  # the profiler writes to local disks alone
            self._copy = tempfile.TemporaryDirectory()
        self._traces_to = Path(self._copy.name if self._copy else os.fspath(self._folder))
        jax.profiler.start_trace(self._traces_to)

    def annotate(self, update: int) -> contextlib.AbstractContextManager[object]:
        """Marks the block as this update in a trace that is being made."""
        if self._traces_to is None:
            return contextlib.nullcontext()
        import jax

        return jax.profiler.StepTraceAnnotation('update', step_num=update)

    def end(self) -> None:
        """Writes the trace that is being made, or says that there is none; the device must be done with its updates."""
        if self._traces_to is None:
            if self._steps is not None:
                first, last = self._steps
                self._say(f'this start ended before updates {first:,} to {last:,}, so there is no trace of them')
            return
        import jax

        traces_to, self._traces_to, self._steps = self._traces_to, None, None
        jax.profiler.stop_trace()
        if self._copy is not None:
            for file in traces_to.rglob('*'):
                if file.is_file():
                    target = self._folder / file.relative_to(traces_to).as_posix()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read_bytes())
            self._copy.cleanup()
        self._say(f'the trace is in {self._folder}: tensorboard --logdir {self._folder}, page Profile')
