"""What is kept, what counts as newest and best, and what is refused."""

import concurrent.futures
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints.toy_runs import MakeRun, assert_same_bits, describe, make_params
from transformer_jax import files
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.checkpoints.entries import Entry, name_of
from transformer_jax.checkpoints.keeping import rank
from transformer_jax.checkpoints.store import Store, read_parameters, write_parameters


def tiny(step: int) -> dict:
    return {'params': {'kernel': jnp.full((3, 5), step, jnp.float32)}, 'step': jnp.int32(step)}


def load_step(store: Store, step: int | None = None) -> tuple[int, float]:
    found, state, _ = store.restore(describe(tiny(0)), step)
    assert int(state['step']) == found
    return found, float(state['params']['kernel'][2, 4])


def test_a_worsening_score_keeps_the_newest_and_the_best(make_run: MakeRun):
    run = make_run()
    for step, score in ((10, 30.0), (20, 31.0), (30, 20.0), (40, 10.0), (50, np.nan), (60, None)):
        run.store.save(step, tiny(step), {}, score=score)
        run.store.wait()
        assert run.store.latest() == step
        assert run.store.best() == min(step, 20)
        assert set(run.store.steps()) == {step, min(step, 20)}
        assert load_step(run.store) == (step, step)
        assert float(run.store.restore_params(describe(tiny(0)['params']))[0]['kernel'][0, 0]) == min(step, 20)
    assert run.store.scores() == {20: 31.0}
    assert [line for line in run.reports if 'step 50' in line and 'counts as no score' in line]


def test_lower_may_be_better_and_another_kind_of_score_is_not_compared(make_run: MakeRun):
    run = make_run(keep_newest=9, keep_best=2)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.0), (4, 2.5)):
        run.store.save(step, tiny(step), {}, score=loss, higher_is_better=False, score_name='loss')
    run.store.wait()
    assert run.store.best() == 2
    run.store.save(5, tiny(5), {}, score=1.0, score_name='bleu')
    run.store.wait()
    assert run.store.best() == 5


def test_newest_is_by_number_and_old_steps_go_only_when_their_rules_say_so(make_run: MakeRun):
    run = make_run(keep_newest=2)
    for step in (900, 1000, 10000):
        run.store.save(step, tiny(step), {})
    run.store.wait()
    assert run.store.steps() == [1000, 10000]
    run.folder.checkpoints.joinpath(name_of(1000)).rename(run.folder.checkpoints / 'step_001000')
    run.folder.checkpoints.joinpath(name_of(10000)).rename(run.folder.checkpoints / 'step_10000')
    assert run.reader().latest() == 10000
    assert load_step(run.store) == (10000, 10000)
    assert load_step(run.store, 1000) == (1000, 1000)


def test_what_was_just_saved_is_kept_even_below_an_older_step_of_a_higher_number(make_run: MakeRun):
    run = make_run(keep_newest=2)
    for step in (1000, 2000):
        run.store.save(step, tiny(step), {})
    assert load_step(run.store, 1000) == (1000, 1000)  # someone goes back by hand
    run.store.save(500, tiny(500), {})
    run.store.wait()
    assert run.store.steps() == [500, 1000, 2000]


def test_the_keep_rules_count_from_one(make_run: MakeRun):
    run = make_run(keep_newest=1, keep_best=1, average_keep=2)
    for step in range(1, 6):
        run.store.save_snapshot(step, make_params(step))
        run.store.wait()
        assert run.store.snapshots() == list(range(max(1, step - 1), step + 1))
        run.store.save(step, tiny(step), {}, score=float(step))
        run.store.wait()
        assert run.store.steps() == [step], 'the newest is also the best'


def test_nothing_is_deleted_before_the_new_one_is_visible(make_run: MakeRun, monkeypatch):
    run = make_run()
    run.store.save(1, tiny(1), {})
    run.store.wait()
    seen = []
    publish = files.publish

    def spy(unfinished, final):
        seen.append(run.reader().steps())
        publish(unfinished, final)
        seen.append(run.reader().steps())

    monkeypatch.setattr(files, 'publish', spy)
    run.store.save(2, tiny(2), {})
    run.store.wait()
    assert seen == [[1], [1, 2]]
    assert run.store.steps() == [2]


def test_saving_goes_on_in_the_background_and_a_running_save_is_not_yet_latest(make_run: MakeRun, monkeypatch):
    run = make_run()
    run.store.save(1, tiny(1), {})
    run.store.wait()
    gate = threading.Event()
    publish = files.publish

    def slow(unfinished, final):
        assert gate.wait(30)
        publish(unfinished, final)

    monkeypatch.setattr(files, 'publish', slow)
    run.store.save(2, tiny(2), {})
    assert run.store.latest() == 1
    gate.set()
    run.store.wait()
    assert run.store.latest() == 2


def test_a_failed_save_is_loud_at_the_next_call_and_the_one_after_works(make_run: MakeRun, monkeypatch):
    run = make_run()
    run.store.save(1, tiny(1), {})
    run.store.wait()

    def fail(unfinished, final):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(files, 'publish', fail)
        run.store.save(2, tiny(2), {})
        with pytest.raises(CheckpointError, match=r'saving step 2 .* No space left on device'):
            run.store.save(3, tiny(3), {})
    assert [p.name for p in run.folder.checkpoints.iterdir()] == ['step_00000001']  # what was half-written is gone
    assert load_step(run.store) == (1, 1)
    run.store.save(3, tiny(3), {})
    run.store.wait()
    assert run.store.steps() == [3]
    assert run.reports == []


def test_a_save_that_failed_can_be_asked_for_without_waiting(make_run: MakeRun, monkeypatch):
    run = make_run()
    gate, entered = threading.Event(), threading.Event()

    def fail(unfinished, final):
        entered.set()
        assert gate.wait(30)
        raise OSError(28, 'No space left on device')

    run.store.check()
    monkeypatch.setattr(files, 'publish', fail)
    run.store.save(1, tiny(1), {})
    assert entered.wait(30)
    run.store.check()  # it is still running
    gate.set()
    saving = run.store._running
    assert saving is not None
    concurrent.futures.wait([saving])
    with pytest.raises(CheckpointError, match='saving step 1 in .* failed: No space left on device. Earlier'):
        run.store.check()
    run.store.check()  # told once


def test_a_folder_that_can_not_be_made_is_a_failed_save(make_run: MakeRun):
    run = make_run()
    run.folder.checkpoints.rmtree(missing_ok=True)
    run.folder.checkpoints.write_text('in the way')
    with pytest.raises(CheckpointError, match='saving step 1 in .* failed: (File exists|Not a directory)'):
        run.store.save(1, tiny(1), {})


def test_a_score_may_come_after_its_checkpoint(make_run: MakeRun, monkeypatch):
    run = make_run()
    run.store.save(1, tiny(1), {'evaluated': 0}, score=20.0)
    run.store.save(2, tiny(2), {'evaluated': 1})
    run.store.wait()
    assert (run.store.best(), run.store.steps()) == (1, [1, 2])
    before = {
        path.name: path.read_bytes() for path in run.folder.checkpoints.glob('step_00000002/arrays/*') if path.is_file()
    }

    def die(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, 'sync_to_disk', die)
        with pytest.raises(KeyboardInterrupt):
            run.store.add_score(2, {'evaluated': 2}, score=31.0)
    assert (run.reader().scores(), run.reports) == ({1: 20.0}, [])
    assert run.store.restore(describe(tiny(0)))[2] == {'evaluated': 1}
    run.store.add_score(2, {'evaluated': 2}, score=31.0)
    assert (run.reader().scores(), run.store.best(), run.store.steps()) == ({2: 31.0}, 2, [2])  # 1 was the best
    assert run.store.restore(describe(tiny(0)))[2] == {'evaluated': 2}
    assert load_step(run.store) == (2, 2)
    after = {
        path.name: path.read_bytes() for path in run.folder.checkpoints.glob('step_00000002/arrays/*') if path.is_file()
    }
    assert after == before
    run.store.add_score(2, {'evaluated': 3}, score=float('nan'))
    assert (run.store.scores(), run.store.restore(describe(tiny(0)))[2]) == ({}, {'evaluated': 3})
    with pytest.raises(CheckpointError, match='no complete checkpoint of step 7; there are: 2'):
        run.store.add_score(7, {}, score=1.0)
    with pytest.raises(CheckpointError, match='open for reading only'):
        run.reader().add_score(2, {}, score=1.0)


def test_a_good_step_is_never_overwritten(make_run: MakeRun):
    run = make_run()
    run.store.save(4, tiny(4), {'first': True})
    with pytest.raises(CheckpointError, match='step_00000004 exists already'):
        run.store.save(4, tiny(5), {})
    assert run.store.restore(describe(tiny(0)))[2] == {'first': True}


def test_extra_must_be_json(make_run: MakeRun):
    run = make_run()
    with pytest.raises(CheckpointError, match='must be JSON'):
        run.store.save(1, tiny(1), {'position': np.int64(3)})
    assert not run.folder.checkpoints.exists() or not list(run.folder.checkpoints.iterdir())
    extra = {'best': -np.inf, 'tuple': (1, 2), 'exact': 0.1 + 0.2, 'text': 'für'}
    run.store.save(1, tiny(1), extra)
    assert run.store.restore(describe(tiny(0)))[2] == extra | {'tuple': [1, 2]}


def test_a_folder_that_is_open_for_reading_is_not_written(make_run: MakeRun):
    run = make_run()
    reader = run.reader()
    for save in (lambda: reader.save(1, tiny(1), {}), lambda: reader.save_snapshot(1, tiny(1)['params'])):
        with pytest.raises(CheckpointError, match='reading only'):
            save()
    assert reader.latest() is None
    assert reader.best() is None
    with pytest.raises(CheckpointError, match='there is no checkpoint'):
        reader.restore(describe(tiny(0)))
    with pytest.raises(CheckpointError, match='none is best'):
        reader.restore_params(describe(tiny(0)['params']), 'best')


def test_parameters_load_without_the_optimizer_by_name_number_or_path(make_run: MakeRun, tmp_path):
    run = make_run(keep_newest=3)
    abstract = describe(tiny(0)['params'])
    for step, score in ((1, 5.0), (2, 9.0), (3, 7.0)):
        state = tiny(step) | {'average': {'kernel': jnp.full((3, 5), step + 0.5)}}
        run.store.save(step, state, {}, score=score, snapshot=step == 1)
    run.store.wait()
    # Damage to the optimizer's own files is none to the parameters.
    for path in (run.folder.checkpoints / name_of(3) / 'arrays' / 'root').glob('*'):
        if path.is_file():
            path.write_bytes(b'?' * path.stat().length)
    expected = {None: 2, 'best': 2, 'latest': 3, 1: 1}
    for which, step in expected.items():
        params, info = run.store.restore_params(abstract, which)
        assert (float(params['kernel'][1, 1]), info['step']) == (step, step)
    assert float(run.store.restore_params(abstract, part='average')[0]['kernel'][1, 1]) == 2.5
    assert run.store.parts(2) == ('average', 'params', 'root')
    with pytest.raises(CheckpointError, match='no complete checkpoint of step 4; there are: 1, 2, 3'):
        run.store.restore_params(abstract, 4)
    found, _ = run.store.restore_params(abstract, run.folder.checkpoints / name_of(2), part='average')
    assert float(found['kernel'][1, 1]) == 2.5
    for path in (run.folder.snapshots / name_of(1), tmp_path / 'out'):
        if path == tmp_path / 'out':
            write_parameters(path, params, {'why': 'test'})
        found, info = run.store.restore_params(abstract, path, part='average')
        assert_same_bits(found, {'kernel': jnp.full((3, 5), 1.0)})
    assert info == {'kind': 'parameters', 'step': None, 'score': None, 'why': 'test'}
    assert_same_bits(read_parameters(tmp_path / 'out')[0], found)
    with pytest.raises(CheckpointError, match='exists already and is not overwritten'):
        write_parameters(tmp_path / 'out', params, {})


def test_a_snapshot_of_a_repeated_step_is_replaced(make_run: MakeRun):
    run = make_run()
    for value in (1, 2):
        run.store.save_snapshot(7, tiny(value)['params'])
    run.store.wait()
    assert float(run.store.restore_params(describe(tiny(0)['params']), 7)[0]['kernel'][0, 0]) == 2


def test_strange_content_is_named_once_and_never_used(make_run: MakeRun):
    run = make_run()
    run.store.save(900, tiny(900), {})
    run.store.wait()
    checkpoints = run.folder.checkpoints
    for name in (
        'step_00009999',
        'step_x',
        'latest',
        'step_00001000.writing',
        'step_00002000.deleting',
        'step_5 (copy)',
    ):
        (checkpoints / name).mkdir()
    (checkpoints / 'notes.txt').write_text('mine')
    (checkpoints / 'step_123').write_text('a file')
    (checkpoints / 'step_00009999' / 'manifest.json').write_text('{"step": 99')
    reader = run.reader()
    for _ in range(2):
        assert reader.latest() == 900
        assert reader.steps() == [900]
    for name in ('step_00009999', 'step_x', 'latest', 'step_5 (copy)', 'notes.txt', 'step_123'):
        assert len([line for line in run.reports if f'/{name} ' in line or f'/{name}/' in line]) == 1, name
    assert len(list(checkpoints.iterdir())) == 9, 'a reader touches nothing'
    run.reopen()
    assert any('removed 2 unfinished' in line for line in run.reports)
    assert load_step(run.store) == (900, 900)
    run.store.save(1000, tiny(1000), {})
    run.store.wait()
    names = {path.name for path in checkpoints.iterdir()}
    kept = {'step_00009999', 'step_x', 'latest', 'step_5 (copy)', 'notes.txt', 'step_123'}
    assert names == kept | {'step_00001000'}


def test_on_an_object_store_the_manifest_makes_a_step_visible(make_run: MakeRun, monkeypatch):
    # Object stores have no rename: the folder has its name from the start, and a step without its manifest is none.
    run = make_run()
    monkeypatch.setattr(files, 'is_local', lambda path: False)
    monkeypatch.setattr(files, 'require_store', lambda path: None)
    run.store.save(1, tiny(1), {})
    run.store.wait()
    half = run.folder.checkpoints / name_of(2)
    (half / 'params').mkdir(parents=True)
    assert run.reader().latest() == 1
    run.store.save(2, tiny(2), {}, snapshot=True)
    run.store.wait()
    assert any('removed 1 unfinished' in line for line in run.reports)
    assert load_step(run.store) == (2, 2)
    assert run.store.snapshots() == [2]
    assert [path.name for path in run.folder.checkpoints.iterdir()] == [name_of(2)]


@given(
    st.lists(st.tuples(st.none() | st.sampled_from([1.0, 2.0, 3.0]), st.booleans(), st.sampled_from('ab')), max_size=9)
)
@settings(max_examples=60, deadline=None)
def test_the_best_is_the_earliest_of_the_best_scores_of_the_newest_kind(scored):
    entries = [
        Entry(step, None, {'score': score, 'higher_is_better': higher, 'score_name': name})  # type: ignore[arg-type]
        for step, (score, higher, name) in enumerate(scored)
    ]
    ranked = rank(entries)
    having = [(step, *one) for step, one in enumerate(scored) if one[0] is not None]
    if not having:
        assert ranked == []
        return
    _, _, higher, name = having[-1]
    same = [(step, score) for step, score, *kind in having if kind == [higher, name]]
    assert {entry.step for entry in ranked} == {step for step, _ in same}
    best = (max if higher else min)(score for _, score in same)
    assert ranked[0].step == min(step for step, score in same if score == best)
