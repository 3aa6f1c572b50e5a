"""launch/gke.sh and launch/gke.yaml against a stand-in kubectl: the exact calls, and the manifest as YAML."""

import re
import shlex

import pytest
import yaml

from tests.launch.stand_ins import ROOT, StandIns

SCRIPT = 'launch/gke.sh'
IMAGE = ['--image=here/an-image:1.2', '--accelerator=tpu-v5-lite-podslice', '--topology', '4x8']
RUN = ['--config=configs/quickstart.py:level=full', '--run=gs://bucket/a run']
SUBMIT = ['submit', '--name=my-run', *IMAGE, *RUN]


@pytest.fixture
def kubectl(tmp_path):
    return StandIns(tmp_path / 'stand-ins', ['kubectl'], reading_input=['kubectl'])


def submitted(kubectl):
    return yaml.safe_load((kubectl.folder / 'kubectl.stdin').read_text())


def pod_of(manifest):
    return manifest['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']


def test_submit_fills_the_manifest_in(kubectl):
    kubectl.run(SCRIPT, *SUBMIT, '--namespace=ours', '--max-restarts=7', '--service-account=writer', '--spot')
    assert kubectl.calls() == [['kubectl', 'create', '-f', '-']]
    manifest = submitted(kubectl)
    assert (manifest['apiVersion'], manifest['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    assert manifest['metadata']['name'] == 'my-run'
    assert manifest['metadata']['namespace'] == 'ours'
    assert manifest['spec']['failurePolicy']['maxRestarts'] == 7
    job = manifest['spec']['replicatedJobs'][0]['template']['spec']
    assert (job['parallelism'], job['completions'], job['backoffLimit']) == (8, 8, 0)
    assert job['podFailurePolicy']['rules'][0]['onExitCodes']['values'] == [2]
    pod = pod_of(manifest)
    assert pod['serviceAccountName'] == 'writer'
    assert pod['restartPolicy'] == 'Never'
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
        'cloud.google.com/gke-tpu-topology': '4x8',
        'cloud.google.com/gke-spot': 'true',
    }
    (container,) = pod['containers']
    assert container['name'] == job['podFailurePolicy']['rules'][0]['onExitCodes']['containerName']
    assert container['image'] == 'here/an-image:1.2'
    assert container['resources']['limits'] == {'google.com/tpu': 4}
    assert container['command'] == [
        *('python', '-m', 'transformer_jax', 'train'),
        *('--config=configs/quickstart.py:level=full', '--run=gs://bucket/a run'),
    ]


def test_without_spot_any_node_of_the_slice_will_do(kubectl):
    kubectl.run(SCRIPT, *SUBMIT)
    assert 'cloud.google.com/gke-spot' not in pod_of(submitted(kubectl))['nodeSelector']


@pytest.mark.parametrize('topology, chips, hosts', [('2x2', 4, 1), ('2x4', 8, 1), ('4x4x4', 4, 16), ('1x1', 1, 1)])
def test_a_pod_a_host(kubectl, topology, chips, hosts):
    kubectl.run(SCRIPT, *SUBMIT, f'--topology={topology}', f'--chips-per-host={chips}')
    job = submitted(kubectl)['spec']['replicatedJobs'][0]['template']['spec']
    assert job['parallelism'] == job['completions'] == hosts


def test_arguments_arrive_as_they_are(kubectl):
    hostile = ['--config.data.cache_dir=/a "b" & c\\d\'e', '--', '${NAME} #', 'ümlaut: {x}, [y]']
    kubectl.run(SCRIPT, *SUBMIT, *hostile)
    command = pod_of(submitted(kubectl))['containers'][0]['command']
    assert command[-3:] == [word for word in hostile if word != '--']
    kubectl.run(SCRIPT, *SUBMIT, '--', '$(HOME)')
    assert pod_of(submitted(kubectl))['containers'][0]['command'][-1] == '$$(HOME)'  # which Kubernetes reads as $(HOME)


def test_the_template_is_yaml_and_every_blank_of_it_is_filled(kubectl):
    text = (ROOT / 'launch' / 'gke.yaml').read_text()
    assert yaml.safe_load(text)['kind'] == 'JobSet'
    kubectl.run(SCRIPT, *SUBMIT)
    assert re.search(r'\$\{[A-Z_]+\}', text)
    assert '${' not in (kubectl.folder / 'kubectl.stdin').read_text()


def test_a_dry_run_prints_what_would_be_submitted(kubectl):
    printed = kubectl.run(SCRIPT, *SUBMIT, '--dry-run').stdout.splitlines()
    assert kubectl.calls() == []
    assert printed[0] == "kubectl create -f - <<'MANIFEST'"
    assert printed[-1] == 'MANIFEST'
    kubectl.run(SCRIPT, *SUBMIT)
    assert '\n'.join(printed[1:-1]) == (kubectl.folder / 'kubectl.stdin').read_text().rstrip('\n')


def test_status_logs_delete(kubectl):
    selector = '--selector=jobset.sigs.k8s.io/jobset-name=my-run'
    expected = {
        'status': [
            ['kubectl', 'get', 'jobset', 'my-run', '--namespace=ours'],
            ['kubectl', 'get', 'pods', '--namespace=ours', selector, '--output=wide'],
        ],
        'logs': [
            [
                *('kubectl', 'logs', '--namespace=ours'),
                f'{selector},batch.kubernetes.io/job-completion-index=0',
                *('--follow', '--tail=100'),
            ]
        ],
        'delete': [['kubectl', 'delete', 'jobset', 'my-run', '--namespace=ours']],
    }
    for command, calls in expected.items():
        where = [command, '--name', 'my-run', '--namespace', 'ours']
        printed = kubectl.run(SCRIPT, *where, '--dry-run').stdout
        assert [shlex.split(line) for line in printed.splitlines()] == calls
        before = len(kubectl.calls())
        kubectl.run(SCRIPT, *where)
        assert kubectl.calls()[before:] == calls


def test_a_refusal_of_kubectl_is_passed_on(kubectl):
    kubectl.answer('create', {'stderr': 'error: jobsets "my-run" already exists\n', 'code': 1})
    assert 'already exists' in kubectl.run(SCRIPT, *SUBMIT, code=1).stderr


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['submit', '--name=x'], 'submit needs --image --accelerator --topology --config --run'),
        (['logs'], 'logs needs --name'),
        (['start'], "unknown command 'start'"),
        ([*SUBMIT, '--topology=16'], "--topology is '16'; it must be of the form 4x4"),
        ([], 'no command was given'),
        ([*SUBMIT, '--topology=2x3'], '--topology 2x3 has 6 chips, which hosts of 4 (--chips-per-host) do not make up'),
        ([*SUBMIT, '--topology=1x1'], '--topology 1x1 has 1 chips, fewer than --chips-per-host 4'),
        ([*SUBMIT, '--name=My_run'], "--name is 'My_run'"),
        ([*SUBMIT, '--image=a b'], "--image is 'a b'"),
        ([*SUBMIT, '--run=/disk/run'], "--run is '/disk/run'; pods keep nothing"),
        ([*SUBMIT, '--config=none.py'], "--config is 'none.py'; the file must lie in the checkout"),
        ([*SUBMIT, '--', 'two\nlines'], 'holds a line break'),
    ],
)
def test_bad_use_is_refused_before_any_call(kubectl, arguments, message):
    assert message in kubectl.run(SCRIPT, *arguments, code=2).stderr
    assert kubectl.calls() == []
