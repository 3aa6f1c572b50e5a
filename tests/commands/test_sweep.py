"""Sweeps by a program that stands in for training: every point has its row, and what is missing is done, no more."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import transformer_jax.__main__ as command_line
from transformer_jax.checkpoints.run_folder import RunFolderError
from transformer_jax.commands import sweep as command
from transformer_jax.sweeps.folder import plain

ROOT = Path(__file__).parent.parent.parent
STUB = ROOT / 'tests' / 'sweeps' / 'stub_program.py'
SCHEMES = ('none', 'sinusoidal', 'learned', 'shaw', 'rope', 't5', 'alibi')


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A sweep of eight points, its folder to be, and a stub for the program."""
    file = tmp_path / 'eight.py'
    points = ''.join(f'    yield {name!r}, {{"model.positions": {name!r}}}\n' for name in SCHEMES)
    points += '    yield "rope, wide", {"model.positions": "rope", "model.d_ff": 64}\n'
    file.write_text(f'BASE = {str(ROOT / "configs" / "copy_tiny.py")!r}\n\n\ndef points():\n{points}')
    monkeypatch.setattr(command, 'PROGRAM', (sys.executable, '-S', '-E', str(STUB), str(tmp_path)))
    return tmp_path


def sweep(workplace, *more, config=True):
    arguments = [
        'sweep',
        f'--out={workplace / "out"}',
        *([f'--config={workplace / "eight.py"}'] if config else []),
        *more,
    ]
    return command_line.main(arguments)


def set_faults(workplace, **faults):
    (workplace / 'faults.json').write_text(json.dumps({f'train {name}': fault for name, fault in faults.items()}))


def calls(workplace):
    """What was called since the last look."""
    path = workplace / 'calls'
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def table(workplace):
    with (workplace / 'out' / 'results.csv').open() as file:
        return {row['point']: row for row in csv.DictReader(file)}


def test_eight_points_give_eight_rows_also_when_two_fail_and_only_those_run_again(workplace, capsys):
    set_faults(workplace, shaw=2, t5=-9)
    assert sweep(workplace) == 1
    rows = table(workplace)
    assert list(rows) == [*SCHEMES, 'rope, wide']
    assert [name for name, row in rows.items() if row['status'] == 'failed'] == ['shaw', 't5']
    assert rows['shaw']['reason'] == 'train: exit code 2: stub: shaw can not be trained'
    assert rows['t5']['reason'] == 'train: killed by SIGKILL: stub: t5 can not be trained'
    assert rows['shaw']['score'] == ''
    assert all(rows[name]['score'] for name in SCHEMES if name not in ('shaw', 't5'))
    assert len(calls(workplace)) == 8 + 6
    captured = capsys.readouterr()
    assert '2 failed: shaw/seed-0, t5/seed-0' in captured.out
    assert '\x1b' not in captured.err

    set_faults(workplace, t5=3)
    assert sweep(workplace) == 1
    assert calls(workplace) == ['train shaw/seed-0', 'evaluate shaw/seed-0', 'train t5/seed-0']
    set_faults(workplace)
    assert sweep(workplace, config=False) == 0
    assert calls(workplace) == ['train t5/seed-0', 'evaluate t5/seed-0']
    assert sweep(workplace) == 0
    assert calls(workplace) == []
    rows = table(workplace)
    assert {row['status'] for row in rows.values()} == {'finished'}
    assert len(rows) == 8
    log = (workplace / 'out' / 't5' / 'seed-0.log').read_text()
    assert log.count('$ ') == 4
    assert log.count('can not be trained') == 2


def test_a_split_that_the_data_lack_is_refused_before_anything_is_trained(workplace, capsys):
    assert sweep(workplace, '--split=long') == 2
    assert "--split is 'long'; the data of " in capsys.readouterr().err
    assert not (workplace / 'out').exists()
    assert calls(workplace) == []


def test_the_figures_of_a_row(workplace):
    assert sweep(workplace, '--seeds=3,5', '--points=none,rope_wide', '--baseline=rope_wide') == 0
    row = table(workplace)['none']
    assert (row['status'], row['seeds'], row['seeds_finished']) == ('finished', '2', '2')
    scores = []
    for seed in (3, 5):
        (evaluation,) = (workplace / 'out' / 'none' / f'seed-{seed}' / 'evaluations').iterdir()
        lines = [(evaluation / f'test.{kind}.txt').read_text().splitlines() for kind in ('references', 'hypotheses')]
        scores.append(100 * sum(one == other for one, other in zip(*lines, strict=True)) / 40)
    assert float(row['score']) == pytest.approx(sum(scores) / 2)
    assert float(row['score_standard_deviation']) == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert float(row['score_low']) < float(row['score']) < float(row['score_high'])
    base = table(workplace)['rope, wide']
    assert float(row['difference']) == pytest.approx(float(row['score']) - float(base['score']))
    assert float(row['difference_low']) <= float(row['difference']) <= float(row['difference_high'])
    assert base['difference'] == ''
    assert (row['parameters'], row['step_seconds'], row['training_seconds']) == ('1004', '0.25', '7.5')
    assert (row['peak_host_bytes'], row['peak_device_bytes'], row['steps']) == (str(3 << 20), '', '6')
    assert row['score_name'] == 'exact match, %'
    assert row['differs'] == 'model.positions=none'
    assert table(workplace)['rope']['status'] == 'waiting'
    text = (workplace / 'out' / 'results.md').read_text()
    assert len(re.findall(r'^\| (?!point|-)', text, re.MULTILINE)) == 8


def test_a_sweep_is_put_into_the_commands_of_its_points(workplace):
    assert sweep(workplace, '--points=rope_wide', '--config.train.steps=7', '--runs', str(workplace / 'there')) == 0
    log = (workplace / 'out' / 'rope_wide' / 'seed-0.log').read_text()
    assert f'train --run={workplace}/there/rope_wide/seed-0 --config={ROOT}/configs/copy_tiny.py' in log
    assert '--config.train.steps=7 --config.model.positions=rope --config.model.d_ff=64 --config.seed=0' in log
    with pytest.raises(RunFolderError, match='the run folders of .* are in .*there, not in'):
        command.open_sweep(workplace / 'out', str(workplace / 'eight.py'), {}, runs=workplace).start(may_write=True)


def test_a_point_without_a_config_fails_alone(workplace):
    file = workplace / 'eight.py'
    file.write_text(file.read_text().replace("{'model.positions': 'shaw'}", "{'model.positoins': 'shaw'}"))
    file.write_text(file.read_text().replace('"model.positions": \'shaw\'', '"model.positoins": \'shaw\''))
    assert sweep(workplace, '--points=none,shaw') == 1
    row = table(workplace)['shaw']
    assert row['status'] == 'failed'
    assert 'there is no field config.model.positoins (did you mean model.positions' in row['reason']
    assert calls(workplace) == ['train none/seed-0', 'evaluate none/seed-0']


def test_changes_for_all_points_must_be_a_config(workplace, capsys):
    assert sweep(workplace, '--config.train.stepz=7') == 2
    assert 'did you mean train.steps' in capsys.readouterr().err
    assert not (workplace / 'out').exists()


def test_a_changed_sweep_says_which_trainings_no_longer_match(workplace, capsys):
    assert sweep(workplace, '--points=none,rope') == 0
    calls(workplace)
    run = command.open_sweep(workplace / 'out', str(workplace / 'eight.py'), {})
    for trial in run.sweep.select(['none', 'rope']):  # as trainings write them
        path = workplace / 'out' / trial.name / 'config.json'
        path.write_text(json.dumps(plain(run.sweep.resolve(trial))))
    assert sweep(workplace, '--points=none', '--config.model.d_model=32') == 2
    message = capsys.readouterr().err
    assert 'none/seed-0: config.model.d_model was 64, is 32 now' in message
    assert 'rope/seed-0: config.model.d_model was 64, is 32 now' in message
    # More steps are what a resume may do: the trainings go on and are scored anew.
    assert sweep(workplace, '--collect', '--config.train.steps=900') == 0
    assert table(workplace)['none']['reason'] == 'asked for now: config.train.steps 900 instead of 600'
    assert sweep(workplace, '--points=none', '--config.train.steps=900') == 0
    assert calls(workplace) == ['train none/seed-0', 'evaluate none/seed-0']
    assert table(workplace)['none']['status'] == 'finished'


def test_collecting_reads_and_trains_nothing(workplace, capsys):
    assert sweep(workplace, '--collect') == 2
    assert 'there is no sweep in' in capsys.readouterr().err
    assert not (workplace / 'out').exists()
    assert sweep(workplace, '--points=none') == 0
    calls(workplace)
    (workplace / 'out' / 'results.csv').unlink()
    assert sweep(workplace, '--collect', config=False) == 0
    assert calls(workplace) == []
    assert [row['status'] for row in table(workplace).values()] == ['finished', *['waiting'] * 7]


def test_another_sweep_and_a_foreign_folder_are_refused(workplace, capsys):
    assert sweep(workplace, '--points=none') == 0
    (workplace / 'other.py').write_text((workplace / 'eight.py').read_text())
    arguments = ['sweep', f'--config={workplace / "other.py"}']
    assert command_line.main([*arguments, f'--out={workplace / "out"}']) == 2
    assert "holds the sweep 'eight', not 'other'" in capsys.readouterr().err
    assert command_line.main([*arguments, f'--out={workplace}']) == 2
    assert 'is not empty and holds no sweep' in capsys.readouterr().err
    assert command_line.main(['sweep', f'--out={workplace / "new"}']) == 2
    assert 'give --config=FILE' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--points=ropey'], "there is no point 'ropey'"),
        (['--seeds=1,x'], '--seeds is'),
        (['--seeds=1,1'], r'the seeds are \[1, 1\]'),
        (['--jobs=0'], '--jobs is 0'),
        (['--baseline=nobody'], "there is no point 'nobody'"),
        (['--config.model.positions=rope'], 'is set for all points, but point'),
        (['--seeds=1', '--config.seed=2'], 'config.seed is set for all points, and --seeds too'),
    ],
)
def test_bad_use_is_refused_before_anything_is_written(workplace, capsys, more, message):
    assert sweep(workplace, *more) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (workplace / 'out').exists()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_children_and_the_next_call_goes_on(workplace, number):
    set_faults(workplace, sinusoidal='hang', learned='hang')

    def interrupt():
        while not all((workplace / f'hangs {name}').exists() for name in ('sinusoidal', 'learned')):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = sweep(workplace, '--jobs=2')
    thread.join()
    assert code == 128 + number
    assert sorted(calls(workplace)) == ['evaluate none/seed-0', 'train learned/seed-0', 'train none/seed-0',
                                        'train sinusoidal/seed-0']  # fmt: skip
    assert [row['status'] for row in table(workplace).values()] == ['finished', *['unfinished'] * 2, *['waiting'] * 5]
    assert (workplace / 'out' / 'learned' / 'seed-0.log').read_text().endswith('saved\n')
    set_faults(workplace)
    assert sweep(workplace, '--points=none,sinusoidal,learned') == 0
    assert calls(workplace)[0] == 'train sinusoidal/seed-0'


def test_two_calls_share_the_work_and_no_folder(workplace):
    set_faults(workplace, none='hang')
    out = f'--out={workplace / "out"}'
    code = (
        f'import sys; import transformer_jax.commands.sweep as s; '
        f's.PROGRAM = {command.PROGRAM!r}; '
        f'from transformer_jax.__main__ import main; sys.exit(main(sys.argv[1:]))'
    )
    arguments = [sys.executable, '-c', code, 'sweep', out, f'--config={workplace / "eight.py"}', '--points=none']
    other = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not (workplace / 'hangs none').exists():
            assert other.poll() is None
            time.sleep(0.05)
        assert sweep(workplace, '--points=none,rope') == 0
        row = table(workplace)['none']
        assert (row['status'], row['reason']) == ('running', 'by another call of this sweep')
        assert calls(workplace) == ['train none/seed-0', 'train rope/seed-0', 'evaluate rope/seed-0']
    finally:
        other.terminate()
        assert other.wait(30) == 143


def test_without_matplotlib_the_tables_are_written_and_it_is_said(workplace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert sweep(workplace, '--points=none') == 0
    assert "pip install 'transformer-jax[viz]'" in capsys.readouterr().err
    assert sorted(path.name for path in (workplace / 'out').glob('results.*')) == [
        'results.csv',
        'results.lock',
        'results.md',
    ]
    assert not list((workplace / 'out').glob('*.png'))


def test_the_plots_are_pictures(workplace):
    pytest.importorskip('matplotlib')
    assert sweep(workplace, '--points=none,rope') == 0
    for name in ('scores.png', 'costs.png'):
        assert (workplace / 'out' / name).read_bytes().startswith(b'\x89PNG')
    assert not list((workplace / 'out').glob('*.writing'))


REAL = """
BASE = {base!r}
SMALL = {{
    'model.num_encoder_layers': 1,
    'model.num_decoder_layers': 1,
    'model.d_model': 8,
    'model.d_ff': 12,
    'model.attention.num_heads': 2,
    'model.attention.head_dim': 4,
    'data.num_buckets': 1,
    'data.copying.num_train': 400,
    'data.copying.num_validation': 9,
    'data.copying.num_test': 11,
    'vocabulary.size': 44,
    'evaluation.bleu': False,
    'decoding.method': 'greedy',
    'checkpoint.every_steps': 1,
    'logging.every_steps': 1,
    'logging.tensorboard': False,
}}


def points():
    for number in range(7):
        steps = 60 if number == 2 else 3
        yield f'smoothing {{number}}', {{**SMALL, 'train.label_smoothing': number / 10, 'train.steps': steps}}
    yield 'no such kind', {{**SMALL, 'model.attention.kind': 'cubic', 'train.steps': 3}}
"""


@pytest.mark.slow
def test_eight_real_trainings_of_which_two_fail(tmp_path, monkeypatch):
    # One device, and what all points have in common is compiled once.
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'programs'))
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    names = [f'smoothing {number}' for number in range(7)]
    file = tmp_path / 'real.py'
    file.write_text(REAL.format(base=str(ROOT / 'configs' / 'copy_tiny.py')))
    arguments = ['sweep', f'--config={file}', f'--out={tmp_path / "out"}']
    killed = []

    def kill():
        owner = tmp_path / 'out' / 'smoothing_2' / 'seed-0' / 'owner.json'
        while not (owner.exists() and list(owner.parent.glob('checkpoints/*[0-9]'))):
            time.sleep(0.02)
        killed.append(json.loads(owner.read_text())['pid'])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert command_line.main(arguments) == 1
    thread.join(1)
    rows = table(tmp_path)
    assert list(rows) == [*names, 'no such kind']
    failed = {name: row['reason'] for name, row in rows.items() if row['status'] == 'failed'}
    assert list(failed) == ['smoothing 2', 'no such kind']
    assert failed['smoothing 2'].startswith('train: killed by SIGKILL')
    assert "'cubic'" in failed['no such kind']
    for number, name in enumerate(names):
        if number != 2:
            row = rows[name]
            assert row['status'] == 'finished'
            assert row['differs'] == f'train.label_smoothing={number / 10}, train.steps=3'
            assert int(row['steps']) == 3
            assert 0 < float(row['step_seconds']) < float(row['training_seconds'])
            assert int(row['peak_host_bytes']) > 50 << 20
            assert int(row['parameters']) > 0
            assert float(row['score_low']) <= float(row['score']) <= float(row['score_high'])

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'out').glob('*/seed-0.log')}
    assert command_line.main(arguments) == 1
    rows = table(tmp_path)
    assert [name for name, row in rows.items() if row['status'] == 'failed'] == ['no such kind']
    again = [path.parent.name for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert sorted(again) == ['no_such_kind', 'smoothing_2']
    log = (tmp_path / 'out' / 'smoothing_2' / 'seed-0.log').read_text()
    assert 'resumes after step' in log
    assert int(rows['smoothing 2']['steps']) == 60
