"""A run folder belongs to one run, one vocabulary and one live process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.checkpoints.run_folder import RunFolder, RunFolderError, versions
from transformer_jax.config import ConfigError

HOLD = """
import sys, time
from transformer_jax.checkpoints.run_folder import RunFolder
folder = RunFolder.start(sys.argv[1], {'seed': 0}, lambda old, new: [])
print('held', flush=True)
time.sleep(60)
"""


def compare_seed(old: dict, new: dict) -> list:
    return [('config.seed', old['seed'], new['seed'])] if old['seed'] != new['seed'] else []


def start(path: Path, **config) -> RunFolder:
    return RunFolder.start(path, {'seed': 0} | config, compare_seed)


def test_the_same_run_resumes_and_another_fixed_field_is_refused_with_both_values(tmp_path):
    path = tmp_path / 'deep' / 'run'
    with start(path, steps=3):
        assert json.loads((path / 'config.json').read_text()) == {'seed': 0, 'steps': 3}
    with start(path, steps=3):
        assert not (path / 'earlier_configs.jsonl').exists()
    with pytest.raises(RunFolderError, match=r'config.seed: 0 in the run, 7 now'):
        start(path, seed=7)
    with start(path, steps=3) as folder:  # a refused start holds no lock and has changed nothing
        assert folder.read_config() == {'seed': 0, 'steps': 3}


def test_a_free_field_may_change_and_the_old_config_is_kept(tmp_path):
    for steps in (3, 5, 8):
        with start(tmp_path, steps=steps):
            pass
    assert RunFolder.open(tmp_path).read_config() == {'seed': 0, 'steps': 8}
    lines = (tmp_path / 'earlier_configs.jsonl').read_text().splitlines()
    earlier = [json.loads(line)['config']['steps'] for line in lines]
    assert earlier == [3, 5]


def test_a_config_with_tuples_equals_itself_when_read_back(tmp_path):
    for _ in range(2):
        with start(tmp_path, window=(1, 2)):
            assert not (tmp_path / 'earlier_configs.jsonl').exists()


def test_a_folder_with_something_else_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / 'thesis.tex').write_text('mine')
    with pytest.raises(RunFolderError, match=r'is not empty and holds no run .*thesis\.tex'):
        start(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['thesis.tex']
    (tmp_path / 'file').write_text('x')
    with pytest.raises(RunFolderError, match='is a file'):
        start(tmp_path / 'file')


def test_what_a_killed_start_leaves_does_not_stop_the_next(tmp_path):
    for name in ('run.lock', 'owner.json', 'owner.json.writing', 'config.json.writing'):
        (tmp_path / name).write_text('')
    with start(tmp_path) as folder:
        assert folder.read_config() == {'seed': 0}


def test_opening_what_is_no_run_says_what_is_missing(tmp_path):
    with pytest.raises(RunFolderError, match='there is no run folder'):
        RunFolder.open(tmp_path / 'nowhere')
    (tmp_path / 'notes').mkdir()
    with pytest.raises(RunFolderError, match=r'has no config.json; it holds notes'):
        RunFolder.open(tmp_path)
    (tmp_path / 'config.json').write_text('{"seed": ')
    with pytest.raises(ConfigError, match=r'config.json could not be read'):
        RunFolder.open(tmp_path)
    with pytest.raises(RunFolderError, match='is a file'):
        RunFolder.open(tmp_path / 'config.json')


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path):
    with start(tmp_path):
        with pytest.raises(RunFolderError, match=rf'in use by another live run \(process {os.getpid()} on '):
            start(tmp_path)
        assert RunFolder.open(tmp_path).read_config() == {'seed': 0}
    start(tmp_path).close()


def test_a_live_process_keeps_the_lock_and_a_killed_one_leaves_none(tmp_path):
    holder = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == 'held\n'
        with pytest.raises(RunFolderError, match=rf'process {holder.pid} on '):
            start(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    start(tmp_path).close()


def test_another_vocabulary_is_refused_with_both_fingerprints(tmp_path):
    with start(tmp_path) as folder:
        RunFolder.open(tmp_path).check_vocabulary('aaa')  # nothing is known yet, and a reader does not decide
        folder.check_vocabulary('aaa')
        folder.check_vocabulary('aaa')
        folder.update_record(device='cpu')
    reader = RunFolder.open(tmp_path)
    with pytest.raises(RunFolderError, match=r'fingerprint aaa, but this one has bbb'):
        reader.check_vocabulary('bbb')
    reader.check_vocabulary('aaa')
    assert reader.read_record() == {'vocabulary': 'aaa', 'device': 'cpu'}
    with pytest.raises(RunFolderError, match='reading only'):
        reader.update_record(device='gpu')


def test_a_start_that_came_to_nothing_makes_room_for_another_and_one_that_did_not_stays(tmp_path):
    with start(tmp_path / 'run', seed=1) as folder:
        folder.vocabulary.mkdir()
        folder.data.mkdir()
        folder.update_record(device='cpu')
        folder.withdraw()
    assert not (tmp_path / 'run').exists()
    with start(tmp_path / 'run', seed=2) as folder:
        folder.vocabulary.mkdir()
    with start(tmp_path / 'run', seed=2) as folder:
        folder.withdraw()
    with pytest.raises(RunFolderError, match='seed: 2 in the run, 3 now'):
        start(tmp_path / 'run', seed=3)
    folder.vocabulary.rmdir()  # of a start that was killed, its config is all that is left
    with start(tmp_path / 'run', seed=2) as folder:
        folder.withdraw()
    assert list((tmp_path / 'run').iterdir()) == []
    with start(tmp_path / 'new') as folder:
        (folder.path / 'notes').write_text('mine')
        folder.withdraw()
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['notes']


def test_places_lie_inside_the_folder_and_a_relative_path_survives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start(Path('run')) as folder:
        monkeypatch.chdir('/')
        names = ('config', 'vocabulary', 'data', 'checkpoints', 'snapshots', 'metrics', 'tensorboard')
        places = [getattr(folder, name) for name in (*names, 'record', 'evaluations', 'earlier_configs')]
        assert all(place.parent == folder.path for place in places)
        assert len(set(places)) == len(places)
        assert os.fspath(folder.path) == str(tmp_path / 'run')
    assert os.fspath(RunFolder('gs://bucket/run').config) == 'gs://bucket/run/config.json'


def test_versions_name_what_shapes_the_numbers():
    assert {'python', 'jax', 'flax', 'orbax-checkpoint'} <= set(versions())


def test_another_text_is_refused_by_the_names_of_what_changed(tmp_path):
    text = {'train': {'a.en': '1', 'a.de': '2'}, 'validation': {'b.tsv': '3'}}
    with start(tmp_path) as folder:
        RunFolder.open(tmp_path).check_text({})  # nothing is known yet, and a reader does not decide
        folder.check_text(text)
        folder.check_text(text)
    with start(tmp_path) as folder:
        folder.check_text(text)
        folder.check_text(text | {'train': {'moved/a.en': '1', 'a.de': '2'}})
        for other, names in (
            (text | {'train': {'a.en': '1', 'a.de': '4'}}, r'a\.de \(train\) changed'),
            ({'train': text['train']}, r'b\.tsv \(validation\) changed'),
            (text | {'train': {'a.en': '9', 'c.de': '7'}}, r'a\.en \(train\), c\.de \(train\) changed'),
            (text | {'train': {'a.en': '1'}}, r'a\.de \(train\) changed'),
        ):
            with pytest.raises(RunFolderError, match=f'started with: {names}'):
                folder.check_text(other)
        assert folder.read_record() == {'text': text}
