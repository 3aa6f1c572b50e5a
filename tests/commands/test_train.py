"""The verb `train`: what it refuses and what it leaves as it was, and a process that is told to stop."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.commands import train as command
from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import config_from_dict, overlay

ROOT = Path(__file__).parent.parent.parent
CHANGES: dict[str, Any] = {
    'data.source': 'copying',
    'data.copying.num_symbols': 10,
    'data.copying.max_length': 5,
    'data.copying.num_train': 83,
    'data.copying.num_validation': 7,
    'data.copying.num_test': 5,
    'data.max_length': 7,
    'data.batch_tokens': 77,
    'data.num_buckets': 1,
    'vocabulary.size': 25,
    'vocabulary.byte_fallback': False,
    'model.d_model': 16,
    'model.d_ff': 23,
    'model.num_encoder_layers': 1,
    'model.num_decoder_layers': 1,
    'model.max_length': 17,
    'model.attention.num_heads': 2,
    'model.attention.head_dim': 5,
    'train.steps': 20,
    'evaluation.bleu': False,
    'evaluation.score': 'loss',
    'execution.unroll': 1,
    'logging.tensorboard': False,
}
CONFIG = overlay(Config(), CHANGES)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was started: all is made but the first update."""
    path = tmp_path_factory.mktemp('runs') / 'run'
    start(CONFIG, path)
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / 'run')
    return tmp_path / 'run'


def start(config: Config, path: Path) -> list[Any]:
    """Runs the verb up to the training loop; the loop's arguments, if it comes so far."""
    reached = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, 'train', lambda *arguments, **options: reached.append((*arguments, options)))
        command.train_run(config, path)
    return reached


def describe_files(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob('*'))
        if file.is_file() and file.name != 'run.lock'
    }


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('seed', 3, 'config.seed: 0 in the run, 3 now'),
        ('model.d_ff', 29, 'config.model.d_ff: 23 in the run, 29 now'),
        ('optimizer.beta2', 0.99, 'config.optimizer.beta2: 0.98 in the run, 0.99 now'),
        ('train.accumulation', 2, 'config.train.accumulation: 1 in the run, 2 now'),
        ('data.batch_tokens', 99, 'config.data.batch_tokens: 77 in the run, 99 now'),
        ('data.copying.task', 'reverse', "config.data.copying.task: 'copy' in the run, 'reverse' now"),
        ('vocabulary.size', 24, 'config.vocabulary.size: 25 in the run, 24 now'),
    ],
)
def test_another_fixed_field_is_refused_and_changes_nothing(copied: Path, field: str, value: Any, message: str) -> None:
    before = describe_files(copied)
    with pytest.raises(ConfigError) as refused:
        start(overlay(CONFIG, {field: value, 'train.steps': 99}), copied)
    assert message in str(refused.value)
    assert 'train.steps' not in str(refused.value)
    assert describe_files(copied) == before


def test_another_vocabulary_is_refused_and_changes_nothing(copied: Path, tmp_path: Path) -> None:
    other = overlay(CONFIG, {'data.copying.num_symbols': 9, 'vocabulary.size': 23})
    start(other, tmp_path / 'other')
    known = json.loads((copied / 'record.json').read_text())['vocabulary']
    theirs = json.loads((tmp_path / 'other' / 'record.json').read_text())['vocabulary']
    assert known != theirs
    shutil.rmtree(copied / 'vocabulary')
    shutil.copytree(tmp_path / 'other' / 'vocabulary', copied / 'vocabulary')
    before = describe_files(copied)
    with pytest.raises(ConfigError, match='25.*23'):  # of another size
        start(CONFIG, copied)
    assert describe_files(copied) == before


def test_another_vocabulary_of_the_same_size_is_refused_and_changes_nothing(copied: Path, tmp_path: Path) -> None:
    start(overlay(CONFIG, {'data.copying.num_train': 40, 'seed': 5}), tmp_path / 'other')
    known = json.loads((copied / 'record.json').read_text())['vocabulary']
    theirs = json.loads((tmp_path / 'other' / 'record.json').read_text())['vocabulary']
    assert known != theirs
    shutil.rmtree(copied / 'vocabulary')
    shutil.copytree(tmp_path / 'other' / 'vocabulary', copied / 'vocabulary')
    before = describe_files(copied)
    with pytest.raises(ConfigError) as refused:
        start(CONFIG, copied)
    assert known in str(refused.value)
    assert theirs in str(refused.value)
    assert describe_files(copied) == before


def test_free_fields_may_change_and_the_old_ones_are_kept(copied: Path) -> None:
    before = describe_files(copied)
    changes = {'train.steps': 31, 'evaluation.every_steps': 5, 'checkpoint.keep_best': 3, 'execution.unroll': None}
    reached = start(overlay(CONFIG, changes), copied)
    assert len(reached) == 1
    assert config_from_dict(json.loads((copied / 'config.json').read_text())) == overlay(CONFIG, changes)
    earlier = [json.loads(line) for line in (copied / 'earlier_configs.jsonl').read_text().splitlines()]
    assert [config_from_dict(entry['config']) for entry in earlier] == [CONFIG]
    for name, digest in before.items():
        if not name.endswith(('config.json', 'record.json', 'metrics.jsonl')):
            assert describe_files(copied)[name] == digest


def test_a_config_that_can_not_run_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='config.data.source'):
        start(overlay(CONFIG, {'data.source': 'nowhere'}), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


WORDS = ('eins', 'zwei', 'drei', 'vier', 'Haus', 'Hund', 'Katze')


def write_text(folder: Path) -> Config:
    """A run on three pairs of small files, of different lengths."""
    changes: dict[str, Any] = {'data.source': 'text_files', 'vocabulary.size': 40}
    for number, (split, num_lines) in enumerate({'train': 61, 'validation': 7, 'test': 5}.items()):
        for side, shift in (('source', 0), ('target', 3)):
            lines = [
                ' '.join(WORDS[(i * i + shift + number + j) % 7] for j in range(2 + i % 2)) for i in range(num_lines)
            ]
            path = folder / f'{split}.{side}'
            path.write_text('\n'.join(lines) + '\n')
            changes[f'data.text_files.{split}_{side}'] = str(path)
    return overlay(CONFIG, changes | {'data.max_length': 17, 'data.batch_tokens': 170})


def test_changed_or_missing_training_text_is_refused_by_name_and_test_text_may_change(tmp_path: Path) -> None:
    config, run = write_text(tmp_path), tmp_path / 'run'
    assert len(start(config, run)) == 1
    assert len(start(config, run)) == 1
    before = describe_files(run)
    for name in ('train.source', 'train.target', 'validation.target'):
        path = tmp_path / name
        content = path.read_text()
        path.write_text(content.replace('eins', 'acht', 1))
        assert path.read_text() != content
        with pytest.raises(ConfigError) as refused:
            start(config, run)
        split = name.partition('.')[0]
        assert f'no longer what the run was started with: {path} ({split}) changed' in str(refused.value)
        path.unlink()
        with pytest.raises(ValueError, match=f'{path} can not be read: No such file or directory'):
            start(config, run)
        path.write_text(content)
    assert describe_files(run) == before
    (tmp_path / 'test.source').write_text('fünf\n' * 5)
    assert len(start(config, run)) == 1


def test_files_may_move_between_two_starts_and_their_content_may_not_change(tmp_path: Path) -> None:
    config, run = write_text(tmp_path), tmp_path / 'run'
    start(config, run)
    (tmp_path / 'elsewhere').mkdir()
    moved = write_text(tmp_path / 'elsewhere')
    assert len(start(moved, run)) == 1
    assert str(tmp_path / 'elsewhere') in (run / 'config.json').read_text()
    before = describe_files(run)
    swapped = {'data.text_files.train_source': moved.data.text_files.train_target}
    swapped['data.text_files.train_target'] = moved.data.text_files.train_source
    with pytest.raises(
        ConfigError, match=r'elsewhere/train.target \(train\), .*elsewhere/train.source \(train\) changed'
    ):
        start(overlay(moved, swapped), run)
    assert describe_files(run)['record.json'] == before['record.json']


def test_a_run_from_before_texts_were_recorded_records_them(tmp_path: Path) -> None:
    config, run = write_text(tmp_path), tmp_path / 'run'
    start(config, run)
    record = json.loads((run / 'record.json').read_text())
    assert sorted(record['text']['train']) == [str(tmp_path / 'train.source'), str(tmp_path / 'train.target')]
    (run / 'record.json').write_text(json.dumps({name: record[name] for name in record if name != 'text'}))
    assert len(start(config, run)) == 1
    assert json.loads((run / 'record.json').read_text())['text'] == record['text']


@pytest.mark.parametrize('split', ['train', 'validation', 'test'])
def test_bad_files_of_any_split_are_found_before_a_run_is_made_of_the_others(tmp_path: Path, split: str) -> None:
    config, run = write_text(tmp_path), tmp_path / 'run'
    source, target = (tmp_path / f'{split}.{side}' for side in ('source', 'target'))
    num_lines = len(source.read_text().splitlines())
    content = target.read_bytes()
    faults = {
        b'': f'{target} is empty',
        content + b'mehr\n': f'{source} has {num_lines} lines but {target} has {num_lines + 1} lines',
        content[:2] + b'\xff' + content[2:]: f'{target} line 1: not UTF-8 at byte 2',
    }
    for fault, message in faults.items():
        target.write_bytes(fault)
        with pytest.raises(ValueError, match=message):
            start(config, run)
        assert not run.exists()
    target.unlink()
    run.mkdir()
    with pytest.raises(ValueError, match=f'{target} can not be read: No such file'):
        start(config, run)
    assert list(run.iterdir()) == []  # the folder was here before
    target.write_bytes(content)
    assert len(start(config, run)) == 1


def test_a_start_that_found_no_pair_to_train_on_leaves_the_folder_to_another_config(tmp_path: Path) -> None:
    config, run = write_text(tmp_path), tmp_path / 'run'
    with pytest.raises(ConfigError, match='no training pair is within config.data.max_length 2'):
        start(overlay(config, {'data.max_length': 2, 'data.batch_tokens': 99}), run)
    assert not run.exists()
    assert len(start(config, run)) == 1
    before = describe_files(run)
    with pytest.raises(ConfigError, match='config.data.max_length'):
        start(overlay(config, {'data.max_length': 2}), run)
    assert describe_files(run) == before


@pytest.mark.parametrize(('size', 'name'), [(40, 'owner.json'), (2_000, 'config.json'), (100_000, 'vocabulary')])
def test_a_start_that_met_a_full_disk_says_where_and_goes_on_when_there_is_room(
    tmp_path: Path, files_no_longer_than: Any, size: int, name: str
) -> None:
    run = tmp_path / 'run'
    with files_no_longer_than(size), pytest.raises(OSError, match=f'File too large.*{run / name}'):
        start(CONFIG, run)
    assert len(start(CONFIG, run)) == 1


def write_config(path: Path) -> Path:
    lines = ''.join(f'    config.{name} = {value!r}\n' for name, value in CHANGES.items())
    path.write_text(
        'from transformer_jax.config import Config\n'
        'from transformer_jax.overlay import to_config_dict\n\n\n'
        f'def get_config(arg=None):\n    config = to_config_dict(Config())\n{lines}    return config\n'
    )
    return path


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_saves_and_goes_on_later(tmp_path: Path) -> None:
    run, config = tmp_path / 'run', write_config(tmp_path / 'page.py')
    options = ['--config.logging.every_steps=1', '--config.checkpoint.every_steps=1000000']
    program = [sys.executable, '-m', 'transformer_jax', 'train', f'--config={config}', '--run', str(run), *options]
    environment = os.environ | {'JAX_NUM_CPU_DEVICES': '2'}
    process = subprocess.Popen(
        [*program, '--config.train.steps=1000000'], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    end = time.monotonic() + 120
    for line in process.stderr:
        if line.startswith('step 5/'):
            break
        assert time.monotonic() < end, line
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 143, rest
    assert time.monotonic() - told < 30
    events = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    last = max(event['step'] for event in events if event['event'] == 'train')
    with Store(RunFolder.open(run), CONFIG.checkpoint, report=pytest.fail) as store:
        saved = store.latest() or 0
    assert 5 <= last <= saved <= last + 1
    steps = f'--config.train.steps={saved + 2}'
    done = subprocess.run([*program, steps], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'resumes after step {saved:,} of {saved + 2:,}' in done.stderr
    assert f'step {saved + 1:,}/' in done.stderr
    assert 'validation after step' in done.stderr


def test_other_batches_than_the_run_had_are_said(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(CONFIG, copied)
    assert 'the batches are not those' not in capsys.readouterr().err
    record = json.loads((copied / 'record.json').read_text())
    record['buckets'][0]['rows'] += 4  # as fewer devices would have had it
    (copied / 'record.json').write_text(json.dumps(record))
    start(CONFIG, copied)
    assert 'the batches are not those that the run had so far' in capsys.readouterr().err
