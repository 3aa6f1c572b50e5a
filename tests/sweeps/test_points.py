"""Sweep files: what they yield, what they may not, and the commands that their points become."""

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.overlay import load_config_file, overlay, parse_overrides
from transformer_jax.sweeps.points import load_sweep, spell

PAGE = 'from transformer_jax.config import Config\nfrom transformer_jax.overlay import to_config_dict\n\n\n'
PAGE += 'def get_config(arg=None):\n    config = to_config_dict(Config())\n    config.seed = int(arg or 3)\n'
PAGE += '    return config\n'


def write(folder, points, base='pages/page.py'):
    (folder / 'pages').mkdir(exist_ok=True)
    (folder / 'pages' / 'page.py').write_text(PAGE)
    (folder / 'sweeps' / 'deep').mkdir(parents=True, exist_ok=True)
    file = folder / 'sweeps' / 'deep' / 'mine.py'
    file.write_text(f'BASE = {base!r}\n\n\ndef points():\n    yield from {points!r}\n')
    return str(file)


def test_a_base_is_found_above_the_sweep_and_keeps_its_arguments(tmp_path):
    sweep = load_sweep(write(tmp_path, [('a', {})], 'pages/page.py:11'), {})
    assert sweep.base == f'{tmp_path}/pages/page.py:11'
    assert [trial.name for trial in sweep.trials()] == ['a/seed-11']


def test_the_command_of_a_point_makes_its_config(tmp_path):
    changes = {
        'model.attention.window': 5, 'optimizer.schedule.warmup_steps': 7, 'model.dropout_rate': 1e-05,
        'vocabulary.byte_fallback': False, 'model.attention.scale': None,
    }  # fmt: skip
    sweep = load_sweep(write(tmp_path, [('a b', changes), ('c', {'seed': 9})]), {'train.steps': '17'})
    trial, other = sweep.trials()
    config, *texts = sweep.arguments(trial)
    made = overlay(load_config_file(config.removeprefix('--config=')), parse_overrides(texts))
    assert made == sweep.resolve(trial)
    assert (made.model.attention.window, made.model.dropout_rate, made.train.steps, made.seed) == (5, 1e-5, 17, 3)
    assert made.model.attention.scale is None
    assert made.vocabulary.byte_fallback is False
    assert (other.seed, trial.point.folder) == (9, 'a_b')


def test_seeds_multiply_the_points(tmp_path):
    sweep = load_sweep(write(tmp_path, [('a', {}), ('b, c', {})]), {}, [2, 0])
    assert [trial.name for trial in sweep.trials()] == ['a/seed-2', 'a/seed-0', 'b_c/seed-2', 'b_c/seed-0']
    assert [trial.name for trial in sweep.select(['b_c/seed-0', 'a'])] == ['a/seed-2', 'a/seed-0', 'b_c/seed-0']
    assert [sweep.resolve(trial).seed for trial in sweep.select(['b, c'])] == [2, 0]
    assert '--config.seed=2' in sweep.arguments(sweep.trials()[0])


@pytest.mark.parametrize(
    ('points', 'base', 'message'),
    [
        ([('a b', {}), ('a_b', {})], 'pages/page.py', "'a b' and 'a_b', which would share the folder"),
        ([('A', {}), ('a', {})], 'pages/page.py', "'A' and 'a', which would share the folder"),
        ([('a', {}), ('a', {})], 'pages/page.py', "'a' and 'a', which would share the folder"),
        ([('..', {})], 'pages/page.py', 'a name needs a letter'),
        ([('a', 5)], 'pages/page.py', r"yields \('a', 5\); a point is"),
        (['a'], 'pages/page.py', "yields 'a'; a point is"),
        ([], 'pages/page.py', 'yields no points'),
        ([('a', {})], 'pages/other.py', 'lies neither in a folder above the sweep nor here'),
        ([('a', {'train.steps': 3})], 'pages/page.py', "config.train.steps is set for all points, but point 'a'"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path, points, base, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, points, base), {'train.steps': '5'})


def test_a_file_that_is_no_sweep_or_missing_is_refused(tmp_path):
    write(tmp_path, [])
    with pytest.raises(ConfigError, match='is no sweep; it must have BASE'):
        load_sweep(str(tmp_path / 'pages' / 'page.py'), {})
    with pytest.raises(ConfigError, match=r'there is no sweep .*mina.py \(did you mean mine'):
        load_sweep(str(tmp_path / 'sweeps' / 'deep' / 'mina.py'), {})


def test_values_as_the_command_line_takes_them():
    assert [spell(value) for value in (None, True, False, 3, 1e-5, 'x y')] == [
        'none',
        'true',
        'false',
        '3',
        '1e-05',
        'x y',
    ]
