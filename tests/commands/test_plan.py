"""The verb `plan`: what it prints, what it refuses, and that its collectives are those a hand counts."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.commands.test_train import CONFIG, start
from transformer_jax.__main__ import BAD_USE, DONE, main
from transformer_jax.commands import alternatives
from transformer_jax.commands.plan import ask, parse_mesh
from transformer_jax.commands.planned_program import Answer, Question
from transformer_jax.commands.programs import Shape, StateBytes, training_flops
from transformer_jax.config import Config, ConfigError, MeshConfig
from transformer_jax.overlay import overlay
from transformer_jax.parallel.plan import Plan
from transformer_jax.parallel.targets import open_devices

ROOT = Path(__file__).parent.parent.parent
TINY = [
    f'--config={ROOT / "configs/copy_tiny.py"}',
    '--config.model.num_encoder_layers=1',
    '--config.model.num_decoder_layers=1',
    '--config.model.d_model=32',
    '--config.model.d_ff=64',
]
KEYS = (
    'parameters flops estimated_cycles kernel_cycles temporary_bytes argument_bytes collectives step_seconds '
    'model_flop_utilisation compile_seconds'
).split()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb sets what JAX has read here long ago."""
    for name in ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES'):
        monkeypatch.setenv(name, 'to be restored')


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(['plan', *TINY, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, '--json')
    assert code == DONE, err
    return json.loads(out)


def test_an_update_on_eight_devices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ['--batch', '8', '--length', '13', '--config.train.loss_block_tokens=13']
    found = plan(capsys, '--devices', 'cpu:8', '--mesh', 'data=2,fsdp=4', *arguments)
    assert set(KEYS) <= set(found)
    assert (found['devices'], found['batch'], found['fits']) == (8, 8, True)
    assert found['mesh'] == {'data': 2, 'fsdp': 4, 'model': 1, 'sequence': 1}
    size = 4 * found['parameters']
    assert found['parameter_bytes'] == pytest.approx(size / 4, rel=0.05)  # only norms lie whole on each
    assert found['optimizer_bytes'] == pytest.approx(2 * size / 4, rel=0.05)  # Adam's two moments
    batch = 2 * 3 * 8 * 13 * 4 / 8  # ids, segments and positions of both sides
    assert found['argument_bytes'] == pytest.approx(
        found['parameter_bytes'] + found['optimizer_bytes'] + batch, rel=0.01
    )
    assert found['model_flops'] == model_flops(rows=8, length=13)
    assert found['flops'] == pytest.approx(found['model_flops'] / 8, rel=0.05)
    peak, seconds = 96e9 * 8, found['step_seconds']
    assert found['model_flop_utilisation'] == pytest.approx(found['model_flops'] / (peak * seconds))
    assert found['tokens_per_second'] == pytest.approx(8 * 13 / seconds)
    assert found['estimated_cycles'] == pytest.approx(3e9 * seconds)
    # Parameters are gathered from 4 devices, forward and backward; gradients are summed over those 4, and what each
    # keeps of them over the 2 devices that hold the same.
    gathered, summed = 2 * size * 3 / 4, 2 * size * 3 / 4 + 2 * size / 4 * 1 / 2
    received = sum(one['bytes'] for one in found['collectives'].values())
    assert received == pytest.approx(gathered + summed, rel=0.1), found['collectives']
    assert found['collectives']['all-gather']['bytes'] == pytest.approx(gathered, rel=0.1)


def model_flops(*, rows: int, length: int) -> float:
    """By hand: six FLOPs a token and weight of a product, and the two products of each of the three attentions."""
    width, heads, hidden, vocabulary = 32, 4 * 16, 64, 45
    layers = (4 + 8) * width * heads + 2 * 2 * width * hidden
    return 6 * rows * length * (layers + vocabulary * width + 3 * 2 * length * heads)


def test_a_decode_step_on_the_first_devices(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, '--devices', 'cpu:8', '--mesh', 'data=2', '--decode', '--batch', '6', '--length', '11')
    assert code == DONE, err
    for words in ('decode step: 6 sentences of 11', '2 of cpu:8', 'peak memory', 'fits', 'tokens/s', 'compile time'):
        assert words in out
    assert 'optimizer state' not in out


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--topology', 'v5e:4x5'], ['v5e:4x5', '4x4', 'v5p: 2x2x1']),
        (['--topology', 'v5e:4x4', '--devices', 'cpu:8'], ['one of']),
        ([], ['--topology', '--devices']),
        (['--devices', 'cpu:8', '--mesh', 'data=16'], ['takes 16 devices', 'has 8']),
        (['--devices', 'cpu:8', '--mesh', 'rows=2'], ['rows=2', 'data, fsdp, model, sequence']),
        (['--devices', 'cpu:8', '--mesh', 'data=8', '--batch', '13'], ['--batch is 13', '8 or 16 would fit']),
        (['--devices', 'cpu:8', '--batch', '0'], ['--batch is 0']),
        (['--devices', 'cpu:8', '--length', '9999'], ['--length is 9999', 'config.model.max_length']),
        (['--devices', 'cpu:8', '--config.execution.mesh.model=3'], ['config.execution.mesh', '8 devices']),
        (['--devices', 'cpu:6', '--mesh', 'data=1,model=3', '--batch', '8'], ['not divisible', 'model']),
        (['--devices', 'cpu:8', '--config.model.no_such=3'], ['no_such']),
    ],
    ids=lambda value: ' '.join(value)[:40],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (BAD_USE, '')
    assert 'Traceback' not in err
    for word in words:
        assert word in err


def test_the_buckets_of_a_run_are_planned_largest_first(tmp_path: Path) -> None:
    config = overlay(CONFIG, {'data.num_buckets': 3, 'data.batch_tokens': 160})
    ((*_, batches, _store, _reporter, _mesh, _options),) = start(config, tmp_path / 'run')
    asked: dict[str, Any] = {'topology': None, 'devices': 'cpu:8', 'mesh': None, 'decode': False, 'report': print}
    questions = ask(config, batch=None, length=None, run=str(tmp_path / 'run'), **asked)
    shapes = [one.shape for one in questions]
    assert len(shapes) > 1
    assert set(shapes) == {Shape(one.rows, one.source_length, one.target_length) for one in batches.buckets}
    slots = [shape.rows * (shape.source_length + shape.target_length) for shape in shapes]
    assert slots == sorted(slots, reverse=True)
    (fixed,) = ask(config, batch=24, length=5, run=str(tmp_path / 'run'), **asked)
    assert fixed.shape == Shape(24, 5, 5)


def test_without_a_run_the_longest_bucket_is_planned_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {'topology': None, 'devices': 'cpu:8', 'mesh': 'fsdp=4', 'decode': False, 'run': None}
    config = overlay(CONFIG, {'data.batch_tokens': 77})
    (question,) = ask(config, batch=None, length=None, report=print, **asked)
    assert question.shape == Shape(8, 7, 7)  # 77 slots hold 11 rows of 7, and 4 shards split 8 of them
    assert '8 rows of 7 subwords' in capsys.readouterr().out


def test_a_mesh_of_the_command_line() -> None:
    assert parse_mesh('fsdp=4,model=2') == MeshConfig(data=1, fsdp=4, model=2, sequence=1)
    for wrong in ('data', 'data=2,data=2', 'data=0', 'data=two', ''):
        with pytest.raises(ConfigError, match='AXIS=WAYS'):
            parse_mesh(wrong)


def test_the_models_flops_are_those_of_the_paper() -> None:
    """Base by hand: 6 FLOPs a weight and token, and the attention products of 18 layers, forward and backward."""
    config = overlay(Config(), {'model.attention.impl': 'blockwise', 'execution.remat': 'full'})
    shape = Shape(7, 128, 128)
    layers = 6 * (4 * 512**2 + 2 * 512 * 2048) + 6 * (8 * 512**2 + 2 * 512 * 2048)
    by_hand = 6 * 7 * 128 * (layers + 37_000 * 512 + 18 * 2 * 128 * 512)
    assert training_flops(config, shape, vocab_size=37_000) == by_hand


class Compiler:
    """Stands in for the compiler: memory and time of an update by its rows, mesh and remat."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.asked: list[str] = []

    def __call__(self, question: Question) -> Answer:
        self.asked.append(alternatives.describe_question(question))
        mesh = question.make_mesh()
        remat = question.config.execution.remat
        needed = question.shape.rows * {'none': 10, 'dots': 5}.get(remat, 3)
        seconds = question.shape.rows * {'none': 1.0, 'dots': 1.2}.get(remat, 1.4) + 10 * mesh.shape['model']
        plan = Plan(seconds, 0.0, 0.0, seconds, 1.0, 1.0, needed, 0, 0, needed, {}, 1.0, (), ())
        reason = None if needed <= self.memory else 'too large'
        sizes = {axis: int(ways) for axis, ways in mesh.shape.items()}
        return Answer(question, sizes, 7, StateBytes(0, 0, 0), 1.0, plan, needed, reason)


@pytest.fixture
def question() -> Question:
    changes = {'model.d_ff': 24, 'vocabulary.size': 40, 'execution.mesh.data': 8}
    config = overlay(CONFIG, changes)
    return Question(config, open_devices('cpu:8'), Shape(64, 13, 13), decode=False, run=None)


def test_a_search_tries_meshes_then_batches_then_remat(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(memory=1300)
    monkeypatch.setattr(alternatives, 'answer', compiler)
    search = alternatives.Search(question, lambda line: None)
    search.run()
    assert compiler.asked[:2] == ['64 rows, data 8, remat none', '64 rows, fsdp 8, remat none']
    assert '64 rows, fsdp 4, model 2, remat none' in compiler.asked
    assert any('model 4' in name and 'divisible' in reason for name, reason in search.pruned)  # of two heads
    assert '256 rows, data 8, remat none' in compiler.asked  # after 128, which fits
    assert '256 rows, data 8, remat dots' in compiler.asked  # since without it that does not fit
    assert len(compiler.asked) == len(set(compiler.asked)) <= 12
    speeds = [one.tokens_per_second for one in search.ordered() if one.does_not_fit is None]
    assert speeds == sorted(speeds, reverse=True)
    lines = list(alternatives.table(search))
    assert lines[0].startswith('tokens/s')
    assert [line for line in lines if line.endswith('does not fit')] == lines[len(speeds) + 1 : len(search.answers) + 1]
    assert [line for line in lines if line.startswith('not compiled: ') and 'model 4' in line]


def test_remat_is_not_compiled_where_all_fits(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives.programs, 'training_bytes', lambda *_: StateBytes(0, 0, 0))
    compiler = Compiler(memory=10**9)
    monkeypatch.setattr(alternatives, 'answer', compiler)
    search = alternatives.Search(question, lambda line: None)
    search.run()
    assert not [name for name in compiler.asked if 'remat none' not in name]
    assert {reason for name, reason in search.pruned if 'remat none' not in name} == {
        'everything fits; this would only compute more'
    }


def test_a_search_goes_down_until_something_fits(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives.programs, 'training_bytes', lambda *_: StateBytes(0, 0, 0))
    compiler = Compiler(memory=200)
    monkeypatch.setattr(alternatives, 'answer', compiler)
    search = alternatives.Search(question, lambda line: None)
    search.run()
    assert '16 rows, data 8, remat none' in compiler.asked
    assert '8 rows, data 8, remat none' not in compiler.asked
    assert [one for one in search.ordered() if one.does_not_fit is None]


class Sizes(NamedTuple):
    """Of an encoder-decoder whose heads are together as wide as the model."""

    layers: int
    width: int
    hidden: int

    def layer_weights(self) -> int:
        return self.layers * (12 * self.width**2 + 4 * self.width * self.hidden)


def received_bytes(sizes: Sizes, *, rows: int, length: int, fsdp: int, model: int, remat: bool) -> float:
    """What a chip receives in one update with FSDP and tensor parallelism, computing in bfloat16, by hand."""
    kept, scattered = 2 * (model - 1) / model, (fsdp - 1) / fsdp
    activation = rows // fsdp * length * sizes.width * 2
    # Every layer: its weights forward and backward (or when computed again), and the sum of their gradients.
    weights = sizes.layer_weights() / model * 2 * scattered
    # The outputs of attention and feed-forward; the gradients of what query, key, value and expansion read.
    encoder, decoder = 2 + 4, 3 + 7
    again = 2 + 3 if remat else 0
    layers = sizes.layers * (encoder + decoder + again) * kept * activation
    # The table for the projection, and its gradient in float32; two looked-up texts, forward and backward; the gradient
    # of the last states.
    table = 37_000 * sizes.width / model * (2 + 4) * scattered
    ends = 4 * scattered * activation + 3 * kept * activation
    return 3 * weights + layers + table + ends


def plan_elsewhere(*arguments: str) -> dict[str, Any]:
    """What the verb prints in a process of its own: JAX reads its environment but once."""
    names = ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, '-m', 'transformer_jax', 'plan', '--json', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == DONE, done.stderr
    return json.loads(done.stdout)


needs_compiler = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
LARGE = {
    'big': ('v5e:16x16', 214_171_648, Sizes(6, 1024, 4096), {'fsdp': 64, 'model': 4}, 'none'),
    'billion': ('v5p:4x4x4', 1_485_553_664, Sizes(12, 2048, 8192), {'fsdp': 16, 'model': 4}, 'full'),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('size', LARGE)
def test_a_large_model_on_many_chips(size: str) -> None:
    topology, parameters, sizes, mesh, remat = LARGE[size]
    start = time.monotonic()
    found = plan_elsewhere(
        f'--config=configs/wmt14_en_de.py:size={size}',
        f'--topology={topology}',
        f'--mesh={",".join(f"{axis}={ways}" for axis, ways in mesh.items())}',
        '--batch=1024',
        '--length=128',
        '--config.model.compute_dtype=bfloat16',
        '--config.execution.unroll=1',
        f'--config.execution.remat={remat}',
    )
    assert time.monotonic() - start < 600
    assert found['fits']
    assert found['parameters'] == parameters
    share = 4 * parameters / (mesh['fsdp'] * mesh['model'])
    assert found['parameter_bytes'] == pytest.approx(share, rel=0.05)
    assert found['optimizer_bytes'] == pytest.approx(2 * share, rel=0.05)
    assert found['kernel_cycles'] < 0.25 * found['estimated_cycles'] < 1e10
    by_hand = received_bytes(sizes, rows=1024, length=128, **mesh, remat=remat == 'full')
    assert sum(one['bytes'] for one in found['collectives'].values()) == pytest.approx(by_hand, rel=0.1)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('mesh', ['data=1', 'data=4', 'fsdp=8'])  # a chip, the chips of one host, those of two
def test_a_mesh_on_the_first_chips_of_a_slice(mesh: str) -> None:
    found = plan_elsewhere(*TINY, '--topology=v5e:4x4', f'--mesh={mesh}', '--batch=16', '--length=24')
    assert found['devices'] == int(mesh[-1])
    assert 0 < found['kernel_cycles'] < found['estimated_cycles']
    assert found['step_seconds'] == pytest.approx(found['estimated_cycles'] / 1.5e9)
    assert bool(found['collectives']) == (mesh != 'data=1')
