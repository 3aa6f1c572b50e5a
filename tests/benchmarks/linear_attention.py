"""Linear and random-feature attention: time and memory when the length doubles, and the cost of a decode step.

    python tests/benchmarks/linear_attention.py [--lengths 4096 8192] [--repeats 5]

Forward and backward of one causal layer, B=1, N=8, H=64, float32, and the same with every position visible. Times are
the best of the repeats, the lengths taking turns; memory is the compiler's own account of what is temporary. A decode
step reads one row into the state after `--positions` rows.
"""

import argparse
import time
from typing import Any

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


def best_of(calls: list[Any], repeats: int, times: int = 1) -> list[float]:
    """The least seconds of each call; the calls take turns, `times` at a time."""
    best = [float('inf')] * len(calls)
    for _ in range(repeats):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(times):
                call()
            best[place] = min(best[place], (time.perf_counter() - start) / times)
    return best


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=int, nargs=2, default=[4096, 8192])
    parser.add_argument('--positions', type=int, nargs=2, default=[100, 4000])
    parser.add_argument('--repeats', type=int, default=5)
    options = parser.parse_args()
    short, long = options.lengths
    print(f'{jax.devices()[0].device_kind}, jax {jax.__version__}; forward and backward, B=1, N=8, H=64, float32\n')
    print(f'| kind | visible | ms at {short} | ms at {long} | times | MiB at {short} | MiB at {long} | times |')
    print('|---|---|---|---|---|---|---|---|')
    for kind, variant in VARIANTS.items():
        for causal in (True, False):
            calls, memory = zip(*(compile_training(variant, kind, n, causal) for n in options.lengths), strict=True)
            best_of(list(calls), 1)
            seconds = best_of(list(calls), options.repeats)
            print(
                f'| {kind} | {"causal" if causal else "all"} | {seconds[0] * 1e3:.0f} | {seconds[1] * 1e3:.0f} '
                f'| {seconds[1] / seconds[0]:.2f} | {memory[0] / MIB:.0f} | {memory[1] / MIB:.0f} '
                f'| {memory[1] / memory[0]:.2f} |',
                flush=True,
            )
    early, late = options.positions
    print(f'\n| kind | us a step at {early} | us a step at {late} | times |\n|---|---|---|---|')
    for kind, variant in VARIANTS.items():
        calls = [compile_step(variant, kind, position) for position in options.positions]
        seconds = best_of(calls, 5 * options.repeats, times=20)
        print(
            f'| {kind} | {seconds[0] * 1e6:.0f} | {seconds[1] * 1e6:.0f} | {seconds[1] / seconds[0]:.2f} |', flush=True
        )


if __name__ == '__main__':
    main()
