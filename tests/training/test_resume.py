"""A run that was cut goes on as if it had not been: the same bits, wherever it was cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.training.toy_training import (
    BAD_GRADIENT,
    BAD_LOSS,
    CrashError,
    Outcome,
    Toy,
    crash_at,
    differing,
    joined,
    kill_at,
    open_store,
)

STEPS = 20
# A loss and a gradient that are not finite. The second lies in the last batch of the second epoch.
MARKS = {4: BAD_LOSS, 13: BAD_GRADIENT}
BOTH = [1, pytest.param(2, marks=pytest.mark.slow)]


class Uncut(NamedTuple):
    changes: dict[str, Any]
    path: Path
    outcome: Outcome


MakeUncut = Callable[[int], Uncut]


@pytest.fixture(scope='module')
def make_uncut(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> MakeUncut:
    """The run that all others are compared with, by the number of batches an update takes."""
    made: dict[int, Uncut] = {}

    def make(accumulation: int) -> Uncut:
        if accumulation not in made:
            changes, path = {'train.accumulation': accumulation}, tmp_path_factory.mktemp('uncut') / 'run'
            made[accumulation] = Uncut(changes, path, toy.train(path, changes, marks=MARKS))
            assert made[accumulation].outcome.error is None
        return made[accumulation]

    return make


def assert_as_uncut(toy: Toy, parts: list[Outcome], cut: Path, uncut: Uncut) -> None:
    assert joined(parts, 'updates') == uncut.outcome.updates
    assert joined(parts, 'ids') == uncut.outcome.ids
    found, expected = (toy.restore(path, changes=uncut.changes) for path in (cut, uncut.path))
    assert found[0] == expected[0] == STEPS
    assert differing(found[1], expected[1]) == []
    assert found[2] == expected[2]


def count_used_batches(toy: Toy, path: Path, uncut: Uncut) -> int:
    return toy.restore(path, changes=uncut.changes)[2]['batch_index']


def test_the_uncut_run_meets_all_that_it_should(make_uncut: MakeUncut, toy: Toy) -> None:
    uncut = make_uncut(1)
    num_batches = toy.batches().batches_in_epoch()
    assert num_batches == 7
    assert [place for place, (*_, bad) in enumerate(uncut.outcome.updates) if bad] == list(MARKS)
    assert len(uncut.outcome.updates) == len(uncut.outcome.ids) == STEPS + 2 > 3 * num_batches
    _, state, extra = toy.restore(uncut.path)
    assert (int(state.step), int(state.bad_total), int(state.bad_in_row)) == (STEPS, 2, 0)
    assert extra['batch_index'] == STEPS + 2
    assert differing(state.average, state.params)


@pytest.mark.parametrize(
    ('accumulation', 'dispatched'),
    # How many updates each part of the run dispatches before it is told to stop. With 7 batches an epoch: before, at
    # and after a skipped one; at an epoch's end and start; after the first and before the last.
    [
        (1, (4, 1, 2, 1)),
        pytest.param(1, (STEPS + 1,), marks=pytest.mark.slow),
        pytest.param(2, (7, 1), marks=pytest.mark.slow),
        pytest.param(1, (1, 4, 9, 1), marks=pytest.mark.slow),
        pytest.param(2, (1, 2, 1, 1, 2, 1), marks=pytest.mark.slow),
        pytest.param(2, (STEPS + 1,), marks=pytest.mark.slow),
    ],
)
def test_cut_by_signals_is_as_uncut(
    make_uncut: MakeUncut, accumulation: int, dispatched: tuple[int, ...], toy: Toy, tmp_path: Path
) -> None:
    uncut = make_uncut(accumulation)
    parts = []
    for count in dispatched:
        part = toy.train(tmp_path / 'run', uncut.changes, marks=MARKS, hook=kill_at(('step', count)))
        assert (part.signal, len(part.updates)) == (15, count)
        parts.append(part)
        # A skipped update alone is not worth a checkpoint: the next part meets its batches again.
        if part.updates[-1][-1] and len(joined(parts, 'ids')) > count_used_batches(toy, tmp_path / 'run', uncut):
            del part.updates[-1], part.ids[-accumulation:]
    parts.append(toy.train(tmp_path / 'run', uncut.changes, marks=MARKS))
    assert (parts[-1].signal, parts[-1].error) == (None, None)
    assert_as_uncut(toy, parts, tmp_path / 'run', uncut)


@pytest.mark.parametrize('accumulation', BOTH)
def test_a_crash_goes_back_to_the_last_checkpoint(
    make_uncut: MakeUncut, accumulation: int, toy: Toy, tmp_path: Path
) -> None:
    uncut = make_uncut(accumulation)
    first = toy.train(tmp_path / 'run', uncut.changes, marks=MARKS, hook=crash_at('data', 18))
    assert isinstance(first.error, CrashError)
    assert open_store(tmp_path / 'run').latest() == 12
    second = toy.train(tmp_path / 'run', uncut.changes, marks=MARKS)
    kept = len(uncut.outcome.updates) - len(second.updates)
    assert kept == 12 + sum(bad for *_, bad in uncut.outcome.updates[:kept])
    first.updates = first.updates[:kept]
    first.ids = first.ids[: kept * accumulation]
    assert_as_uncut(toy, [first, second], tmp_path / 'run', uncut)


@pytest.mark.slow
@pytest.mark.parametrize('accumulation', [1, 2])
def test_more_steps_go_on_from_a_run_that_was_done(
    make_uncut: MakeUncut, accumulation: int, toy: Toy, tmp_path: Path
) -> None:
    uncut = make_uncut(accumulation)
    changes = [uncut.changes | {'train.steps': steps} for steps in (11, STEPS)]
    parts = [toy.train(tmp_path / 'run', change, marks=MARKS) for change in changes]
    assert_as_uncut(toy, parts, tmp_path / 'run', uncut)
