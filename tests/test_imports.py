"""Imports point one way, and what should be cheap to import is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_jax

ROOT = Path(transformer_jax.__file__).parent

# From the top: a package may import those on lower lines; packages on one line do not import each other.
LINES = (
    ('__main__', 'commands'),
    ('analysis', 'interop', 'checking', 'sweeps'),
    ('training', 'evaluation'),
    ('decoding',),
    ('models',),
    ('layers',),
    ('attention', 'positions'),
    ('data', 'parallel', 'checkpoints'),
    ('parameters', 'position_terms'),
    ('shapes', 'files'),
    ('recipes',),
    ('overlay',),
    ('config',),
)
HEIGHT = {name: -line for line, names in enumerate(LINES) for name in names}
# The command line is __main__ and what its longer verbs do; every package may import what the package itself names.
ALLOWED = {('__main__', 'commands')}
FILES = sorted(ROOT.rglob('*.py'))


def part_of(path):
    return path.relative_to(ROOT).with_suffix('').parts[0]


def imported_parts(path):
    """The parts of the package that a file imports, wherever in the file it does, but for type checkers alone."""
    package = ['transformer_jax', *path.relative_to(ROOT).parent.parts]
    parts = set()

    def visit(node):
        if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.dump(node.test):
            return
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split('.') if node.module else [])]
            names = ['.'.join([*base, alias.name]) for alias in node.names]
        for name in names:
            words = name.split('.')
            if words[0] == 'transformer_jax' and len(words) > 1:
                parts.add(words[1])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return parts


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    part = part_of(path)
    if part == '__init__':
        return
    for other in sorted(imported_parts(path) & HEIGHT.keys() - {part}):
        assert HEIGHT[other] < HEIGHT[part] or (part, other) in ALLOWED, f'{part} must not import {other}'


def test_every_part_of_the_package_has_its_line():
    parts = {part_of(path) for path in FILES} - {'__init__'}
    assert parts == HEIGHT.keys()


def test_the_walk_sees_every_way_to_import(tmp_path, monkeypatch):
    file = ROOT / 'layers' / 'made_up.py'
    text = (
        'import transformer_jax.models\nfrom transformer_jax import decoding\nfrom ..training import loop\n'
        'def f():\n    from transformer_jax.data.batch import Batch\n'
        'if TYPE_CHECKING:\n    from transformer_jax.evaluation import bleu\n'
    )
    monkeypatch.setattr(Path, 'read_text', lambda self: text)
    assert imported_parts(file) == {'models', 'decoding', 'training', 'data'}


@pytest.mark.parametrize(
    'code',
    [
        'import transformer_jax; transformer_jax.Config; transformer_jax.__version__',
        'import transformer_jax.overlay, transformer_jax.recipes, transformer_jax.__main__',
        'from transformer_jax.overlay import load_config_file; load_config_file("configs/quickstart.py")',
    ],
)
def test_cheap_imports_load_no_jax(code):
    heavy = ('jax', 'flax', 'orbax', 'grain', 'tensorflow_datasets', 'tensorflow', 'sacrebleu')
    check = f'import sys; {code}; print([name for name in {heavy!r} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', check], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == '[]', done.stdout


@pytest.mark.parametrize(
    'verb',
    [[], ['train'], ['evaluate'], ['translate'], ['generate'], ['average'], ['show'], ['sweep'], ['plan']],
    ids=str,
)
def test_help_loads_no_jax(verb):
    command = [sys.executable, '-X', 'importtime', '-m', 'transformer_jax', *verb, '--help']
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert 'exit codes' in done.stdout
    loaded = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'argparse' in loaded
    assert not loaded & {'jax', 'flax', 'numpy', 'etils'}


def test_the_package_has_only_the_names_it_says():
    assert {'Config', 'ConfigError', 'Translator', '__version__'} <= set(dir(transformer_jax))
    with pytest.raises(AttributeError, match='Translater'):
        _ = transformer_jax.Translater  # pyright: ignore[reportAttributeAccessIssue]
