"""launch/slurm.sbatch against a stand-in SLURM: submission, the step, saving before the time is over, requeueing."""

import os
import shlex
import signal
import subprocess
import time

import pytest

from tests.launch.stand_ins import ROOT, StandIns

SCRIPT = 'launch/slurm.sbatch'
SETTINGS = {'RUN': '/shared/a run', 'CONFIG': 'configs/quickstart.py:level=full', 'CHECKOUT': str(ROOT)}
JOB = SETTINGS | {'SLURM_JOB_ID': '17'}
FLAGS = ['--nodes=1', '--ntasks-per-node=8', '--gpus-per-node=8', '--cpus-per-task=8', '--time=24:00:00']
SUBMIT = ['sbatch', *FLAGS, '--signal=B:USR1@180', '--export=ALL', SCRIPT]
# A training that ends as the file `end` says, with 143 when `scancel` (below) asked for it, or after a minute.
_SRUN = """\
#!/usr/bin/env bash
trap '' TERM USR1
cd "$STAND_INS"
touch started
while [[ ! -e end && ! -e asked ]]; do sleep 0.02; ((SECONDS < 60)) || exit 99; done
[[ ! -e asked ]] || { sleep 0.3; echo saved >saved; exit 143; }
exit "$(<end)"
"""


def srun(python, *more):
    start = ['srun', '--kill-on-bad-exit=0', '--wait=0', '--label', '--cpus-per-task=8', python]
    train = ['-m', 'transformer_jax', 'train', '--config=configs/quickstart.py:level=full', '--run=/shared/a run']
    return [*start, *train, *more]


@pytest.fixture
def slurm(tmp_path):
    stand_ins = StandIns(tmp_path / 'stand-ins', ['sbatch', 'srun', 'scancel', 'scontrol', 'python'])
    stand_ins.environment = {k: v for k, v in stand_ins.environment.items() if not k.startswith('SLURM_')}
    return stand_ins


def test_it_submits_itself(slurm):
    slurm.run(SCRIPT, '--config.train.steps=5', 'a b', **SETTINGS)
    assert slurm.calls() == [[*SUBMIT, '--config.train.steps=5', 'a b']]


def test_settings_come_by_environment(slurm):
    settings = {'NODES': '3', 'GPUS_PER_NODE': '4', 'CPUS_PER_GPU': '5', 'TIME_LIMIT': '1:00:00', 'SAVE_SECONDS': '60'}
    slurm.run(SCRIPT, **SETTINGS, **settings)
    flags = ['--nodes=3', '--ntasks-per-node=4', '--gpus-per-node=4', '--cpus-per-task=5', '--time=1:00:00']
    assert slurm.calls() == [['sbatch', *flags, '--signal=B:USR1@60', '--export=ALL', SCRIPT]]


def test_the_directives_are_the_defaults(slurm):
    lines = (ROOT / SCRIPT).read_text().splitlines()
    directives = [line.removeprefix('#SBATCH ') for line in lines if line.startswith('#SBATCH ')]
    assert set(SUBMIT[1:7]) < set(directives)
    assert '--requeue' in directives
    assert lines[0].startswith('#!')


def test_a_dry_run_prints_both_commands_and_runs_none(slurm):
    python = slurm.environment['PATH'].split(':')[0] + '/python'
    result = slurm.run(SCRIPT, '--dry-run', '--config.data.cache_dir=/a b', **SETTINGS, PYTHON=python)
    submit, start = map(shlex.split, result.stdout.splitlines())
    assert slurm.calls() == []
    assert submit == [*SUBMIT, '--config.data.cache_dir=/a b']
    slurm.run(SCRIPT, '--config.data.cache_dir=/a b', **JOB, PYTHON=python)
    assert slurm.calls() == [start] == [srun(python, '--config.data.cache_dir=/a b')]


@pytest.mark.parametrize('code', [0, 1, 2, 143])
def test_a_job_ends_with_the_code_of_its_training(slurm, code):
    slurm.answer('srun', {'code': code, 'stderr': 'words of the training\n'})
    result = slurm.run(SCRIPT, **JOB, PYTHON=slurm.environment['PATH'].split(':')[0] + '/python', code=code)
    assert 'words of the training' in result.stderr
    assert [call[0] for call in slurm.calls()] == ['srun']


def test_a_file_is_sourced_before_the_start(slurm, tmp_path):
    setup = tmp_path / 'set up.sh'
    setup.write_text('scontrol loaded\n')
    slurm.run(SCRIPT, **JOB, PYTHON='/bin/true', SETUP_FILE=str(setup))
    assert [call[0] for call in slurm.calls()] == ['scontrol', 'srun']


class Job:
    """A job whose training waits to be told how it ends."""

    def __init__(self, slurm):
        self.folder = slurm.folder
        (self.folder / 'bin' / 'srun').write_text(_SRUN)
        cancel = self.folder / 'bin' / 'scancel'
        cancel.write_text(f"{cancel.read_text()}pathlib.Path('{self.folder}/asked').touch()\n")
        with (self.folder / 'stderr').open('w') as stderr:
            self.process = subprocess.Popen(
                ['bash', str(ROOT / SCRIPT)],
                env=slurm.environment | JOB | {'PYTHON': '/bin/true', 'STAND_INS': str(self.folder)},
                stderr=stderr,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while not (self.folder / 'started').exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait(self):
        return self.process.wait(timeout=30)


def test_before_its_time_is_over_it_saves_and_queues_again(slurm):
    job = Job(slurm)
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 143
    assert (slurm.folder / 'saved').exists()
    assert slurm.calls() == [['scancel', '--signal=TERM', '17'], ['scontrol', 'requeue', '17']]
    assert 'queueing again as job 17' in (slurm.folder / 'stderr').read_text()


def test_a_preempted_job_waits_for_the_save_and_leaves_requeueing_to_slurm(slurm):
    job = Job(slurm)
    os.killpg(job.process.pid, signal.SIGTERM)  # to the script and whatever waits in it
    time.sleep(0.1)
    assert job.process.poll() is None
    (slurm.folder / 'asked').touch()
    assert job.wait() == 143
    assert (slurm.folder / 'saved').exists()
    assert slurm.calls() == []


def test_a_training_that_ended_meanwhile_is_not_queued_again(slurm):
    job = Job(slurm)
    cancel = slurm.folder / 'bin' / 'scancel'
    cancel.write_text(cancel.read_text().replace('.touch()', ".with_name('nothing').touch()"))
    job.process.send_signal(signal.SIGUSR1)
    (slurm.folder / 'end').write_text('0')
    assert job.wait() == 0
    assert ['scontrol', 'requeue', '17'] not in slurm.calls()


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'RUN': ''}, 'RUN is not set'),
        ({'CONFIG': ''}, 'CONFIG is not set'),
        ({'CONFIG': 'configs/none.py:a=1'}, "CONFIG is 'configs/none.py:a=1', and there is no such file"),
        ({'NODES': 'two'}, "NODES is 'two'; it must be a number from 1 on"),
        ({'GPUS_PER_NODE': '0'}, "GPUS_PER_NODE is '0'"),
        ({'CHECKOUT': '/nowhere'}, 'CHECKOUT=/nowhere is no checkout'),
        ({'SLURM_JOB_ID': '17', 'PYTHON': '/no/python'}, 'PYTHON=/no/python can not be run'),
    ],
)
def test_bad_settings_are_refused_before_any_call(slurm, changes, message):
    assert message in slurm.run(SCRIPT, **(SETTINGS | changes), code=2).stderr
    assert slurm.calls() == []


def test_help_tells_the_settings(slurm):
    text = slurm.run(SCRIPT, '--help').stdout
    assert '\n  GPUS_PER_NODE  8' in text
    assert '#SBATCH' not in text
