"""Timing several systems in turns within one run, each in a process (and an environment) of its own.

A worker prepares and warms up, prints READY, and then for every line it reads does its work once and prints a JSON
object with at least `seconds`. The machine's speed drifts; systems measured in turns drift together.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def work_in_turns(do: Callable[[], dict[str, Any]]) -> None:
    """The worker's side: `do()` once for each line of standard input."""
    print('READY', flush=True)
    for _ in sys.stdin:
        cpu, start = time.process_time(), time.perf_counter()
        result = do()
        result |= {'seconds': time.perf_counter() - start, 'cpu_seconds': time.process_time() - cpu}
        result['peak_memory_mib'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result), flush=True)


class Worker:
    """The parent's handle of one worker."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.results: list[dict[str, Any]] = []
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
        self._process = subprocess.Popen(list(command), env=os.environ | (environment or {}), **pipes)  # type: ignore[call-overload]
        self._wait_for(lambda line: line == 'READY')

    def turn(self) -> dict[str, Any]:
        """One turn, timed by the worker itself."""
        self._process.stdin.write('go\n')
        self._process.stdin.flush()
        result = json.loads(self._wait_for(lambda line: line.startswith('{')))
        self.results.append(result)
        return result

    def close(self) -> None:
        """Ends the worker."""
        self._process.stdin.close()
        self._process.wait()

    def median(self, figure: str) -> float:
        """The median of a figure over the turns."""
        return statistics.median(result[figure] for result in self.results)

    def _wait_for(self, is_wanted: Callable[[str], bool]) -> str:
        for line in self._process.stdout:
            if is_wanted(line.strip()):
                return line.strip()
        raise RuntimeError(f'the worker {self.name} ended with code {self._process.wait()}')


def busy_share() -> float:
    """How much of the machine is in use right now, 0 to 1, over one second."""

    def read() -> tuple[float, float]:
        with open('/proc/stat', encoding='ascii') as file:  # noqa: PTH123
            fields = [float(field) for field in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(1)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def in_turns(workers: Sequence[Worker], rounds: int) -> None:
    """`rounds` turns of each worker, A B C A B C; says how busy the machine was before the first."""
    print(f'machine in use before the first turn: {busy_share():.0%}')
    for number in range(rounds):
        for worker in workers:
            result = worker.turn()
            print(f'  round {number + 1}: {worker.name} {result["seconds"]:.2f} s, {result["cpu_seconds"]:.2f} CPU s')


def ratio(first: Worker, second: Worker, figure: str) -> tuple[float, float, float]:
    """Minimum, median and maximum over the rounds of first / second."""
    ratios = [a[figure] / b[figure] for a, b in zip(first.results, second.results, strict=True)]
    return min(ratios), statistics.median(ratios), max(ratios)
