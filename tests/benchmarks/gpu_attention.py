"""`cudnn`, `pallas` and `blockwise` beside `dense` on one NVIDIA GPU, bfloat16: values, gradients and times.

    python tests/benchmarks/gpu_attention.py [--lengths 512 2048 8192] [--minutes 5]

8,192 tokens a batch, N=16, H=64, right-padded to seven eighths; whole, causal, and with a causal window of 256. Errors
are max|x - reference| / max|reference| against `dense` in float32 on the same bfloat16 inputs. Times are the least of
rounds in turns. Stops starting new rows after `--minutes`, and says so. On CPU (small `--lengths`) it runs, with pallas
interpreted and cudnn refused.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.cudnn import CUDNN
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.pallas import PALLAS
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

FUNCTIONS = {'dense': DENSE, 'blockwise': BLOCKWISE, 'cudnn': CUDNN, 'pallas': PALLAS}
TOKENS, NUM_HEADS, WIDTH = 8192, 16, 64
MASKS: dict[str, dict[str, Any]] = {
    'whole': {},
    'causal': {'causal': True},
    'window 256': {'causal': True, 'window': (255, 0)},
}
Arrays = tuple[Any, ...]


def make_arrays(length: int) -> Arrays:
    """Q, k, v, a gradient of the output, segments and positions."""
    batch = max(1, TOKENS // length)
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.normal(size=(batch, length, NUM_HEADS, WIDTH)), jnp.bfloat16) for _ in range(4)]
    positions = np.broadcast_to(np.arange(length), (batch, length))
    return *heads, jnp.asarray((positions < length * 7 // 8).astype(np.int32)), jnp.asarray(positions)


def build(name: str, rules: dict[str, Any], *, backward: bool) -> Callable[[Arrays], Any]:
    """The output, or the output and the gradients of q, k and v."""

    def attend(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> Any:
        mask = Mask(segments, segments, positions, positions, aligned=True, **rules)
        return FUNCTIONS[name].function(q, k, v, mask, Options(AttentionConfig(), scale=WIDTH**-0.5))[0]

    def both(q: Any, k: Any, v: Any, d_output: Any, *places: Any) -> Any:
        output, pull = jax.vjp(lambda *heads: attend(*heads, *places), q, k, v)
        return output, *pull(d_output.astype(output.dtype))

    jitted = jax.jit(both if backward else lambda q, k, v, _, *places: attend(q, k, v, *places))
    return lambda arrays: jitted(*arrays)


def measure(functions: dict[str, Callable], arrays: Arrays, rounds: int) -> dict[str, float]:
    """The least milliseconds of each, in turns."""
    least = dict.fromkeys(functions, float('inf'))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(5):  # queued together, so that starting a program is hidden
                result = function(arrays)
            jax.block_until_ready(result)
            least[name] = min(least[name], (time.perf_counter() - start) / 5 * 1000)
    return least


def compare(rules: dict[str, Any], arrays: Arrays, rounds: int) -> None:
    """One table: a line for each implementation."""
    exact = tuple(x.astype(jnp.float32) for x in arrays[:4]) + arrays[4:]
    with jax.default_matmul_precision('highest'):
        reference = [np.asarray(x) for x in build('dense', rules, backward=True)(exact)]
    errors, forward, backward = {}, {}, {}
    for name in FUNCTIONS:
        one, two = (build(name, rules, backward=both) for both in (False, True))
        try:
            results = jax.block_until_ready((one(arrays), two(arrays)))[1]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f'    {name:10} failed: {str(error).splitlines()[0][:150]}', flush=True)
            continue
        forward[name], backward[name] = one, two
        errors[name] = [
            np.abs(np.asarray(x, np.float32) - expected).max() / np.abs(expected).max()
            for x, expected in zip(results, reference, strict=True)
        ]
    times = measure(forward, arrays, rounds), measure(backward, arrays, rounds)
    for name, error in errors.items():
        print(
            f'    {name:10} forward {times[0][name]:8.3f} ms, and backward {times[1][name]:8.3f} ms; '
            f'error of output {error[0]:.1e}, of gradients q {error[1]:.1e} k {error[2]:.1e} v {error[3]:.1e}',
            flush=True,
        )


def main() -> None:
    """Prints a table for each length and mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--lengths', type=int, nargs='+', default=[512, 2048, 8192])
    parser.add_argument('--minutes', type=float, default=5.0)
    parser.add_argument('--rounds', type=int, default=5)
    options = parser.parse_args()
    start = time.monotonic()
    print(f'jax {jax.__version__}, {jax.devices()[0].device_kind}, bfloat16, N={NUM_HEADS}, H={WIDTH}')
    for length in options.lengths:
        for title, rules in MASKS.items():
            if time.monotonic() - start > options.minutes * 60:
                print(f'{length:,}, {title}: not begun, {options.minutes:g} minutes are over')
                continue
            arrays = make_arrays(length)
            print(f'{length:,} x {arrays[0].shape[0]}, {title}', flush=True)
            compare(rules, arrays, options.rounds)
    print(f'{time.monotonic() - start:.0f} s in all')


if __name__ == '__main__':
    main()
