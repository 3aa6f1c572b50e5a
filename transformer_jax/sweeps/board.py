"""What a sweep says while it runs: on a terminal a table that fills, elsewhere a line for each training that ends."""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from transformer_jax.sweeps import table
from transformer_jax.sweeps.jobs import Job, last_line
from transformer_jax.sweeps.results import Row

_REFRESH_SECONDS = 1.0


class Board:
    """The table and the trainings under way. `stream` is the console, stderr if None."""

    def __init__(self, stream: Any | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_live = self._stream.isatty()
        self._rows: Sequence[Row] = ()
        self._running: dict[str, tuple[Job, float]] = {}
        self._drawn = 0  # lines on the terminal that the next drawing replaces
        self._next = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def begin(self, job: Job) -> None:
        """A training is under way from now on."""
        self._running[job.name] = job, time.monotonic()
        if not self.is_live:
            self.say(f'{job.name}: begins; {job.log}')

    def end(self, name: str) -> None:
        """It no longer is."""
        self._running.pop(name, None)

    def tell(self, name: str, row: Row) -> None:
        """How it ended, where there is no table to see it in."""
        if not self.is_live:
            self.say(f'{name}: {table.describe(row)}')

    def show(self, rows: Sequence[Row]) -> None:
        """The table as it is now."""
        self._rows = rows
        self._next = 0.0
        self.tick()

    def tick(self) -> None:
        """Draws anew when that is due."""
        if not self.is_live or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_SECONDS
        size = shutil.get_terminal_size()
        lines = table.to_lines(self._rows) if self._rows else []
        for name, (job, since) in self._running.items():
            seconds = int(time.monotonic() - since)
            lines.append(f'{name}: {seconds // 60}:{seconds % 60:02}  {last_line(job.log)}')
        # What does not fit can't be drawn over: the trainings under way come last, and are seen.
        lines = [line[: size.columns - 1] for line in lines[-(size.lines - 1) :]]
        self.clear()
        self._stream.write(''.join(f'{line}\n' for line in lines))
        self._stream.flush()
        self._drawn = len(lines)

    def clear(self) -> None:
        """Takes the drawing away."""
        if self._drawn:
            self._stream.write(f'\x1b[{self._drawn}F\x1b[J')
            self._stream.flush()
            self._drawn = 0
