"""launch/tpu_worker.sh: a training that runs apart from the connection, its exit code, and the environment."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.launch.stand_ins import ROOT, StandIns

# Stands in for the environment's Python: trains until it is told how to end, by a file or by SIGTERM.
_PYTHON = """\
#!/usr/bin/env bash
trap 'echo saved; exit 143' TERM
echo "$@"
while [[ ! -e end ]]; do sleep 0.02; done
exit "$(<end)"
"""


class Worker:
    def __init__(self, folder):
        self.checkout, self.home = folder / 'transformer_jax', folder / 'home'
        self.folder = self.home / 'transformer-jax-worker'
        (self.checkout / 'launch').mkdir(parents=True)
        self.home.mkdir()
        for name in ('environment.sh', 'tpu_worker.sh'):
            shutil.copy(ROOT / 'launch' / name, self.checkout / 'launch')
        python = self.checkout / '.venv' / 'bin' / 'python'
        python.parent.mkdir(parents=True)
        python.write_text(_PYTHON)
        python.chmod(0o755)

    def call(self, *arguments, code=0, **environment):
        script = self.checkout / 'launch' / 'tpu_worker.sh'
        result = subprocess.run(
            ['bash', script, *arguments],
            env=os.environ | {'HOME': str(self.home)} | environment,
            text=True,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert result.returncode == code, result.stderr
        return result.stdout + result.stderr

    def wait_for_status(self, status):
        deadline = time.monotonic() + 30
        while (now := self.call('status')) != f'training: {status}\n':
            assert time.monotonic() < deadline, now
            time.sleep(0.05)

    def wait_for_log(self, text):
        deadline = time.monotonic() + 30
        while text not in (self.folder / 'train.log').read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self, code):
        (self.checkout / 'end').write_text(str(code))

    def pid(self):
        return int((self.folder / 'pid').read_text())


@pytest.fixture
def worker(tmp_path):
    worker = Worker(tmp_path)
    yield worker
    worker.end(0)


ARGUMENTS = ('--config=configs/x.py:a=1', '--run=gs://b/a run')


def test_a_training_runs_apart_and_leaves_its_exit_code(worker):
    assert worker.call('status') == 'training: none\n'
    assert "transformer-jax train --config=configs/x.py:a=1 '--run=gs://b/a run'" in worker.call('start', *ARGUMENTS)
    assert os.getsid(worker.pid()) == worker.pid() != os.getsid(0)
    assert worker.call('status') == 'training: running\n'
    assert 'must not change under it' in worker.call('require-idle', code=2)
    assert 'runs here already' in worker.call('start', *ARGUMENTS)
    assert 'another training runs here' in worker.call('start', '--run=other', code=2)
    worker.end(3)
    worker.wait_for_status('ended 3')
    worker.call('require-idle')
    log = (worker.folder / 'train.log').read_text()
    assert log.count('-m transformer_jax train --config=configs/x.py:a=1 --run=gs://b/a run\n') == 1


def test_the_same_command_starts_again_after_the_end(worker):
    worker.end(1)
    worker.call('start', *ARGUMENTS)
    worker.wait_for_status('ended 1')
    worker.end(0)
    worker.call('start', *ARGUMENTS)
    worker.wait_for_status('ended 0')
    assert (worker.folder / 'train.log').read_text().count('=== ') == 2


def test_a_stop_signal_to_all_lets_the_training_save_and_keeps_its_code(worker):
    worker.call('start', *ARGUMENTS)
    worker.wait_for_log('-m transformer_jax')
    os.killpg(worker.pid(), signal.SIGTERM)
    worker.wait_for_status('ended 143')
    assert 'saved' in (worker.folder / 'train.log').read_text()


def test_a_training_that_a_restart_of_the_machine_took_counts_as_none(worker):
    worker.call('start', *ARGUMENTS)
    worker.wait_for_log('-m transformer_jax')
    os.killpg(worker.pid(), signal.SIGKILL)
    worker.wait_for_status('none')


def test_install_makes_the_environment_with_the_extra_tpu(worker, tmp_path):
    stand_ins = StandIns(tmp_path / 'stand-ins', ['python3.14', 'python', 'sudo'])
    shutil.copy(stand_ins.folder / 'bin' / 'python', worker.checkout / '.venv' / 'bin')
    stand_ins.answer('python -c', 'a-hash')
    worker.call('install', PATH=stand_ins.environment['PATH'])
    install = [call for call in stand_ins.calls() if 'install' in call]
    pip = ['-m', 'pip', 'install', '-qq', '--disable-pip-version-check', '-c', 'constraints.txt', '-e', '.[tpu]']
    assert install == [['python', *pip]]


def test_install_brings_a_python_where_there_is_none(worker, tmp_path):
    stand_ins = StandIns(tmp_path / 'stand-ins', ['sudo'])
    for name in ('bash', 'dirname'):
        (stand_ins.folder / 'bin' / name).symlink_to(shutil.which(name))
    stand_ins.answer('python3.12-venv', {'stderr': 'no such package\n', 'code': 100})
    message = worker.call('install', PATH=str(stand_ins.folder / 'bin'), PYENV_ROOT='', code=2)
    assert 'found no Python 3.11 to 3.14' in message
    apt = ['sudo', 'apt-get', '-o', 'DPkg::Lock::Timeout=600']
    assert stand_ins.calls() == [
        [*apt, 'update', '-qq'],
        [*apt, 'install', '-y', '-qq', 'python3.12-venv'],
        [*apt, 'install', '-y', '-qq', 'python3.11-venv'],
    ]
