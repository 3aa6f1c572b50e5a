"""Eight devices train as one does."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.oracles import assert_close
from tests.training.toy_training import CONFIG, Toy, kill_at
from transformer_jax.config import MeshConfig
from transformer_jax.layers.dropout import dropout
from transformer_jax.parallel.mesh import DATA, make_mesh, place_batch

# Eight rows a batch, whether they are one device's or one on each of eight.
EIGHT_ROWS = {
    'data.batch_tokens': 53,
    'data.max_length': 6,
    'train.prng': 'threefry2x32',
    'train.steps': 6,
    'model.dropout_rate': 0.2,
}


@pytest.mark.slow
def test_eight_devices_give_the_loss_and_the_parameters_of_one(toy: Toy, tmp_path: Path) -> None:
    one, eight = (toy.train(tmp_path / str(n), EIGHT_ROWS, devices=n) for n in (1, 8))
    assert one.ids == eight.ids
    assert len(one.updates) == len(eight.updates) == 6
    np.testing.assert_allclose(eight.updates, one.updates, rtol=5e-6)
    states = [toy.restore(tmp_path / str(n), changes=EIGHT_ROWS)[1] for n in (1, 8)]
    for name in ('params', 'average'):
        jax.tree.map(assert_close, getattr(states[1], name), getattr(states[0], name))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(toy: Toy, tmp_path: Path) -> None:
    whole = toy.train(tmp_path / 'whole', EIGHT_ROWS, devices=8)
    first = toy.train(tmp_path / 'cut', EIGHT_ROWS, devices=8, hook=kill_at(('step', 2)))
    second = toy.train(tmp_path / 'cut', EIGHT_ROWS, devices=1)
    assert (first.error, second.error) == (None, None)
    assert first.ids + second.ids == whole.ids
    np.testing.assert_allclose(first.updates + second.updates, whole.updates, rtol=5e-6)


@pytest.mark.parametrize('prng', ['rbg', 'unsafe_rbg', 'threefry2x32'])
@pytest.mark.parametrize('rate', [0.1, 0.4])
def test_each_shard_draws_its_own_dropout_at_the_rate(prng: str, rate: float) -> None:
    mesh = make_mesh(MeshConfig())
    ones = np.ones((8 * 3, 1009), np.float32)
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x, rng: dropout(x, rate, rng))
        key, other = (jax.random.key(seed, impl=prng) for seed in (0, 1))
        placed = place_batch(ones, mesh)
        output = program(placed, key)
        assert output.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(DATA)), 2)
        again, differently = program(placed, key), program(placed, other)
    kept = np.asarray(output) != 0
    np.testing.assert_array_equal(output, again)
    assert (np.asarray(differently) != np.asarray(output)).any(axis=1).all()
    np.testing.assert_allclose(np.asarray(output)[kept], 1 / (1 - rate), rtol=1e-4)
    # Neither two rows of one shard nor two rows of different shards are dropped alike: agreement is that of chance.
    chance, spread = (1 - rate) ** 2 + rate**2, 5.5 * (0.25 / 1009) ** 0.5
    for first in range(len(kept)):
        assert kept[first].mean() == pytest.approx(1 - rate, abs=5.5 * (rate * (1 - rate) / 1009) ** 0.5)
        for second in range(first):
            assert (kept[first] == kept[second]).mean() == pytest.approx(chance, abs=spread)


@pytest.mark.slow
def test_parameters_move_at_a_small_rate_though_the_model_computes_in_bfloat16(toy: Toy, tmp_path: Path) -> None:
    changes = {
        'optimizer.schedule.name': 'constant',
        'optimizer.schedule.warmup_steps': None,
        'optimizer.schedule.peak': 1e-5,
        'train.steps': 15,
    }
    moved = {}
    before = toy.model().init(jax.random.key(CONFIG.seed, impl='threefry2x32'))
    for dtype in ('float32', 'bfloat16'):
        with_dtype = changes | {'model.compute_dtype': dtype}
        outcome = toy.train(tmp_path / dtype, with_dtype)
        assert outcome.error is None
        state = toy.restore(tmp_path / dtype, changes=with_dtype)[1]
        assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.average))} == {jnp.dtype('float32')}
        deltas = jax.tree.map(lambda new, old: np.abs(new - old), state.params, before)
        moved[dtype] = {
            jax.tree_util.keystr(path): float(delta.mean())
            for path, delta in jax.tree_util.tree_leaves_with_path(deltas)
        }
    scales = [path for path in moved['float32'] if 'scale' in path]
    assert len(scales) >= 5
    for path in scales:
        assert moved['float32'][path] > 2e-5
        assert moved['bfloat16'][path] >= 0.9 * moved['float32'][path]
