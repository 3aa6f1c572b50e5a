#!/usr/bin/env python3
"""Runs a sweep where the machines are: as processes here, as a SLURM array, or with a TPU VM for each training.

  python launch/sweep.py SWEEP --out DIR --backend local|slurm|tpu [FLAG...] [--config.GROUP.FIELD=VALUE...]
                         [-- FLAG OF THE BACKEND...]

local   what "transformer-jax sweep" does.
slurm   one job array, an index for each training that is missing; DIR is on a disk that all nodes see. What follows
        -- goes to sbatch (as -- --gpus=1 --time=4:00:00). A job saves before its time is over; the same command again
        submits what is still missing. Each job writes the table anew as it ends.
tpu     "launch/tpu_vm.sh watch" for each training, --jobs of them at once, from here; the TPU is deleted when its
        training is done, and the run is then scored here. Needs --runs gs://...; what follows -- goes to tpu_vm.sh
        (as -- --zone=Z --accelerator-type=T --runtime-version=V --spot).

The same command again does only what is missing, whatever the backend. "transformer-jax sweep --out DIR --collect"
writes the table of what there is. Run it with the interpreter of an environment that has transformer_jax.
"""

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from transformer_jax.commands.sweep import PROGRAM, SweepRun, finish, open_sweep
    from transformer_jax.config import ConfigError
    from transformer_jax.overlay import parse_overrides, split_reference
    from transformer_jax.sweeps.points import Trial
except ModuleNotFoundError as error:
    sys.exit(f'error: {error}; run this with the interpreter of the environment, as .venv/bin/python launch/sweep.py')

CHECKOUT = Path(__file__).resolve().parent.parent
TPU_SCRIPT = CHECKOUT / 'launch' / 'tpu_vm.sh'
DONE, FAILED, BAD_USE = 0, 1, 2
_BY_SIGNAL = 128
_SAVE_SECONDS = 180  # how long before its time is over a job is told to save
_LONGEST_NAME = 50  # of a TPU, with room for what makes it unique


def main(arguments: Sequence[str]) -> int:
    """Launches a sweep and returns the exit code."""
    ours, backend_flags = _split_at_dashes(arguments)
    options, rest = _make_parser().parse_known_args(ours)
    try:
        changes = parse_overrides(rest)
        if options.jobs is not None and options.jobs < 1:
            raise ConfigError(f'--jobs is {options.jobs}; it must be at least 1')
        run = open_sweep(
            options.out,
            options.sweep,
            changes,
            seeds=_parse_seeds(options.seeds),
            runs=options.runs,
            split=options.split,
            baseline=options.baseline,
            train_command=_tpu_command(backend_flags) if options.backend == 'tpu' else None,
        )
        trials = run.sweep.select(None if options.points is None else options.points.split(','))
        _check_backend(options.backend, run, backend_flags)
        run.start(may_write=not options.dry_run)
        if options.backend == 'slurm':
            return _submit_array(run, trials, _repeat(options, changes), options, backend_flags)
        return _run_here(run, trials, options)
    except ValueError as error:
        print(f'launch/sweep.py: {error}', file=sys.stderr)
        return BAD_USE


def _run_here(run: SweepRun, trials: Sequence[Trial], options: argparse.Namespace) -> int:
    """Local processes, which for TPU VMs only watch."""
    if options.dry_run:
        for trial in run.missing(trials):
            for _, command in run.commands(trial):
                print(shlex.join(command), flush=True)
                if command[0] == str(TPU_SCRIPT):
                    _show_dry_run(command)
        return DONE
    signal = run.run(trials, at_once=options.jobs or 1)
    succeeded = finish(run, trials)
    if options.backend == 'tpu':
        for trial in run.missing(trials):
            if run.folder.log(trial).exists():
                place = [flag for flag in run.commands(trial)[0][1] if flag.startswith(('--zone=', '--project='))]
                command = [str(TPU_SCRIPT), 'delete', f'--name={name_tpu(run, trial)}', *place]
                print(f'{trial.name} may still have its TPU, until: {shlex.join(command)}')
    if signal is not None:
        return _BY_SIGNAL + signal
    return DONE if succeeded else FAILED


def _show_dry_run(command: Sequence[str]) -> None:
    """What the script would do, in its own words, each line after a mark."""
    shown = subprocess.run([*command, '--dry-run'], capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ConfigError(shown.stderr.strip())
    for line in shown.stdout.splitlines():
        print(f'  {line}', flush=True)


# --- SLURM ---


def _submit_array(
    run: SweepRun, trials: Sequence[Trial], repeat: Sequence[str], options: argparse.Namespace, flags: Sequence[str]
) -> int:
    """One array, an index for each training that is missing."""
    missing = run.missing(trials)
    if not missing:
        print('nothing is missing', file=sys.stderr)
        return DONE if finish(run, trials) else FAILED
    folder = Path(run.folder.path) / 'slurm'
    number = 1
    while (folder / f'array-{number}.sbatch').exists():
        number += 1
    script = folder / f'array-{number}.sbatch'
    limit = '' if options.jobs is None else f'%{options.jobs}'
    text = make_array_script(run.sweep.name, missing, repeat, folder / f'array-{number}', limit)
    command = ['sbatch', *flags, str(script)]
    if options.dry_run:
        print(f'# {script}:\n{text}\n# then:\n{shlex.join(command)}')
        return DONE
    folder.mkdir(exist_ok=True)
    script.write_text(text)
    try:
        code = subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise ConfigError('sbatch is not on the PATH; this is no SLURM machine') from None
    return FAILED if code else DONE


def make_array_script(name: str, trials: Sequence[Trial], repeat: Sequence[str], logs: Path, limit: str) -> str:
    """The batch script of an array whose every job does one of the trials. `limit` is `%N` for N at once, or ''."""
    points = '\n'.join(f'  {shlex.quote(trial.name)}' for trial in trials)
    command = shlex.join([*PROGRAM, 'sweep', *repeat])
    return f"""\
#!/usr/bin/env bash
#SBATCH --job-name={shlex.quote(name)}
#SBATCH --array=0-{len(trials) - 1}{limit}
#SBATCH --output={shlex.quote(f'{logs}-%a.log')}
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{_SAVE_SECONDS}
#SBATCH --requeue
points=(
{points}
)
cd {shlex.quote(os.fspath(Path.cwd()))} || exit
exec {command} --points="${{points[SLURM_ARRAY_TASK_ID]}}"
"""


def _repeat(options: argparse.Namespace, changes: dict[str, str]) -> list[str]:
    """The flags that say the whole sweep again."""
    flags = {'config': Path(options.sweep).absolute(), 'out': Path(options.out).absolute()}
    flags |= {name: getattr(options, name) for name in ('seeds', 'runs', 'split', 'baseline')}
    flags |= {f'config.{path}': value for path, value in changes.items()}
    return [f'--{name}={value}' for name, value in flags.items() if value is not None]


# --- TPU VMs ---


def _tpu_command(flags: Sequence[str]):
    """What trains one trial on a TPU VM of its own: `launch/tpu_vm.sh watch` ends when the training has ended."""

    def command(run: SweepRun, trial: Trial) -> list[str]:
        _, *changes = run.sweep.arguments(trial)
        start = [str(TPU_SCRIPT), 'watch', f'--name={name_tpu(run, trial)}', f'--run={run.folder.run_dir(trial)}']
        return [*start, f'--config={_in_checkout(run.sweep.base)}', *changes, '--delete-when-done', *flags]

    return command


def name_tpu(run: SweepRun, trial: Trial) -> str:
    """A name that a TPU may have, the same in every call, and another one for each training anywhere."""
    words = re.sub(r'[^a-z0-9]+', '-', f'{run.sweep.name}-{trial.name}'.lower()).strip('-')
    digest = hashlib.sha256(os.fspath(run.folder.run_dir(trial)).encode()).hexdigest()
    return f'sweep-{words}'[:_LONGEST_NAME].strip('-') + f'-{digest[:8]}'


def _in_checkout(base: str) -> str:
    name, arguments = split_reference(base)
    path = Path(name).resolve()
    if not path.is_relative_to(CHECKOUT):
        raise ConfigError(f'BASE is {name}, which lies outside the checkout {CHECKOUT}, and only that is on a TPU VM')
    return str(path.relative_to(CHECKOUT)) + ('' if arguments is None else f':{arguments}')


def _parse_seeds(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(',')]
    except ValueError:
        raise ConfigError(f'--seeds is {text!r}; it must be whole numbers with commas between') from None


def _check_backend(backend: str, run: SweepRun, flags: Sequence[str]) -> None:
    if backend == 'local' and flags:
        raise ConfigError(f'local processes take no flags of their own: {shlex.join(flags)}')
    if backend == 'tpu' and '://' not in os.fspath(run.folder.runs):
        raise ConfigError('a TPU VM loses its disk, so the run folders must be in a bucket; give --runs=gs://...')


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    arguments = list(arguments)
    place = arguments.index('--') if '--' in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        'launch/sweep.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add('sweep', metavar='SWEEP', help='the sweep, as configs/sweeps/NAME.py')
    add('--out', required=True, metavar='DIR', help='the folder of the sweep, on a disk')
    add('--backend', required=True, choices=('local', 'slurm', 'tpu'), help='where the trainings run')
    add('--runs', metavar='DIR', help='where the run folders go, as gs://...; default: into the folder of the sweep')
    add('--points', metavar='NAME,...', help='only these: names of points or of their folders, or NAME/seed-N')
    add('--seeds', metavar='N,...', help='trains each point with each seed; default: the seed of its config')
    add('--jobs', type=int, metavar='N', help='trainings at once; default: 1, in an array as many as SLURM starts')
    add('--baseline', metavar='NAME', help='the point that the others are compared with; default: the first')
    add('--split', metavar='NAME', help='what is scored; default: test')
    add('--dry-run', action='store_true', help='prints the exact commands and runs none')
    return parser


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
