"""Every file of a checkpoint matters: whatever happens to one, it is noticed before use."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.test_store import load_step, tiny
from tests.checkpoints.toy_runs import MakeRun, assert_same_bits, describe, make_params, make_state
from transformer_jax.checkpoints import digests
from transformer_jax.checkpoints.digests import CheckpointError, DamagedError
from transformer_jax.checkpoints.entries import name_of
from transformer_jax.checkpoints.store import read_parameters, write_parameters


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = np.random.default_rng(len(content)).integers(len(content))
    content[place] ^= 1
    path.write_bytes(bytes(content))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'\0')


def flip_data(folder: Path) -> None:
    """Alters one bit of the largest file that is no manifest."""
    flip(max(list_files(folder / 'arrays'), key=lambda path: path.stat().st_size))


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob('*') if path.is_file())


def test_each_file_damaged_in_turn_is_noticed_and_the_step_before_is_loaded(make_run: MakeRun):
    run = make_run(keep_newest=2)
    old, new = make_state(1), make_state(2)
    run.store.save(1, old, {'which': 'old'})
    run.store.save(2, new, {'which': 'new'})
    run.store.wait()
    newest = Path(run.folder.checkpoints / name_of(2))
    backup = newest.parent.parent / 'backup'
    shutil.copytree(newest, backup)
    names = [path.relative_to(newest) for path in list_files(newest)]
    assert len(names) > 10
    for name in names:
        for damage in (truncate, flip, grow, Path.unlink):
            if damage in (truncate, flip) and not (newest / name).stat().st_size:
                continue
            damage(newest / name)
            run.reports.clear()
            step, state, extra = run.reader().restore(describe(old))
            assert (step, extra) == (1, {'which': 'old'}), (name, damage)
            assert_same_bits(state, old)
            assert any(newest.name in line for line in run.reports), 'never silently'
            shutil.copy(backup / name, newest / name)
    assert run.reader().restore(describe(old))[0] == 2


def test_the_writer_moves_a_damaged_step_aside_and_reaches_its_number_again(make_run: MakeRun):
    run = make_run(keep_newest=2)
    for step in (1, 2):
        run.store.save(step, tiny(step), {})
    run.store.wait()
    flip_data(Path(run.folder.checkpoints / name_of(2)))
    assert load_step(run.store) == (1, 1)
    assert any('went back to step 1' in line for line in run.reports)
    assert run.store.steps() == [1]
    assert (run.folder.checkpoints / 'step_00000002.damaged').exists()
    run.store.save(2, tiny(2), {})
    assert load_step(run.store) == (2, 2)


def test_a_damaged_step_that_was_never_loaded_makes_room_too(make_run: MakeRun):
    run = make_run(keep_newest=2)
    for step in (1, 2):
        run.store.save(step, tiny(step), {})
    run.store.wait()
    (run.folder.checkpoints / name_of(2) / digests.MANIFEST).unlink()
    run.store.save(2, tiny(2), {})
    assert load_step(run.store) == (2, 2)
    assert (run.folder.checkpoints / 'step_00000002.damaged').exists()


def test_when_no_checkpoint_is_good_the_run_does_not_start_afresh(make_run: MakeRun):
    run = make_run()
    run.store.save(3, tiny(3), {})
    run.store.wait()
    newest = Path(run.folder.checkpoints / name_of(3))
    flip_data(newest)
    with pytest.raises(DamagedError, match=r'no good checkpoint is left:\n.*step_00000003 is damaged'):
        run.store.restore(describe(tiny(0)))
    assert newest.exists(), 'nothing is moved when there is nothing else'
    (newest / digests.MANIFEST).unlink()
    for call in (run.store.latest, lambda: run.store.restore(describe(tiny(0)))):
        with pytest.raises(DamagedError, match='none of the checkpoints .* is complete: step_00000003'):
            call()


def test_when_no_checkpoint_is_good_the_parameters_that_are_kept_are_named(make_run: MakeRun):
    run = make_run()
    for step in (2, 3):
        run.store.save(step, tiny(step), {}, snapshot=True)
    run.store.wait()
    flip_data(Path(run.folder.checkpoints / name_of(3)))
    snapshot = Path(run.folder.snapshots / name_of(3))
    with pytest.raises(DamagedError, match=f'parameters alone are kept in {snapshot}, which --checkpoint takes'):
        run.store.restore(describe(tiny(0)))
    (run.folder.checkpoints / name_of(3) / digests.MANIFEST).unlink()
    with pytest.raises(DamagedError, match=f'parameters alone are kept in {snapshot}, which --checkpoint takes'):
        run.store.latest()


def test_a_step_with_a_short_or_missing_file_does_not_count(make_run: MakeRun):
    run = make_run(keep_newest=3)
    for step in (1, 2, 3):
        run.store.save(step, tiny(step), {}, score=float(step))
    run.store.wait()
    truncate(list_files(Path(run.folder.checkpoints / name_of(3) / 'arrays'))[0])
    list_files(Path(run.folder.checkpoints / name_of(2) / 'arrays'))[-1].unlink()
    reader = run.reader()
    assert (reader.steps(), reader.latest(), reader.best()) == ([1], 1, 1)
    assert [name for name in (name_of(2), name_of(3)) if any(name in line for line in run.reports)]


def test_a_named_step_that_is_damaged_is_not_replaced_by_another(make_run: MakeRun):
    run = make_run(keep_newest=2)
    for step in (1, 2):
        run.store.save(step, tiny(step), {}, score=float(step))
    run.store.wait()
    of_params = list_files(Path(run.folder.checkpoints / name_of(2) / 'arrays' / 'params'))
    flip(max(of_params, key=lambda path: path.stat().st_size))
    reader = run.reader()
    with pytest.raises(DamagedError, match='step_00000002 is damaged'):
        reader.restore(describe(tiny(0)), 2)
    with pytest.raises(DamagedError, match='step_00000002 is damaged'):
        reader.restore_params(describe(tiny(0)['params']), 2)
    params, info = reader.restore_params(describe(tiny(0)['params']), 'best')
    assert info['step'] == params['kernel'][0, 0] == 1
    assert any('went back to step 1' in line for line in run.reports)


def test_a_checkpoint_renamed_to_another_step_is_not_used(make_run: MakeRun):
    run = make_run()
    run.store.save(3, tiny(3), {})
    run.store.wait()
    shutil.copytree(run.folder.checkpoints / name_of(3), run.folder.checkpoints / name_of(8))
    assert run.store.latest() == 3
    assert any('its manifest says step 3' in line for line in run.reports)


def test_damaged_parameters_are_refused_and_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    params = make_params(5)
    write_parameters(tmp_path / 'good', params, {})
    flip_data(tmp_path / 'good')
    with pytest.raises(DamagedError, match='sha256 differs'):
        read_parameters(tmp_path / 'good', describe(params))
    with pytest.raises(DamagedError, match=r'it has no manifest\.json'):
        read_parameters(tmp_path / 'nothing', describe(params))

    def fail(folder, content):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(digests, 'write_manifest', fail)
    with pytest.raises(CheckpointError, match='No space left on device'):
        write_parameters(tmp_path / 'out', params, {})
    assert [path.name for path in tmp_path.iterdir()] == ['good']
