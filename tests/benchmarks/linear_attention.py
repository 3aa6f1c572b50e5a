"""Linear and random-feature attention: time and memory when the length doubles, and the cost of a decode step.

    python tests/benchmarks/linear_attention.py [--lengths 4096 8192] [--repeats 9]

Forward and backward of one causal layer, B=1, N=8, H=64, float32, and the same with every position visible. The lengths
take turns; a growth is the median over the turns of the long one's time by the short one's, of the wall's time and of
the CPU's, which other work on the machine changes less. Memory is the compiler's own account of what is temporary. A
decode step reads one row into the state after `--positions` rows.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.linear import LINEAR
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.performer import PERFORMER
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig

VARIANTS = {'linear': LINEAR, 'performer': PERFORMER}
MIB = 2**20


def make_rows(length: int) -> list[jax.Array]:
    """Random q, k and v of one row."""
    return [jax.random.normal(jax.random.key(seed), (1, length, 8, 64)) for seed in range(3)]


def options_of(kind: str) -> Options:
    return Options(AttentionConfig(kind=kind, num_heads=8, head_dim=64), scale=64**-0.5)


def compile_training(variant: Variant, kind: str, length: int, causal: bool) -> tuple[Any, int]:
    """The gradient of one layer, and its temporary bytes."""
    segments, positions = jnp.ones((1, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]
    mask = Mask(segments, segments, positions, positions, causal=causal, aligned=True)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        return (variant.function(q, k, v, mask, options_of(kind))[0] ** 2).sum()

    rows = make_rows(length)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*rows, mask).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return lambda: jax.block_until_ready(compiled(*rows, mask)), memory.temp_size_in_bytes


def compile_step(variant: Variant, kind: str, position: int) -> Any:
    """One decode step after `position` rows."""
    assert variant.running is not None
    running, options = variant.running, options_of(kind)
    rows = make_rows(position)
    extend = jax.jit(lambda state, *rows: running.extend(state, *rows, jnp.ones(rows[0].shape[:2], bool), options))
    _, state = extend(running.init(1, options.config, jnp.float32), *rows)
    new = make_rows(1)
    jax.block_until_ready(extend(state, *new))
    return lambda: jax.block_until_ready(extend(state, *new))


class Growth(NamedTuple):
    """Medians over the turns of two calls."""

    first: float  # seconds
    second: float
    times: float  # second by first
    cpu_times: float


def in_turns(calls: Sequence[Any], repeats: int, times: int = 1) -> Growth:
    """The growth from the first call to the second, which take turns, `times` calls a turn."""
    turns = []
    for _ in range(repeats):
        turn = []
        for call in calls:
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(times):
                call()
            turn += [(time.perf_counter() - start) / times, (time.process_time() - cpu) / times]
        turns.append(turn)
    first, first_cpu, second, second_cpu = zip(*turns, strict=True)
    return Growth(
        statistics.median(first),
        statistics.median(second),
        statistics.median(b / a for a, b in zip(first, second, strict=True)),
        statistics.median(b / a for a, b in zip(first_cpu, second_cpu, strict=True)),
    )


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=int, nargs=2, default=[4096, 8192])
    parser.add_argument('--positions', type=int, nargs=2, default=[100, 4000])
    parser.add_argument('--repeats', type=int, default=9)
    options = parser.parse_args()
    short, long = options.lengths
    print(f'{jax.devices()[0].device_kind}, jax {jax.__version__}; forward and backward, B=1, N=8, H=64, float32\n')
    print(f'| kind | visible | ms at {short} | ms at {long} | times | CPU times | MiB at {short} | at {long} | times |')
    print('|---|---|---|---|---|---|---|---|---|')
    for kind, variant in VARIANTS.items():
        for causal in (True, False):
            calls, memory = zip(*(compile_training(variant, kind, n, causal) for n in options.lengths), strict=True)
            in_turns(calls, 1)
            grown = in_turns(calls, options.repeats)
            print(
                f'| {kind} | {"causal" if causal else "all"} | {grown.first * 1e3:.0f} | {grown.second * 1e3:.0f} '
                f'| {grown.times:.2f} | {grown.cpu_times:.2f} | {memory[0] / MIB:.0f} | {memory[1] / MIB:.0f} '
                f'| {memory[1] / memory[0]:.2f} |',
                flush=True,
            )
    early, late = options.positions
    print(f'\n| kind | us a step at {early} | us a step at {late} | times | CPU times |\n|---|---|---|---|---|')
    for kind, variant in VARIANTS.items():
        steps = [compile_step(variant, kind, position) for position in options.positions]
        grown = in_turns(steps, 5 * options.repeats, times=20)
        print(
            f'| {kind} | {grown.first * 1e6:.0f} | {grown.second * 1e6:.0f} | {grown.times:.2f} '
            f'| {grown.cpu_times:.2f} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
