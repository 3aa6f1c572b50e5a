"""Every shell script: shellcheck's judgement, and nothing in it that belongs to one user, cluster or server."""

import re
import shutil
import subprocess

import pytest

from tests.launch.stand_ins import ROOT

SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / 'launch').iterdir(), *(ROOT / '.ci').iterdir()]
    if path.suffix in ('.sh', '.sbatch') or path.name == 'run'
)


def test_shellcheck_passes():
    if shutil.which('shellcheck') is None:
        pytest.skip('shellcheck is not installed')
    assert 'launch/tpu_vm.sh' in SCRIPTS
    result = subprocess.run(
        ['shellcheck', '--external-sources', *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize('name', [*SCRIPTS, 'launch/gke.yaml', 'launch/colab.ipynb'])
def test_no_address_is_written_down(name):
    text = (ROOT / name).read_text()
    assert not re.findall(r'(?:https?|ssh|git)://[^\s"\']+|[\w.-]+\.(?:com|org|io|dev|net)/[\w-]+/', text), name


@pytest.mark.parametrize('name', SCRIPTS)
def test_scripts_that_are_run_can_be_run(name):
    path = ROOT / name
    sourced = path.read_text().startswith('# shellcheck shell=bash')
    assert bool(path.stat().st_mode & 0o111) != sourced
