"""Memory and time of exact attention on CPU: `dense` beside `blockwise`, whole and with a window.

    python tests/benchmarks/attention_speed.py [--rounds 5] [--only memory times window growth]

B=1, N=8, H=64, float32. Memory is the compiler's own account of temporary buffers; nothing runs for it. Times are of
rounds in turns (A B C A B C), so that a drifting or busy machine slows all alike: read the ratios, of the wall's time
and of the CPU's, which other work on the machine changes less. The dense pass at 8,192 takes 4 GiB, with its gradients
12.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

sys.path.insert(0, str(Path(__file__).parent))
import turns

FUNCTIONS = {'dense': DENSE.function, 'blockwise': BLOCKWISE.function}
NUM_HEADS, WIDTH, WINDOW = 8, 64, 256


class Program(NamedTuple):
    """One attention at one length. `backward` = the output's sum and the gradients of q, k and v."""

    name: str
    length: int
    backward: bool
    causal: bool = False
    window: int | None = None

    def build(self) -> Callable:
        """The jitted function of q, k, v, segments and positions."""

        def attend(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> Any:
            mask = Mask(segments, segments, positions, positions, causal=self.causal, aligned=True)
            options = Options(AttentionConfig(), scale=WIDTH**-0.5)
            return FUNCTIONS[self.name](q, k, v, mask.within(self.window), options)[0]

        def loss(*arrays: Any) -> Any:
            return attend(*arrays).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)) if self.backward else attend)

    def temporary_memory(self) -> float:
        """MiB beside arguments and results."""
        heads = jax.ShapeDtypeStruct((1, self.length, NUM_HEADS, WIDTH), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, self.length), jnp.int32)
        compiled = self.build().lower(heads, heads, heads, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    def arrays(self) -> tuple[Any, ...]:
        """Random inputs of one unpadded sequence."""
        rng = np.random.default_rng(0)
        heads = [jnp.float32(rng.normal(size=(1, self.length, NUM_HEADS, WIDTH))) for _ in range(3)]
        return *heads, jnp.ones((1, self.length), jnp.int32), jnp.arange(self.length)[None]


def time_in_turns(programs: dict[str, Program], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the wall and of the CPU, of each program round by round, after one call of each that compiles it."""
    ready = {label: (program.build(), program.arrays()) for label, program in programs.items()}
    for function, arrays in ready.values():
        jax.block_until_ready(function(*arrays))
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in ready}
    for _ in range(rounds):
        for label, (function, arrays) in ready.items():
            # Once untimed: the gigabytes that the program before gives back are not this one's time.
            jax.block_until_ready(function(*arrays))
            start, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(function(*arrays))
            seconds[label].append((time.perf_counter() - start, time.process_time() - cpu))
    return seconds


def print_memory() -> None:
    """Temporary memory forward, and forward and backward, from 1k to 16k."""
    print('\nTemporary memory, MiB          ' + ''.join(f'{length:>9,}' for length in (1024, 2048, 4096, 8192, 16384)))
    rows = [('dense', None), ('blockwise', None), ('blockwise', WINDOW)]
    for backward in (False, True):
        for name, window in rows:
            sizes = [
                Program(name, length, backward, window=window).temporary_memory()
                for length in (1024, 2048, 4096, 8192, 16384)
            ]
            label = f'{name}{f", window {window}" if window else ""}, {"backward" if backward else "forward"}'
            print(f'{label:31}' + ''.join(f'{size:9,.0f}' for size in sizes))


def print_times(title: str, base: str, programs: dict[str, Program], rounds: int) -> None:
    """Medians, and ratios to the program `base` round by round."""
    print(f'\n{title} (machine in use beforehand: {turns.busy_share():.0%})')
    seconds = time_in_turns(programs, rounds)
    for label, own in seconds.items():
        pairs = list(zip(own, seconds[base], strict=True))
        ratios = sorted(mine[0] / other[0] for mine, other in pairs)
        by_cpu = statistics.median(mine[1] / other[1] for mine, other in pairs)
        print(
            f'{label:44} median {statistics.median(wall for wall, _ in own):7.3f} s, of {base}: '
            f'{ratios[0]:.3f} / {statistics.median(ratios):.3f} / {ratios[-1]:.3f} (least / median / greatest), '
            f'{by_cpu:.3f} by CPU seconds',
            flush=True,
        )


def print_window(rounds: int) -> None:
    """A window at 8k beside the whole dense pass."""
    for backward in (False, True):
        programs = {
            'dense': Program('dense', 8192, backward),
            f'blockwise, window {WINDOW}': Program('blockwise', 8192, backward, window=WINDOW),
        }
        print_times(f'8,192, {_passes(backward)}', 'dense', programs, rounds)


def print_growth(rounds: int) -> None:
    """A window at 16k beside itself at 8k."""
    for backward in (False, True):
        growing = {
            f'{length:,}, window {WINDOW}': Program('blockwise', length, backward, window=WINDOW)
            for length in (8192, 16384)
        }
        print_times(f'A window of {WINDOW}, {_passes(backward)}', next(iter(growing)), growing, rounds)


def print_whole(rounds: int) -> None:
    """All of 4k, beside the dense pass."""
    for backward in (False, True):
        at_4k = {
            'dense': Program('dense', 4096, backward),
            'blockwise': Program('blockwise', 4096, backward),
            'blockwise, causal': Program('blockwise', 4096, backward, causal=True),
        }
        print_times(f'4,096, {_passes(backward)}', 'dense', at_4k, rounds)


def _passes(backward: bool) -> str:
    return 'forward and backward' if backward else 'forward'


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=5)
    tables = ('memory', 'times', 'window', 'growth')
    parser.add_argument('--only', nargs='+', choices=tables, default=tables)
    options = parser.parse_args()
    print(f'jax {jax.__version__}, {jax.devices()[0].device_kind}')
    if 'memory' in options.only:
        print_memory()
    for name, show in {'times': print_whole, 'growth': print_growth}.items():
        if name in options.only:
            show(options.rounds)
    if 'window' in options.only:
        print_window(min(options.rounds, 3))


if __name__ == '__main__':
    main()
