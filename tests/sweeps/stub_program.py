"""Stands in for `python -m transformer_jax` in sweeps: trains nothing, but leaves the files that a training would.

Its first argument is a folder: `calls` there takes a line for each call, `faults.json` says what goes wrong, by point:
an exit code, a signal as a negative number, or "hang" until a signal comes.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

folder = pathlib.Path(sys.argv[1])
verb = sys.argv[2]
flags = dict(argument.removeprefix('--').split('=', 1) for argument in sys.argv[3:])
run = pathlib.Path(flags['run'])
name = run.parent.name
with (folder / 'calls').open('a') as calls:
    calls.write(f'{verb} {name}/{run.name}\n')
faults = json.loads((folder / 'faults.json').read_text()) if (folder / 'faults.json').exists() else {}
fault = faults.get(f'{verb} {name}')
if verb == 'train':
    run.mkdir(parents=True, exist_ok=True)
    if fault == 'hang':
        signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.stdout.flush(), os._exit(143)))
        (folder / f'hangs {name}').touch()
        time.sleep(60)
    elif fault is not None:
        print(f'stub: {name} can not be trained', file=sys.stderr, flush=True)
        if fault < 0:
            os.kill(os.getpid(), -fault)
        sys.exit(fault)
    records = [
        {'event': 'start', 'step': 0},
        {'event': 'header', 'parameters': 1000 + len(name)},
        {'event': 'train', 'step': 2, 'steps_per_second': 4.0, 'seconds': 1.0},
        {'event': 'train', 'step': 4, 'steps_per_second': 2.0, 'seconds': 3.0},
        {'event': 'train', 'step': 6, 'steps_per_second': 5.0, 'seconds': 5.0},
        {'event': 'end', 'step': 6, 'wall_seconds': 7.5},
    ]
    (run / 'metrics.jsonl').write_text(''.join(f'{json.dumps(record)}\n' for record in records))
    (run / 'record.json').write_text(json.dumps({'peak_memory': {'host_bytes': 3 << 20, 'device_bytes': None}}))
else:
    if fault is not None:
        sys.exit(fault)
    random.seed(f'{name} {run.name}')
    evaluation = run / 'evaluations' / f'test_step_6_{time.monotonic_ns()}'
    evaluation.mkdir(parents=True)
    references = [f'line {number} of the test' for number in range(40)]
    hypotheses = [line if random.random() < 0.7 else line[::-1] for line in references]
    for kind, lines in (('references', references), ('hypotheses', hypotheses)):
        (evaluation / f'test.{kind}.txt').write_text(''.join(f'{line}\n' for line in lines))
    (evaluation / 'test.json').write_text(json.dumps({'accuracy': 0.5}))
