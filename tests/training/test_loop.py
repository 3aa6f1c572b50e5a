"""The order of the loop's stages, and what it does about bad updates, evaluations, signals and runs that are done."""

import hashlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests.training.toy_training import (
    BAD_GRADIENT,
    BAD_LOSS,
    CrashError,
    Score,
    Toy,
    crash_at,
    differing,
    joined,
    kill_at,
    open_store,
    read_events,
)
from transformer_jax import files
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.shapes import Params
from transformer_jax.training.loop import TrainingError


class Scores:
    """An evaluation that gives these scores in turn, and then the last one again; an exception among them is raised."""

    def __init__(self, *scores: Any) -> None:
        self.scores, self.calls = list(scores), 0

    def __call__(self, params: Params) -> Score:
        assert np.isfinite(sum(float(leaf.sum()) for leaf in jax.tree.leaves(params)))
        score = self.scores[min(self.calls, len(self.scores) - 1)]
        self.calls += 1
        if isinstance(score, Exception):
            raise score
        return Score(score)


def describe_files(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob('*'))
        if file.is_file()
    }


# Bad updates


def test_a_bad_update_changes_nothing_and_is_told(toy: Toy, tmp_path: Path) -> None:
    good = toy.train(tmp_path / 'good', {'train.steps': 5, 'checkpoint.keep_newest': 9, 'checkpoint.every_steps': 3})
    marks = {3: BAD_LOSS, 4: BAD_GRADIENT}
    bad = toy.train(tmp_path / 'bad', {'checkpoint.every_steps': 50}, marks=marks, hook=kill_at(('step', 5)))
    assert [update[-1] for update in bad.updates] == [0, 0, 0, 1, 1]
    assert bad.updates[:3] == good.updates[:3]
    step, state, _ = toy.restore(tmp_path / 'bad')
    assert step == 3
    before = toy.restore(tmp_path / 'good', 3)[1]
    assert differing(state, before) == ['.bad_in_row', '.bad_total']
    assert (int(state.bad_in_row), int(state.bad_total)) == (2, 2)
    for index in marks:
        shown = ', '.join(map(str, bad.ids[index][:8]))
        assert f'update 4 was skipped: loss or gradient not finite (pairs {shown}, ...)' in bad.console
    # The fourth update comes with the rate it would have had.
    after = toy.train(tmp_path / 'bad', {'train.steps': 5, 'checkpoint.every_steps': 50}, marks=marks)
    assert bad.rates + after.rates == good.rates
    assert toy.restore(tmp_path / 'bad')[1].bad_total == 2


def test_figures_of_a_window_with_bad_updates_are_those_of_the_good_ones(toy: Toy, tmp_path: Path) -> None:
    outcome = toy.train(tmp_path / 'run', {'train.steps': 8}, marks={2: BAD_LOSS, 5: BAD_GRADIENT})
    events = read_events(tmp_path / 'run', 'train')
    assert [(event['step'], event['bad_steps']) for event in events] == [(4, 1), (8, 1)]
    assert all(math.isfinite(event[name]) for event in events for name in ('loss', 'nll', 'gradient_norm'))
    losses = [event['loss'] * event['target_tokens'] for event in events]
    updates = [update for update in outcome.updates if not update[-1]]
    assert losses == pytest.approx([sum(u[0] for u in updates[:4]), sum(u[0] for u in updates[4:])], rel=1e-6)


def test_the_last_updates_are_told_whatever_the_interval(toy: Toy, tmp_path: Path) -> None:
    outcome = toy.train(tmp_path / 'run', {'train.steps': 5, 'logging.every_steps': 3})
    assert [event['step'] for event in read_events(tmp_path / 'run', 'train')] == [3, 5]
    assert 'step 5/5  loss ' in outcome.console
    toy.train(tmp_path / 'run', {'train.steps': 7, 'logging.every_steps': 100})
    assert [event['step'] for event in read_events(tmp_path / 'run', 'train')] == [3, 5, 7]


def test_too_many_bad_updates_in_a_row_end_the_run_and_save_nothing(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.max_bad_steps': 2, 'checkpoint.every_steps': 2, 'logging.every_steps': 1}
    marks = {1: BAD_LOSS, 2: BAD_LOSS, 4: BAD_GRADIENT, 6: BAD_LOSS, 7: BAD_LOSS, 8: BAD_GRADIENT}
    outcome = toy.train(tmp_path / 'run', changes, marks=marks)
    assert [update[-1] for update in outcome.updates] == [0, 1, 1, 0, 1, 0, 1, 1, 1]
    assert isinstance(outcome.error, TrainingError)
    shown = ', '.join(map(str, outcome.ids[8][:8]))
    for part in ('3 updates in a row', 'max_bad_steps 2', f'pairs {shown}, ...', 'those of update 3;'):
        assert part in str(outcome.error)
    with open_store(tmp_path / 'run') as store:
        assert store.steps() == [2]
    state = toy.restore(tmp_path / 'run')[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))
    # The cause removed, the run goes on.
    assert toy.train(tmp_path / 'run', changes | {'train.steps': 5}).error is None
    assert toy.restore(tmp_path / 'run')[0] == 5


# Checkpoints


def test_each_checkpoint_is_named_by_the_updates_it_holds(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 7, 'checkpoint.every_steps': 2, 'checkpoint.keep_newest': 9, 'evaluation.every_steps': 3}
    toy.train(tmp_path / 'run', changes, marks={1: BAD_LOSS, 5: BAD_GRADIENT, 6: BAD_LOSS}, evaluate=Scores(1.0))
    with open_store(tmp_path / 'run') as store:
        steps = store.steps()
        assert list(store.scores()) == [3, 6, 7]
    assert steps == [2, 3, 4, 6, 7]
    for step in steps:
        _, state, extra = toy.restore(tmp_path / 'run', step)
        counts = optax.tree.get_all_with_path(state.optimizer, 'count')
        assert {int(count) for _, count in counts} == {step} == {int(state.step)}
        assert extra['batch_index'] == step + int(state.bad_total)
    assert int(state.bad_total) == 3


@pytest.mark.slow
def test_snapshots_follow_their_own_interval(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 9, 'checkpoint.every_steps': 2, 'checkpoint.average_every_steps': 4}
    toy.train(tmp_path / 'run', changes)
    with open_store(tmp_path / 'run') as store:
        assert store.snapshots() == [4, 8]


def test_a_run_that_goes_back_behind_a_damaged_checkpoint_says_so_in_its_figures(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 4, 'checkpoint.every_steps': 2, 'checkpoint.keep_newest': 9, 'logging.every_steps': 1}
    toy.train(tmp_path / 'run', changes)
    data = next(path for path in (tmp_path / 'run' / 'checkpoints' / 'step_00000004').rglob('d/*') if path.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)  # of the same size: only its digest tells
    again = toy.train(tmp_path / 'run', changes)
    assert (again.error, len(again.updates)) == (None, 2)
    assert 'resumes after step 2 of 4' in again.console
    assert [event['step'] for event in read_events(tmp_path / 'run', 'resume')] == [2]
    assert [event['step'] for event in read_events(tmp_path / 'run', 'train')] == [1, 2, 3, 4]
    assert all(event['steps_per_second'] < 1e6 for event in read_events(tmp_path / 'run', 'train'))


def test_a_run_that_is_killed_writes_each_step_once(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 5, 'checkpoint.every_steps': 3, 'logging.every_steps': 1}
    cut = toy.train(tmp_path / 'run', changes, hook=crash_at('step', 5))
    assert isinstance(cut.error, CrashError)
    assert [event['step'] for event in read_events(tmp_path / 'run', 'train')] == [1, 2, 3, 4]
    assert toy.restore(tmp_path / 'run')[0] == 3
    toy.train(tmp_path / 'run', changes)
    assert [event['step'] for event in read_events(tmp_path / 'run', 'train')] == [1, 2, 3, 4, 5]


def test_a_save_that_fails_ends_the_run_at_the_next_update(toy: Toy, tmp_path: Path, monkeypatch) -> None:
    changes = {'train.steps': 50, 'checkpoint.every_steps': 2}
    publish = files.publish

    def fill(unfinished, final):
        if final.name == 'step_00000004':
            raise OSError(28, 'No space left on device')
        publish(unfinished, final)

    monkeypatch.setattr(files, 'publish', fill)
    outcome = toy.train(tmp_path / 'run', changes)
    assert isinstance(outcome.error, CheckpointError)
    assert 'saving step 4 in' in str(outcome.error)
    assert 'failed: No space left on device. Earlier checkpoints are untouched' in str(outcome.error)
    assert len(outcome.updates) < 8
    assert 'failed' not in outcome.console  # the error says it, once
    assert toy.restore(tmp_path / 'run')[0] == 2


def test_rows_that_only_fill_the_vocabulary_are_no_parameters(toy: Toy, tmp_path: Path) -> None:
    counts = []
    for multiple in (1, 13):
        changes = {'model.vocab_pad_multiple': multiple, 'train.steps': 1}
        toy.train(tmp_path / str(multiple), changes, evaluate=None, hook=kill_at(('compile', 1)))
        (header,) = read_events(tmp_path / str(multiple), 'header')
        counts.append(header['parameters'])
    assert counts[0] == counts[1] > 25 * 16


# Evaluation


def test_early_stopping_keeps_the_best_and_the_newest(toy: Toy, tmp_path: Path) -> None:
    changes = {'evaluation.every_steps': 2, 'evaluation.patience': 3, 'checkpoint.every_steps': 3}
    scores = Scores(9.0, 5.0, 6.0, math.nan, 5.0, 1.0)
    outcome = toy.train(tmp_path / 'run', changes, evaluate=scores)
    assert (outcome.signal, outcome.error, scores.calls, len(outcome.updates)) == (None, None, 5, 10)
    assert 'stopped early: 3 evaluations without a better loss' in outcome.console
    with open_store(tmp_path / 'run') as store:
        assert (store.best(), store.latest(), store.steps()) == (4, 10, [4, 10])
    for step in (4, 10):
        assert int(toy.restore(tmp_path / 'run', step)[1].step) == step
    # The same command again trains no further; with more patience it does.
    again = toy.train(tmp_path / 'run', changes, evaluate=scores)
    assert (again.updates, again.error, scores.calls) == ([], None, 5)
    assert 'stopped early' in again.console
    more = toy.train(tmp_path / 'run', changes | {'evaluation.patience': 4, 'train.steps': 12}, evaluate=scores)
    assert len(more.updates) == 2
    with open_store(tmp_path / 'run') as store:
        assert (store.best(), store.latest()) == (12, 12)


def test_another_score_starts_anew(toy: Toy, tmp_path: Path) -> None:
    """A BLEU of 2 is no worse than a loss of 3: they are not compared."""
    changes = {'evaluation.every_steps': 2, 'evaluation.patience': 2, 'train.steps': 4}
    toy.train(tmp_path / 'run', changes, evaluate=Scores(3.0, 4.0))
    bleu = changes | {'evaluation.bleu': True, 'evaluation.score': 'bleu', 'train.steps': 8}
    outcome = toy.train(tmp_path / 'run', bleu, evaluate=Scores(2.0, 1.0))
    assert (outcome.error, len(outcome.updates)) == (None, 4)
    extra = toy.restore(tmp_path / 'run')[2]
    assert (extra['best_score'], extra['evaluations_without_better']) == (2.0, 1)
    with open_store(tmp_path / 'run') as store:
        assert store.best() == 6


def test_an_evaluation_that_fails_costs_nothing_that_was_saved(toy: Toy, tmp_path: Path) -> None:
    changes = {'evaluation.every_steps': 2, 'checkpoint.every_steps': 3, 'train.steps': 6}
    failed = toy.train(tmp_path / 'run', changes, evaluate=Scores(2.0, CrashError('half-way')))
    assert isinstance(failed.error, CrashError)
    with open_store(tmp_path / 'run') as store:
        assert (store.steps(), store.scores()) == ([2, 3], {2: 2.0})
    assert toy.restore(tmp_path / 'run')[0] == 3
    done = toy.train(tmp_path / 'run', changes, evaluate=Scores(1.0))
    assert (done.error, len(done.updates)) == (None, 3)
    assert [event['step'] for event in read_events(tmp_path / 'run', 'evaluation')] == [2, 4, 6]


def test_without_an_evaluation_split(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 5, 'evaluation.every_steps': 2, 'evaluation.patience': 1, 'checkpoint.every_steps': 4}
    assert toy.train(tmp_path / 'run', changes, evaluate=None).error is None
    with open_store(tmp_path / 'run') as store:
        assert (store.latest(), store.best(), store.scores()) == (5, None, {})


def test_evaluations_see_the_moving_average(toy: Toy, tmp_path: Path) -> None:
    seen = []

    def evaluate(params: Params) -> Score:
        seen.append(jax.device_get(params))
        return Score(1.0)

    toy.train(tmp_path / 'run', {'train.steps': 2}, evaluate=evaluate)
    state = toy.restore(tmp_path / 'run')[1]
    assert differing(seen[-1], state.average) == []
    assert differing(seen[-1], state.params)


# Signals


def loss_of(params: Params) -> Score:
    return Score(float(sum(abs(leaf).sum() for leaf in jax.tree.leaves(params))))


def test_a_signal_at_any_moment_loses_nothing(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 12, 'evaluation.every_steps': 3, 'checkpoint.every_steps': 2}

    def stop_in_the_middle(params: Params) -> Score:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail('an evaluation goes on after a signal')

    whole = toy.train(tmp_path / 'whole', changes, evaluate=loss_of)
    again = ('checkpoint', 1)  # first while a score is added to what was saved before, then while step 4 is saved
    moments = [('compile', 1), ('compile', 2), ('data', 2), again, again, None, ('evaluation', 1)]
    parts = []
    for moment in moments:
        evaluate, hook = (loss_of, kill_at(moment)) if moment else (stop_in_the_middle, None)
        parts.append(toy.train(tmp_path / 'cut', changes, evaluate=evaluate, hook=hook))
        assert (parts[-1].signal, parts[-1].error) == (15, None)
        saved = open_store(tmp_path / 'cut').latest() or 0
        assert saved == len(joined(parts, 'updates'))
    assert [len(part.updates) for part in parts] == [0, 1, 2, 0, 1, 2, 0]
    parts.append(toy.train(tmp_path / 'cut', changes, evaluate=loss_of))
    assert joined(parts, 'updates') == whole.updates
    found, expected = toy.restore(tmp_path / 'cut'), toy.restore(tmp_path / 'whole')
    assert differing(found[1], expected[1]) == []
    assert found[2] == expected[2]
    assert open_store(tmp_path / 'cut').scores() == open_store(tmp_path / 'whole').scores()
    events = [
        [(event['step'], event['loss']) for event in read_events(tmp_path / name, 'evaluation')]
        for name in ('cut', 'whole')
    ]
    assert events[0] == events[1]
    assert [step for step, _ in events[0]] == [3, 6, 9, 12]


def test_a_signal_in_the_last_evaluation(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 3, 'evaluation.every_steps': 2}
    scores = Scores(5.0, 4.0, 9.0)
    whole = toy.train(tmp_path / 'whole', changes, evaluate=Scores(5.0, 4.0))
    cut = toy.train(tmp_path / 'run', changes, evaluate=scores, hook=kill_at(('evaluation', 2)))
    assert (cut.signal, len(cut.updates), scores.calls) == (15, 3, 1)
    with open_store(tmp_path / 'run') as store:
        assert (store.steps(), store.scores(), store.best()) == ([2, 3], {2: 5.0}, 2)
    done = toy.train(tmp_path / 'run', changes, evaluate=scores)
    assert (done.error, done.updates, scores.calls) == (None, [], 2)
    assert 'best so far' in done.console
    assert [event['step'] for event in read_events(tmp_path / 'run', 'evaluation')] == [2, 3]
    # All is as in the run that was not cut, and the same command again evaluates no more.
    for path in (tmp_path / 'run', tmp_path / 'whole'):
        with open_store(path) as store:
            assert (store.steps(), store.scores(), store.best()) == ([3], {3: 4.0}, 3)
    assert toy.restore(tmp_path / 'run')[2] == toy.restore(tmp_path / 'whole')[2]
    assert cut.updates == whole.updates
    again = toy.train(tmp_path / 'run', changes, evaluate=scores)
    assert (again.error, scores.calls) == (None, 2)


def test_fewer_steps_than_were_done(toy: Toy, tmp_path: Path) -> None:
    toy.train(tmp_path / 'run', {'train.steps': 4}, evaluate=None)
    outcome = toy.train(tmp_path / 'run', {'train.steps': 3}, evaluate=loss_of)
    assert (outcome.error, outcome.updates) == (None, [])
    assert toy.restore(tmp_path / 'run')[0] == 4


# Runs that are done, and runs like each other


def test_a_run_that_is_done_trains_and_writes_no_further(toy: Toy, tmp_path: Path) -> None:
    changes = {'train.steps': 3, 'evaluation.every_steps': 2}
    scores = Scores(1.0, 2.0)
    toy.train(tmp_path / 'run', changes, evaluate=scores)
    before = describe_files(tmp_path / 'run' / 'checkpoints') | describe_files(tmp_path / 'run' / 'snapshots')
    again = toy.train(tmp_path / 'run', changes, evaluate=scores)
    assert (again.error, again.updates, scores.calls) == (None, [], 2)
    after = describe_files(tmp_path / 'run' / 'checkpoints') | describe_files(tmp_path / 'run' / 'snapshots')
    assert after == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(toy: Toy, tmp_path: Path) -> None:
    runs = [toy.train(tmp_path / name, {'train.steps': 3}) for name in ('one', 'other')]
    assert runs[0].updates == runs[1].updates
    assert differing(toy.restore(tmp_path / 'one')[1], toy.restore(tmp_path / 'other')[1]) == []


@pytest.mark.slow
def test_another_seed_is_another_run_from_the_first_update(toy: Toy, tmp_path: Path) -> None:
    runs = [toy.train(tmp_path / str(seed), {'train.steps': 1, 'seed': seed}) for seed in (7, 8)]
    assert runs[0].updates[0][0] != runs[1].updates[0][0]
    assert runs[0].ids != runs[1].ids


def test_one_program_serves_every_epoch(toy: Toy, tmp_path: Path) -> None:
    outcome = toy.train(tmp_path / 'run', {'train.steps': 16})
    assert len(outcome.ids) > 2 * toy.batches().batches_in_epoch()
    assert len(read_events(tmp_path / 'run', 'compile')) == 1
    # This one and those of all tests before it that take one batch an update.
    assert toy.times_traced() == 1


@pytest.mark.slow
def test_a_bucket_is_a_program(toy: Toy, tmp_path: Path) -> None:
    changes = {'data.num_buckets': 2, 'data.batch_tokens': 73, 'train.steps': 40, 'train.label_smoothing': 0.05}
    outcome = toy.train(tmp_path / 'run', changes)
    assert outcome.error is None
    assert len(read_events(tmp_path / 'run', 'compile')) == 2
    assert toy.times_traced(changes) == 2
    steps = [line for line in outcome.console.splitlines() if line.startswith(('compiled', 'step'))]
    assert [line.split()[0] for line in steps[:3]].count('compiled') == 2
