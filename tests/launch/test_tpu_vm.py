"""launch/tpu_vm.sh against a stand-in gcloud: the exact calls, waiting, failures, preemption and resume."""

import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.launch.stand_ins import ROOT, StandIns

SCRIPT = 'launch/tpu_vm.sh'
PLACE = ['--zone=us-x1-a', '--project=my-project']
WHERE = ['--name', 'pod', '--zone', 'us-x1-a', '--project=my-project', '--poll-seconds=0']
SIZE = ['--accelerator-type=v5litepod-16', '--runtime-version', 'v2-alpha']
RUN = ['--config=configs/quickstart.py:level=full', '--run=gs://bucket/run']
TPUS = ['gcloud', 'compute', 'tpus']
CREATE = [
    *(*TPUS, 'queued-resources', 'create', 'pod', *PLACE, '--node-id=pod'),
    *('--accelerator-type=v5litepod-16', '--runtime-version=v2-alpha', '--spot'),
]
DELETE = [*TPUS, 'queued-resources', 'delete', 'pod', *PLACE, '--force', '--quiet']
DESCRIBE = [*TPUS, 'queued-resources', 'describe', 'pod', *PLACE, '--format=value(state.state)']
DESCRIBE_NODE = [*TPUS, 'tpu-vm', 'describe', 'pod', *PLACE, '--format=value(state)']
WORKER = 'transformer_jax/launch/tpu_worker.sh'
STATUS = f"if [ -e {WORKER} ]; then bash {WORKER} status; else echo 'training: none'; fi"
NOT_FOUND = {'stderr': 'ERROR: NOT_FOUND: no such resource\n', 'code': 1}


def ssh(command, worker='all'):
    return [*TPUS, 'tpu-vm', 'ssh', 'pod', *PLACE, f'--worker={worker}', f'--command={command}']


TRAIN = ssh(f'bash {WORKER} start --config=configs/quickstart.py:level=full --run=gs://bucket/run')


@pytest.fixture
def gcloud(tmp_path):
    return StandIns(tmp_path / 'stand-ins', ['gcloud', 'sudo'])


def step_names(calls):
    """What each call was for, in a word."""
    words = {'create': 'create', 'delete': 'delete', ' scp ': 'copy', 'start': 'start', 'install': 'install'}
    return [name for call in calls for word, name in words.items() if word in ' '.join(call)]


def test_create_waits_until_active(gcloud):
    gcloud.answer('queued-resources describe', 'WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'CREATING', 'READY')
    result = gcloud.run(SCRIPT, 'create', *WHERE, *SIZE, '--spot', '--create-flags=--network=n --reserved')
    assert gcloud.calls() == [
        [*CREATE, '--network=n', '--reserved'],
        *[DESCRIBE] * 3,
        DESCRIBE_NODE,
        DESCRIBE,
        DESCRIBE_NODE,
    ]
    assert result.stderr.splitlines() == [
        f'pod is {state}' for state in ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'CREATING', 'ACTIVE')
    ]


def test_create_stops_loudly(gcloud):
    gcloud.answer('queued-resources create', {'stderr': 'ERROR: quota exceeded\n', 'code': 1})
    assert 'quota exceeded' in gcloud.run(SCRIPT, 'create', *WHERE, *SIZE, code=1).stderr
    assert len(gcloud.calls()) == 1


@pytest.mark.parametrize('state', ['FAILED', 'SUSPENDED'])
def test_create_does_not_wait_for_what_will_not_come(gcloud, state):
    gcloud.answer('describe value(state.state)', state)
    gcloud.answer('queued-resources describe', {'stdout': 'state: no stock\n'})
    result = gcloud.run(SCRIPT, 'create', *WHERE, *SIZE, code=2)
    assert f'pod is {state} and will not become ACTIVE' in result.stderr
    assert 'no stock' in result.stderr


def test_setup_copies_this_checkout_to_all_workers(gcloud):
    gcloud.run(SCRIPT, 'setup', *WHERE)
    check, copy, unpack, install = gcloud.calls()
    assert check == ssh(f'if [ -e {WORKER} ]; then bash {WORKER} require-idle; fi')
    archive = copy[5]
    assert copy == [*TPUS, 'tpu-vm', 'scp', archive, 'pod:transformer_jax.tar.gz', *PLACE, '--worker=all']
    assert unpack[-1].startswith('--command=rm -rf transformer_jax/transformer_jax ')
    assert unpack[-1].endswith(' && tar -xzf transformer_jax.tar.gz -C transformer_jax')
    assert install == ssh(f'bash {WORKER} install')
    assert not Path(archive).exists()


def test_what_is_packed(gcloud, tmp_path):
    printed = gcloud.run(SCRIPT, 'setup', *WHERE, '--dry-run').stdout.splitlines()[0]
    pack = shlex.split(printed)
    checkout = tmp_path / 'checkout'
    for name in ('a.py', 'transformer_jax/data/b.py', 'data/big', 'runs/x/y', '.venv/z', '.git/c', 'a/__pycache__/d'):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    pack[2] = str(tmp_path / 'packed.tar.gz')
    subprocess.run(pack, cwd=checkout, check=True)
    with tarfile.open(pack[2]) as packed:
        files = {member.name for member in packed.getmembers() if member.isfile()}
    assert files == {'./a.py', './transformer_jax/data/b.py'}


def test_train_passes_every_argument_on_as_it_is(gcloud):
    gcloud.run(SCRIPT, 'train', *WHERE, *RUN, "--config.data.cache_dir=/tmp/a b'c", '--', '--profile', '$HOME; x')
    ((*start, command),) = gcloud.calls()
    assert start == ssh('')[:-1]
    assert shlex.split(command.removeprefix('--command=')) == [
        *('bash', WORKER, 'start', '--config=configs/quickstart.py:level=full', '--run=gs://bucket/run'),
        *("--config.data.cache_dir=/tmp/a b'c", '--profile', '$HOME; x'),
    ]


def test_watch_trains_again_after_a_preemption(gcloud):
    states = ['PROVISIONING', 'ACTIVE', 'ACTIVE', 'SUSPENDING', 'SUSPENDED', 'PROVISIONING', 'ACTIVE']
    gcloud.answer('queued-resources describe', NOT_FOUND, *states)
    gcloud.answer('tpu-vm describe', 'READY')
    running, done = 'training: running\n' * 2, 'training: ended 0\n' * 2
    gcloud.answer('status', 'training: none', running, 'training: none', running, done)
    result = gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, '--spot', *RUN, '--delete-when-done')
    calls = gcloud.calls()
    once = ['copy', 'install', 'start']
    assert step_names(calls) == ['create', *once, 'delete', 'create', *once, 'delete']
    assert [call for call in calls if 'start' in call[-1]] == [TRAIN, TRAIN]
    assert calls.count(CREATE) == calls.count(DELETE) == 2
    assert 'the training has ended; its run is gs://bucket/run' in result.stderr


def test_watch_sees_a_node_that_went_before_its_queued_resource_knows(gcloud):
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'PREEMPTED', 'READY')
    gcloud.answer('status', 'training: ended 0')
    gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN)
    assert step_names(gcloud.calls()) == ['delete', 'create']


def test_watch_starts_a_stopped_training_again_without_copying(gcloud):
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', 'training: ended 143\ntraining: ended 1', 'training: running', 'training: ended 0')
    gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN)
    assert step_names(gcloud.calls()) == ['start']


def test_watch_counts_no_stop_before_a_preemption_as_a_failure(gcloud):
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', *['training: ended 143'] * 4, 'training: ended 0')
    gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN)
    assert step_names(gcloud.calls()) == ['start'] * 4


def test_watch_stops_when_training_keeps_failing(gcloud):
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', 'training: ended 1\ntraining: ended 0')
    result = gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN, code=2)
    assert 'the training failed 3 times (training: ended 1, training: ended 0)' in result.stderr
    assert step_names(gcloud.calls()) == ['start', 'start']


def test_watch_stops_at_once_when_the_config_is_refused(gcloud):
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', 'training: ended 2')
    assert 'refused its config or its data' in gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN, code=2).stderr
    assert step_names(gcloud.calls()) == []


def test_watch_stands_a_broken_connection_but_not_for_ever(gcloud):
    gcloud.answer('queued-resources describe', {'stderr': 'ERROR: no route\n', 'code': 1}, 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', {'code': 255}, 'training: running', {'code': 255})
    result = gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, *RUN, code=2)
    assert 'gcloud can not tell the state of pod: ERROR: no route' in result.stderr
    assert 'pod did not answer 10 times in a row' in result.stderr
    assert sum('status' in call[-1] for call in gcloud.calls()) == 12


def test_status_tail_fetch(gcloud, tmp_path):
    gcloud.answer('queued-resources describe', 'ACTIVE', 'WAITING_FOR_RESOURCES')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.answer('status', 'training: running')
    assert gcloud.run(SCRIPT, 'status', *WHERE).stdout == 'pod: ACTIVE\ntraining: running\n'
    assert gcloud.run(SCRIPT, 'status', *WHERE).stdout == 'pod: WAITING_FOR_RESOURCES\n'
    gcloud.run(SCRIPT, 'tail', *WHERE, '--worker=2')
    target = tmp_path / 'new folder' / 'run'
    gcloud.run(SCRIPT, 'fetch', *WHERE, '--run=runs/x', f'--to={target}')
    *_, tail, fetch = gcloud.calls()
    assert tail == ssh('tail -n 100 -F transformer-jax-worker/train.log', worker=2)
    scp = [*TPUS, 'tpu-vm', 'scp', 'pod:transformer_jax/runs/x', str(target)]
    assert fetch == [*scp, *PLACE, '--worker=0', '--recurse']
    target.mkdir()
    assert 'exists' in gcloud.run(SCRIPT, 'fetch', *WHERE, '--run=runs/x', f'--to={target}', code=2).stderr
    assert 'needs no fetching' in gcloud.run(SCRIPT, 'fetch', *WHERE, '--run=gs://b/x', code=2).stderr


def test_delete_asks_first(gcloud):
    for answer in ('', 'y\n', 'other\n'):
        assert 'nothing was deleted' in gcloud.run(SCRIPT, 'delete', *WHERE, stdin=answer, code=2).stderr
    assert gcloud.calls() == []
    gcloud.run(SCRIPT, 'delete', *WHERE, stdin='pod\n')
    gcloud.run(SCRIPT, 'delete', *WHERE, '--yes')
    assert gcloud.calls() == [DELETE, DELETE]


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['train', '--zone=z'], 'train needs --name;'),
        (['create', '--name=n', '--zone=z'], 'create needs --accelerator-type --runtime-version'),
        (['watch', '--name=n', '--zone=z', '--run=r'], 'watch needs --accelerator-type --runtime-version --config'),
        (['train', *WHERE, '--run=r'], 'train needs --config'),
        (['train', *WHERE, '--run=r', '--config=configs/none.py:a'], "--config is 'configs/none.py:a'; the file must"),
        (['train', *WHERE, '--run=r', f'--config={ROOT}/configs/quickstart.py'], 'must lie in the checkout'),
        (['watch', *WHERE, *SIZE, RUN[0], '--run=runs/x'], "--run is 'runs/x'; what is to outlast a preemption"),
        ([], 'no command was given'),
        (['start'], "unknown command 'start'"),
        (['train', '--nmae=x'], 'unknown flag --nmae=x; there are --name --zone'),
        (['train', '--name'], '--name needs a value'),
        (['train', '--name='], '--name needs a value'),
        (['train', 'x'], "unexpected argument 'x'"),
        (['watch', *WHERE, '--poll-seconds=soon'], "--poll-seconds is 'soon'"),
    ],
)
def test_bad_use_is_refused_before_any_call(gcloud, arguments, message):
    assert message in gcloud.run(SCRIPT, *arguments, code=2).stderr
    assert gcloud.calls() == []


def test_a_missing_gcloud_is_named(gcloud, tmp_path):
    tools = tmp_path / 'tools'
    tools.mkdir()
    for name in ('bash', 'dirname', 'sed'):
        (tools / name).symlink_to(shutil.which(name))
    result = gcloud.run(SCRIPT, 'delete', *WHERE, '--yes', code=2, PATH=str(tools))
    assert 'gcloud (of the Google Cloud CLI) is not on the PATH' in result.stderr
    assert gcloud.run(SCRIPT, 'delete', *WHERE, '--dry-run', PATH=str(tools)).stdout == f'{shlex.join(DELETE)}\n'


def test_a_dry_run_prints_what_would_be_run_and_runs_nothing(gcloud):
    result = gcloud.run(SCRIPT, 'watch', *WHERE, *SIZE, '--spot', *RUN, '--dry-run')
    assert gcloud.calls() == []
    commands = [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith('#')]
    assert commands[:3] == [CREATE, DESCRIBE, DESCRIBE_NODE]
    assert commands[3][:2] == ['tar', '-czf']
    assert commands[-3:] == [TRAIN, ssh(STATUS), DELETE]
    gcloud.answer('queued-resources describe', 'ACTIVE')
    gcloud.answer('tpu-vm describe', 'READY')
    gcloud.run(SCRIPT, 'setup', *WHERE)
    printed = [[word.replace('/tmp/transformer_jax.tar.gz', 'X') for word in command] for command in commands[4:8]]
    real = [[('X' if word.endswith('/transformer_jax.tar.gz') else word) for word in call] for call in gcloud.calls()]
    assert printed == real


def test_help_names_every_command(gcloud):
    text = gcloud.run(SCRIPT, '--help').stdout
    for command in ('create', 'setup', 'train', 'status', 'tail', 'fetch', 'delete', 'watch'):
        assert f'\n  {command} ' in text
