"""launch/colab.ipynb: valid, without outputs, and, slowly, executed as it is on a small run."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.launch.stand_ins import ROOT

NOTEBOOK = ROOT / 'launch' / 'colab.ipynb'
CELLS = json.loads(NOTEBOOK.read_text())['cells']
CODE = [''.join(cell['source']) for cell in CELLS if cell['cell_type'] == 'code']
# Small enough for a test; the task, the commands and the cells are those of the page.
CHANGES = [
    '--config.train.steps=4',
    '--config.optimizer.schedule.warmup_steps=2',
    '--config.data.grammar.num_train=2000',
    '--config.data.grammar.num_validation=20',
    '--config.data.grammar.num_test=20',
    '--config.vocabulary.size=700',
    '--config.model.d_model=16',
    '--config.model.d_ff=32',
    '--config.data.num_buckets=1',
]
# In a process of its own: the kernel's client has warnings and threads that the tests would refuse.
_EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3').execute()
nbformat.write(notebook, sys.argv[2])
"""


def parameters():
    """The names that the parameter cell sets, and their values."""
    cells = [''.join(cell['source']) for cell in CELLS if 'parameters' in cell['metadata'].get('tags', ())]
    (cell,) = cells
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell).body}


def test_it_is_a_valid_notebook():
    nbformat = pytest.importorskip('nbformat')
    nbformat.validate(nbformat.read(NOTEBOOK, 4))


def test_it_has_no_outputs_and_every_cell_compiles():
    assert len(CODE) > 5
    for cell in CELLS:
        assert cell.get('outputs', []) == []
        assert cell.get('execution_count') is None
    for number, cell in enumerate(CODE):
        compile(cell, f'cell {number}', 'exec')


def test_it_installs_from_its_own_folder_unless_told_otherwise():
    given = parameters()
    assert given['REPOSITORY'] == ''
    assert (ROOT / given['CONFIG']).exists()
    assert given['CHANGES'] == []


def run_install_cell(folder, *programs, **changes):
    """Runs the cell that installs, in `folder`, where no package is installed and only `programs` are on the PATH.

    Returns the folder it ends in, the first place of imports, and the commands it ran; or its error.
    """
    tools = folder / 'tools'
    tools.mkdir()
    for name in programs:
        (tools / name).touch(0o755)
    program = [
        'import json, os, subprocess',
        'commands = []',
        'def run(command, check):',
        '    commands.append(command)',
        "    if command[0] == 'git':",
        '        os.makedirs(command[-1])',
        'subprocess.run = run',
        *(f'{name} = {value!r}' for name, value in (parameters() | changes).items()),
        next(cell for cell in CODE if 'find_spec' in cell),
        'print(json.dumps([os.getcwd(), sys.path[0], commands]))',
    ]
    done = subprocess.run(
        [sys.executable, '-IS', '-c', '\n'.join(program)],
        cwd=folder,
        env={'PATH': str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def pip_install(folder, extras):
    target = ['-c', f'{folder}/constraints.txt', '-e', f'{folder}[{extras}]']
    return [sys.executable, '-m', 'pip', 'install', '--quiet', *target]


@pytest.mark.parametrize('programs, extras', [((), 'viz'), (('nvidia-smi',), 'viz,gpu')])
def test_it_installs_the_checkout_that_it_lies_in(tmp_path, programs, extras):
    launch = tmp_path / 'a checkout' / 'launch'
    launch.mkdir(parents=True)
    shutil.copy(NOTEBOOK, launch)
    folder = str(launch.parent)
    assert run_install_cell(launch, *programs) == [folder, folder, [pip_install(folder, extras)]]


def test_it_installs_from_a_repository(tmp_path):
    folder = str(tmp_path / 'transformer_jax_checkout')
    commands = [['git', 'clone', '--depth=1', 'some where', folder], pip_install(folder, 'viz')]
    assert run_install_cell(tmp_path, REPOSITORY='some where') == [folder, folder, commands]


def test_it_says_when_there_is_nothing_to_install(tmp_path):
    assert 'lies in no checkout; open the notebook from its place there, or set REPOSITORY' in run_install_cell(
        tmp_path
    )


@pytest.mark.slow
def test_it_runs_from_the_first_cell_to_the_plot(tmp_path):
    pytest.importorskip('nbclient')
    pytest.importorskip('ipykernel')
    pytest.importorskip('matplotlib')
    import nbformat

    notebook = nbformat.read(NOTEBOOK, 4)
    (cell,) = (cell for cell in notebook.cells if 'parameters' in cell.metadata.get('tags', ()))
    cell.source += f'\nCHANGES = {CHANGES!r}\nRUN = {str(tmp_path / "run")!r}\n'
    nbformat.write(notebook, tmp_path / 'small.ipynb')
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'JAX_NUM_CPU_DEVICES': '1',
        'JAX_NUMPY_RANK_PROMOTION': 'allow',
    }
    command = [sys.executable, '-c', _EXECUTE, str(tmp_path / 'small.ipynb'), str(tmp_path / 'done.ipynb')]
    done = subprocess.run(
        command, cwd=ROOT / 'launch', env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in nbformat.read(tmp_path / 'done.ipynb', 4).cells if cell.cell_type == 'code']
    printed = [''.join(output.get('text', '') for output in cell.outputs) for cell in cells]
    assert any('exact match' in text for text in printed)
    assert any('image/png' in output.get('data', {}) for output in cells[-1].outputs)
    assert not any(output.output_type == 'error' for cell in cells for output in cell.outputs)
