"""The training step of base and big on one NVIDIA GPU in bfloat16, beside plain Flax and PyTorch.

    python tests/benchmarks/gpu_training.py [--peer-python PYTHON] [--minutes 8] [--change FIELD=VALUE ...]

Full rows of 128 + 128 subwords, as many as fit, up to 196 (25,088 + 25,088 subwords an update); V = 37,000; dropout 0.1
(base) and 0.3 (big); Adam; random ids. Peers: plain_flax.py, and plain_torch.py with SDPA, `torch.compile` and a fused
Adam, where PYTHON has torch. One process at a time has the card to itself; ours come first, and nothing more is started
when the minutes are over.

Model FLOP utilisation is the FLOPs of the equations (three times the forward pass: no rematerialisation, attention
matrices whole) over the peak of the card, which --peak-tflops gives where `parallel/chips.py` lacks it. `--tiny` runs
the same code on a CPU in a minute.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SIZES: dict[str, dict[str, Any]] = {
    'big': {'layers': 6, 'd_model': 1024, 'd_ff': 4096, 'heads': 16, 'dropout': 0.3, 'vocab': 37_000, 'length': 128},
    'base': {'layers': 6, 'd_model': 512, 'd_ff': 2048, 'heads': 8, 'dropout': 0.1, 'vocab': 37_000, 'length': 128},
    'tiny': {'layers': 2, 'd_model': 32, 'd_ff': 64, 'heads': 4, 'dropout': 0.1, 'vocab': 90, 'length': 8},
}
ROWS = (196, 160, 128, 96, 64, 48, 32, 16)  # of 128 subwords: those that are tried, in turn
SYSTEMS = ('ours', 'plain Flax', 'PyTorch')
_WHOLE_CARD = {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92'}
Update = Callable[[], Any]  # dispatches one update and returns its loss, which may not be there yet


def count_flops(sizes: dict[str, Any], rows: int) -> float:
    """Of one update, by the equations: products of matrices alone, three times those of the forward pass."""
    d, ff, length = sizes['d_model'], sizes['d_ff'], sizes['length']
    projections, scores, feed_forward = 8 * d * d, 4 * length * d, 4 * d * ff  # of a subword in a layer
    encoder = projections + scores + feed_forward
    decoder = 2 * (projections + scores) + feed_forward
    return 3.0 * rows * length * (sizes['layers'] * (encoder + decoder) + 2 * d * sizes['vocab'])


def find_peak(device: str) -> float | None:
    """FLOP/s of the card in bfloat16, or None where the table of chips lacks it."""
    from transformer_jax.parallel.chips import find_chip

    chip = find_chip(device)
    return None if chip is None else chip.peak_flops


def make_ids(sizes: dict[str, Any], rows: int) -> Any:
    """Two arrays of random subwords; none of them is a special one."""
    import numpy as np

    shape = (2, rows, sizes['length'])
    return np.random.default_rng(0).integers(4, sizes['vocab'], shape, dtype=np.int32)


def start_ours(sizes: dict[str, Any], rows: int, changes: dict[str, str]) -> tuple[Update, dict[str, Any]]:
    """Our step on a mesh of the one device, as the training loop runs it."""
    import jax
    import numpy as np

    from transformer_jax import models
    from transformer_jax.attention import choose
    from transformer_jax.config import Config
    from transformer_jax.data.batch import Batch
    from transformer_jax.overlay import overlay
    from transformer_jax.parallel.mesh import make_mesh, place_batch
    from transformer_jax.training.optimizer import make_optimizer
    from transformer_jax.training.schedule import make_schedule
    from transformer_jax.training.state import abstract_state, make_state, state_shardings
    from transformer_jax.training.step import make_train_step

    fields: dict[str, Any] = {f'model.{side}': sizes['layers'] for side in ('num_encoder_layers', 'num_decoder_layers')}
    fields |= {'model.d_model': sizes['d_model'], 'model.d_ff': sizes['d_ff'], 'model.dropout_rate': sizes['dropout']}
    fields |= {'model.attention.num_heads': sizes['heads'], 'model.compute_dtype': 'bfloat16'}
    fields |= {'model.attention.head_dim': sizes['d_model'] // sizes['heads']}
    config = overlay(Config(), fields | changes)
    mesh = make_mesh(config.execution.mesh, jax.devices()[:1])
    model = models.build(config.model, vocab_size=sizes['vocab'], start_id=1, execution=config.execution)
    schedule = make_schedule(config.optimizer.schedule, config.model.d_model, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    with jax.set_mesh(mesh):
        shardings = state_shardings(model, optimizer, abstract_state(model, optimizer, with_average=False), mesh)
        start = jax.jit(
            lambda: make_state(model.init(jax.random.key(0)), optimizer, with_average=False), out_shardings=shardings
        )
        state = start()
        inputs, targets = make_ids(sizes, rows)
        ones = np.ones_like(inputs)
        positions = np.broadcast_to(np.arange(sizes['length'], dtype=np.int32), inputs.shape)
        batch = place_batch(Batch(inputs, targets, ones, ones, positions, positions), mesh)
        step = make_train_step(model, optimizer, schedule, config.train, seed=0, mesh=mesh)
        program = jax.jit(step, donate_argnums=0).lower(state, (batch,)).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    def update() -> Any:
        nonlocal state
        state, metrics = program(state, (batch,))
        return metrics.loss_sum / metrics.target_tokens

    attention = {use.name: choose(use) for use in models.uses_of_attention(config)}
    return update, {'parameters': parameters, 'attention': attention, **_describe_program(program)}


def start_plain_flax(sizes: dict[str, Any], rows: int) -> tuple[Update, dict[str, Any]]:
    """The update of plain_flax.py."""
    import jax
    import plain_flax

    start, step = plain_flax.make_update(sizes)
    state = jax.jit(start)()
    inputs, targets = jax.device_put(make_ids(sizes, rows))
    program = jax.jit(step, donate_argnums=0).lower(state, inputs, targets).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state[0]))

    def update() -> Any:
        nonlocal state
        state, loss = program(state, inputs, targets)
        return loss

    return update, {'parameters': parameters, **_describe_program(program)}


def _describe_program(program: Any) -> dict[str, Any]:
    import jax

    return {
        'device': jax.devices()[0].device_kind,
        'version': f'jax {jax.__version__}',
        'temporary_mib': program.memory_analysis().temp_size_in_bytes / 2**20,
    }


def start_torch(sizes: dict[str, Any], rows: int) -> tuple[Update, dict[str, Any]]:
    """The update of plain_torch.py, compiled on a GPU."""
    import plain_torch
    import torch

    on_gpu = torch.cuda.is_available()
    device = 'cuda' if on_gpu else 'cpu'
    update, parameters = plain_torch.make_update(sizes, device, compiled=on_gpu)
    inputs, targets = torch.from_numpy(make_ids(sizes, rows)).long().to(device)
    facts = {'parameters': parameters, 'version': f'torch {torch.__version__}'}
    return lambda: update(inputs, targets), facts | {'device': torch.cuda.get_device_name() if on_gpu else 'cpu'}


def work(system: str, size: str, rows: int, changes: dict[str, str], rounds: int, seconds: float) -> dict[str, Any]:
    """The measurement of one system, in this process: seconds of one update, round by round."""
    sizes, began = SIZES[size], time.perf_counter()
    if system == 'ours':
        update, facts = start_ours(sizes, rows, changes)
    else:
        update, facts = {'plain Flax': start_plain_flax, 'PyTorch': start_torch}[system](sizes, rows)
    first = float(update())
    facts['start_seconds'] = time.perf_counter() - began
    for _ in range(2):
        update()
    start = time.perf_counter()
    float(update())
    num_updates = max(2, round(seconds / rounds / max(time.perf_counter() - start, 1e-4)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(num_updates):
            loss = update()
        last = float(loss)  # waits for all of them
        times.append((time.perf_counter() - start) / num_updates)
    return facts | {'rows': rows, 'seconds': times, 'first_loss': first, 'last_loss': last, 'updates': num_updates}


def is_out_of_memory(text: str) -> bool:
    """Whether a process ended because the card is too small."""
    return any(word in text for word in ('RESOURCE_EXHAUSTED', 'OutOfMemoryError', 'out of memory', 'Out of memory'))


def measure(system: str, size: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """One system at the most rows that fit, each try in a process of its own; {'failed': why} when there is none."""
    python = options.peer_python if system == 'PyTorch' else sys.executable
    for rows in (3,) if size == 'tiny' else ROWS:
        left = deadline - time.monotonic()
        if left <= 0:
            return {'failed': f'not begun, {options.minutes:g} minutes are over'}
        command = [python, __file__, '--worker', system, '--size', size, '--rows', str(rows)]
        command += ['--rounds', str(options.rounds), '--seconds', str(options.seconds)]
        for change in options.change:
            command += ['--change', change]
        try:
            done = subprocess.run(
                command, env=os.environ | _WHOLE_CARD, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return {'failed': f'stopped, {options.minutes:g} minutes are over'}
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        if not is_out_of_memory(done.stderr):
            return {'failed': (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1][:200]}
        print(f'  {system}, {size}: {rows} rows do not fit', flush=True)
    return {'failed': f'not even {ROWS[-1]} rows fit'}


def describe(system: str, size: str, result: dict[str, Any], peak: float | None, ours: dict[str, Any] | None) -> str:
    """One line of the table."""
    if 'failed' in result:
        return f'| {system} | {size} | {result["failed"]} | | | | |'
    sizes, rows = SIZES[size], result['rows']
    seconds = statistics.median(result['seconds'])
    tokens = rows * sizes['length'] / seconds
    utilisation = 'peak unknown' if peak is None else f'{count_flops(sizes, rows) / seconds / peak:.1%}'
    spread = f'{min(result["seconds"]) * 1000:,.1f} to {max(result["seconds"]) * 1000:,.1f}'
    beside = ''
    if ours is not None and 'failed' not in ours:
        own = ours['rows'] * sizes['length'] / statistics.median(ours['seconds'])
        beside = f'{own / tokens:.2f}'
    shape = f'{rows} x {sizes["length"]}'
    return (
        f'| {system} | {size} | {shape} | {seconds * 1000:,.1f} ({spread}) | {tokens:,.0f} | {utilisation} | {beside} |'
    )


def run(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """All measurements, each printed when it is there, and the table."""
    deadline = time.monotonic() + options.minutes * 60
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for system in SYSTEMS:
        for size in ('tiny',) if options.tiny else ('big', 'base'):
            result = results[system, size] = measure(system, size, options, deadline)
            print(f'  {system}, {size}: {json.dumps(result)}', flush=True)
    done = [result for result in results.values() if 'failed' not in result]
    device = done[0]['device'] if done else 'no device'
    peak = options.peak_tflops * 1e12 if options.peak_tflops else find_peak(device)
    for size in {size for _, size in results}:
        counts = {result['parameters'] for (_, one), result in results.items() if one == size and result in done}
        if len(counts) > 1:
            raise RuntimeError(f'{size}: the systems have different models, of {sorted(counts)} parameters')
    versions = ', '.join(sorted({result['version'] for result in done}))
    print(f'\n{device}; {versions}; bfloat16; medians (and range) of {options.rounds} rounds')
    print(
        '| system | size | rows x length | ms an update | target tokens/s | FLOP utilisation | ours is times as fast |'
    )
    print('|---|---|---|---|---|---|---|')
    for (system, size), result in results.items():
        print(describe(system, size, result, peak, None if system == 'ours' else results['ours', size]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--peer-python', default=sys.executable)
    parser.add_argument('--minutes', type=float, default=8.0)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=5.0, help='of measuring, a system and size')
    parser.add_argument('--peak-tflops', type=float)
    parser.add_argument('--tiny', action='store_true')
    parser.add_argument('--change', action='append', default=[], metavar='FIELD=VALUE', help='of our config')
    parser.add_argument('--worker', choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument('--size', choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument('--rows', type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        changes = dict(change.split('=', 1) for change in options.change)
        result = work(options.worker, options.size, options.rows, changes, options.rounds, options.seconds)
        print(json.dumps(result))
        return
    if options.tiny:
        options.seconds = min(options.seconds, 0.5)
    run(options)


if __name__ == '__main__':
    main()
