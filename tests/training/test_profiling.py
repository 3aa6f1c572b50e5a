"""Which updates are traced, and that what is written can be read."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.config import ConfigError
from transformer_jax.training.profiling import Profile, parse_steps

# jaxlib 0.12's own reader of traces, November 2026.
pytestmark = pytest.mark.filterwarnings('ignore:builtin type event_stats has no __module__:DeprecationWarning')


def run(profile: Profile, first: int, last: int) -> None:
    """The updates `first` to `last`, as the loop does them."""
    program = jax.jit(lambda x: x @ x)
    for update in range(first, last + 1):
        if profile.is_over(update):
            profile.end()
        profile.begin(update)
        with profile.annotate(update):
            program(jnp.ones((3, 3))).block_until_ready()
    profile.end()


def read_updates(folder: Path) -> list[int]:
    """The numbers of the updates that a trace holds."""
    (file,) = folder.glob('plugins/profile/*/*.xplane.pb')  # where TensorBoard looks
    data = jax.profiler.ProfileData.from_file(str(file))
    num_events, updates = 0, []
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:  # is gone when the loop goes on
                num_events += 1
                if event.name == 'update':
                    updates += [value for name, value in event.stats if name == 'step_num']
    assert num_events > 10
    return sorted(updates)


def test_the_updates_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    said: list[str] = []
    run(Profile((4, 5), tmp_path, said.append), 2, 7)
    assert read_updates(tmp_path) == [4, 5]
    assert len(said) == 1
    assert f'tensorboard --logdir {tmp_path}' in said[0]


def test_a_run_that_ends_or_starts_inside_is_traced_as_far_as_it_goes(tmp_path: Path) -> None:
    run(Profile((2, 9), tmp_path), 4, 5)
    assert read_updates(tmp_path) == [4, 5]


def test_updates_that_were_done_before_are_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    run(Profile((2, 3), tmp_path, said.append), 4, 6)
    assert said == ['updates 2 to 3 were done before, so there is no trace of them']
    assert not list(tmp_path.iterdir())


def test_updates_that_were_not_reached_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    run(Profile((20, 25), tmp_path, said.append), 1, 3)
    assert said == ['this start ended before updates 20 to 25, so there is no trace of them']
    assert not list(tmp_path.iterdir())


def test_steps_are_read() -> None:
    assert parse_steps('7:11') == (7, 11)


@pytest.mark.parametrize('text', ['', '7', '7:', ':7', '0:3', '5:4', '-1:4', 'a:b', '1:2:3', '1.0:2'])
def test_other_steps_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match='--profile-steps is .*it must be A:B'):
        parse_steps(text)
