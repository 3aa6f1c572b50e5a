"""launch/sweep.py: the commands of each backend, against stand-ins that record their calls."""

import importlib.util
import shlex
import subprocess
import sys

import pytest

from tests.launch.stand_ins import ROOT, StandIns
from transformer_jax.commands import sweep as command
from transformer_jax.sweeps.folder import SweepFolder

STUB = ROOT / 'tests' / 'sweeps' / 'stub_program.py'
SWEEP = str(ROOT / 'configs' / 'sweeps' / 'positions.py')
PLACE = ['--zone=z', '--accelerator-type=v5litepod-1', '--runtime-version=v2']
SCHEMES = ['none', 'sinusoidal', 'learned', 'shaw', 'rope', 't5', 'alibi']

_spec = importlib.util.spec_from_file_location('launch_sweep', ROOT / 'launch' / 'sweep.py')
assert _spec is not None
assert _spec.loader is not None
launcher = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launcher)


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Stand-ins for the clusters, and a stub for the program; the working folder is one of its own."""
    stand_ins = StandIns(tmp_path / 'stand-ins', ['sbatch', 'gcloud'])
    monkeypatch.setenv('PATH', stand_ins.environment['PATH'])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, 'PROGRAM', (sys.executable, '-S', '-E', str(STUB), str(tmp_path)))
    return stand_ins


def launch(*arguments):
    return launcher.main([SWEEP, '--out=out', *arguments])


def test_local_processes_are_the_sweep(machines, tmp_path, capsys):
    assert launch('--backend=local', '--points=rope,t5', '--dry-run') == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[5:7] for line in lines] == [
        [verb, f'--run={tmp_path}/out/{name}/seed-0'] for name in ('rope', 't5') for verb in ('train', 'evaluate')
    ]
    assert not (tmp_path / 'out').exists()
    assert launch('--backend=local', '--points=rope') == 0
    assert (tmp_path / 'calls').read_text() == 'train rope/seed-0\nevaluate rope/seed-0\n'
    capsys.readouterr()
    assert launch('--backend=local', '--points=rope,t5', '--dry-run') == 0
    assert 'rope/seed-0' not in capsys.readouterr().out


def test_a_slurm_array_has_an_index_for_each_missing_training(machines, tmp_path, capsys):
    assert launch('--backend=local', '--points=learned') == 0
    arguments = ['--backend=slurm', '--jobs=3', '--config.train.steps=5', '--', '--gpus=1', '--comment=a b']
    assert launch(*arguments[:3], '--dry-run', *arguments[3:]) == 0
    shown = capsys.readouterr().out
    script = tmp_path / 'out' / 'slurm' / 'array-1.sbatch'
    assert not script.exists()
    assert machines.calls() == []
    assert launch(*arguments) == 0
    assert machines.calls() == [['sbatch', '--gpus=1', '--comment=a b', str(script)]]
    assert script.read_text() in shown
    assert shown.splitlines()[-1] == shlex.join(machines.calls()[0])
    # `learned` was done with another number of steps, and goes on.
    assert f'#SBATCH --array=0-{len(SCHEMES) - 1}%3\n' in script.read_text()
    assert launch('--backend=slurm') == 0
    text = (tmp_path / 'out' / 'slurm' / 'array-2.sbatch').read_text()
    assert '#SBATCH --array=0-5\n' in text
    assert 'learned/seed-0' not in text
    assert '#SBATCH --signal=B:TERM@180\n' in text


def test_a_job_of_the_array_does_its_training(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, 'PROGRAM', ('printf', '%s\\n'))
    assert launch('--backend=slurm', '--seeds=4,7', '--baseline=rope', '--config.train.steps=5') == 0
    script = tmp_path / 'out' / 'slurm' / 'array-1.sbatch'
    done = subprocess.run(
        ['bash', str(script)], env={'SLURM_ARRAY_TASK_ID': '3'}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        'sweep', f'--config={SWEEP}', f'--out={tmp_path}/out', '--seeds=4,7', '--baseline=rope',
        '--config.train.steps=5', '--points=sinusoidal/seed-7',
    ]  # fmt: skip


def test_sbatch_that_refuses_is_a_failure(machines):
    machines.answer('sbatch', {'code': 1})
    assert launch('--backend=slurm') == 1


def test_a_dry_run_for_tpus_prints_every_command_and_calls_none(machines, tmp_path, capsys):
    arguments = ['--backend=tpu', '--runs=gs://bucket/s', '--points=rope', '--config.train.steps=5', '--dry-run']
    assert launch(*arguments, '--', *PLACE) == 0
    lines = capsys.readouterr().out.splitlines()
    watch, evaluate = shlex.split(lines[0]), shlex.split(lines[-1])
    assert watch[:2] == [str(ROOT / 'launch' / 'tpu_vm.sh'), 'watch']
    assert watch[3:] == [
        '--run=gs://bucket/s/rope/seed-0', '--config=configs/quickstart.py', '--config.train.steps=5',
        '--config.model.positions=rope', '--config.seed=0', '--delete-when-done', *PLACE,
    ]  # fmt: skip
    name = watch[2].removeprefix('--name=')
    assert name.startswith('sweep-positions-rope-seed-0-')
    assert f'  gcloud compute tpus queued-resources create {name} ' in '\n'.join(lines)
    assert any('tpu_worker.sh start --config=configs/quickstart.py' in line for line in lines)
    assert evaluate[5:] == ['evaluate', '--run=gs://bucket/s/rope/seed-0', '--split=test']
    assert machines.calls() == []
    assert not (tmp_path / 'out').exists()


def test_a_tpu_for_each_training_and_a_row_for_one_that_fails(machines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SweepFolder, 'evaluations', lambda self, trial: set())  # no bucket is at hand
    machines.answer('describe rope', {'code': 1, 'stderr': 'PERMISSION_DENIED'})
    machines.answer('queued-resources describe', 'ACTIVE')
    machines.answer('tpu-vm describe', 'READY')
    machines.answer('status', 'training: ended 0')
    (tmp_path / 'faults.json').write_text('{"evaluate t5": 3}')
    arguments = ['--backend=tpu', '--runs=gs://bucket/s', '--points=rope,t5', '--jobs=2', '--', *PLACE]
    assert launch(*arguments, '--poll-seconds=0.01') == 1
    captured = capsys.readouterr()
    assert 't5/seed-0: failed' in captured.err
    assert 'evaluate: exit code 3' in captured.out
    calls = [' '.join(call) for call in machines.calls()]
    assert any(call.startswith('gcloud compute tpus queued-resources delete sweep-positions-t5') for call in calls)
    assert (tmp_path / 'calls').read_text() == 'evaluate t5/seed-0\n'
    assert 'may still have its TPU, until: ' in captured.out


def test_names_of_tpus_are_allowed_and_differ(machines):
    run = command.open_sweep('out', SWEEP, {}, seeds=[0, 1], runs='gs://bucket/' + 'x' * 90)
    names = [launcher.name_tpu(run, trial) for trial in run.sweep.trials()]
    assert len(set(names)) == len(names) == 14
    other = command.open_sweep('out', SWEEP, {}, seeds=[0, 1], runs='gs://bucket/other')
    assert not {launcher.name_tpu(other, trial) for trial in other.sweep.trials()} & set(names)
    for name in names:
        assert len(name) <= 61
        assert name.replace('-', '').isalnum()
        assert name == name.lower()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--backend=tpu', '--', *PLACE], 'give --runs=gs://'),
        (['--backend=local', '--', '--gpus=1'], 'take no flags of their own: --gpus=1'),
        (['--backend=local', '--seeds=a'], "--seeds is 'a'"),
        (['--backend=slurm', '--points=nobody'], "there is no point 'nobody'"),
        (['--backend=local', '--steps=3'], "unknown argument '--steps=3'"),
    ],
)
def test_bad_use_is_refused(machines, tmp_path, capsys, arguments, message):
    assert launch(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
