"""The average is the mean, of the steps that were asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints.toy_runs import MakeRun, assert_same_bits, describe, make_params
from transformer_jax.checkpoints.average import average, average_run
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.checkpoints.store import read_parameters


@pytest.mark.parametrize('count', [1, 2, 5])
def test_the_average_is_the_mean_leaf_by_leaf(count: int):
    trees = [make_params(seed) for seed in range(count)]
    found = average(iter(trees))
    for name, bound in (('scale', 2.0**-8), ('bias.of/odd name', 1e-7)):
        expected = np.mean([np.asarray(tree[name], np.float64) for tree in trees], axis=0)
        np.testing.assert_allclose(np.asarray(found[name], np.float64), expected, rtol=bound)
    expected = np.mean([np.asarray(tree['encoder']['kernel'], np.float64) for tree in trees], axis=0)
    np.testing.assert_allclose(found['encoder']['kernel'], expected, rtol=0, atol=1e-7)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, trees[0])


def test_the_average_of_one_is_itself_and_leaves_its_input_alone():
    tree = make_params(3)
    kept = jax.tree.map(lambda x: np.array(x, copy=True), tree)
    assert_same_bits(average([tree]), tree)
    average([tree, make_params(4)])
    jax.tree.map(np.testing.assert_array_equal, tree, kept)


def test_a_leaf_shared_by_two_names_is_averaged_once_for_each():
    tables = [np.array([1, 5], np.float32), np.array([2, 9], np.float32)]
    found = average({'source': table, 'target': table} for table in tables)
    np.testing.assert_array_equal(found['source'], np.array([1.5, 7], np.float32))
    np.testing.assert_array_equal(found['target'], np.array([1.5, 7], np.float32))


def test_trees_that_have_no_mean_are_refused():
    ones = {'a': np.ones(3, np.float32)}
    with pytest.raises(ValueError, match='nothing to average'):
        average([])
    with pytest.raises(ValueError, match='differ'):
        average([ones, {'b': np.ones(3, np.float32)}])
    with pytest.raises(ValueError, match=r'a has shape \(3,\) in one tree and \(1,\) in another'):
        average([ones, {'a': np.ones(1, np.float32)}])
    with pytest.raises(ValueError, match='a has dtype int32'):
        average([{'a': np.ones(3, np.int32)}])


def test_a_run_is_averaged_over_its_last_snapshots_by_number_or_over_named_steps(make_run: MakeRun, tmp_path):
    run = make_run(average_keep=3)
    params = {step: make_params(step) for step in (5, 900, 1000, 10000)}
    for step, each in params.items():
        run.store.save(step, {'params': each, 'step': jnp.int32(step)}, {}, score=-float(step), snapshot=True)
    run.store.wait()
    assert run.store.snapshots() == [900, 1000, 10000]
    assert run.store.steps() == [5, 10000]

    assert average_run(run.folder, out=tmp_path / 'last', last=2) == [1000, 10000]
    found, info = read_parameters(tmp_path / 'last', describe(params[5]))
    assert_same_bits(found, jax.tree.map(jnp.asarray, average([params[1000], params[10000]])))
    assert info['averaged_steps'] == [1000, 10000]
    assert info['kind'] == 'parameters'

    assert average_run(run.folder.path, out=tmp_path / 'named', steps=[900, 5]) == [5, 900]
    found, info = run.store.restore_params(describe(params[5]), tmp_path / 'named')
    assert_same_bits(found, jax.tree.map(jnp.asarray, average([params[5], params[900]])))

    with pytest.raises(CheckpointError, match=r'4 snapshots are to be averaged, but there are 3: 900, 1000, 10000'):
        average_run(run.folder, out=tmp_path / 'x', last=4)
    with pytest.raises(CheckpointError, match=r'steps 7, 8; there are 5, 900, 1000, 10000'):
        average_run(run.folder, out=tmp_path / 'x', steps=[8, 7, 900])
    for last, steps in ((None, None), (1, [5]), (0, None), (None, []), (None, [5, 5])):
        with pytest.raises(ValueError, match=r'last|steps'):
            average_run(run.folder, out=tmp_path / 'x', last=last, steps=steps)
    assert not (tmp_path / 'x').exists()
    with pytest.raises(CheckpointError, match='exists already'):
        average_run(run.folder, out=tmp_path / 'last', last=1)


def test_a_relative_folder_is_one_from_here(make_run: MakeRun, tmp_path, monkeypatch):
    run = make_run()
    params = make_params(7)
    run.store.save(3, {'params': params, 'step': jnp.int32(3)}, {}, snapshot=True)
    run.store.wait()
    monkeypatch.chdir(tmp_path)
    average_run('run', last=1, out='mean')
    found, _ = read_parameters('mean', describe(params))
    assert_same_bits(found, params)
    assert (tmp_path / 'mean').is_dir()
