"""Trees on disk: bit for bit, on any mesh, and never as something else than was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.checkpoints.toy_runs import MakeRun, assert_same_bits, describe, make_params, make_state
from transformer_jax.checkpoints import arrays
from transformer_jax.checkpoints.arrays import MismatchError, NonFiniteError
from transformer_jax.checkpoints.digests import CheckpointError

NAMES = st.text('ab/. _', min_size=1, max_size=3)
TREES = st.recursive(
    st.integers(0, 99),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=3) | st.none(),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, TREES, max_size=4))
@settings(max_examples=60, deadline=None)
def test_split_loses_no_leaf_or_says_that_two_share_a_path(tree):
    keys = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    spelled = [('/'.join(str(_name(key)) for key in path[1:]), _name(path[0])) for path in keys if len(path) > 1]
    spelled += [(_name(path[0]), 'root') for path in keys if len(path) == 1]
    if len(set(spelled)) < len(spelled):
        with pytest.raises(CheckpointError, match='two leaves'):
            arrays.split(tree)
        return
    parts = arrays.split(tree)
    assert arrays.join(tree, parts) == tree
    assert sum(len(leaves) for leaves in parts.values()) == len(keys)


def _name(key):
    return key.key if isinstance(key, jax.tree_util.DictKey) else key.idx


@pytest.mark.parametrize('generator', ['rbg', 'threefry2x32', 'unsafe_rbg'])
def test_round_trip_is_bit_for_bit(make_run: MakeRun, generator: str):
    run = make_run()
    state = make_state(7, generator=generator)
    run.store.save(7, state, {'position': [3, 5]})
    step, restored, extra = run.store.restore(describe(state))
    assert step == 7
    assert extra == {'position': [3, 5]}
    assert_same_bits(restored, state)
    assert type(restored.optimizer[1][0]) is type(state.optimizer[1][0])


def test_a_checkpoint_of_eight_devices_loads_on_four_and_one(make_run: MakeRun):
    run = make_run(keep_newest=3)
    tree = {'params': {'kernel': np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32)}}
    before = None
    for step, count in enumerate((8, 4, 1, 8), start=1):
        mesh = jax.make_mesh((count,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        specs = {8: PartitionSpec('data'), 4: PartitionSpec(None, 'data'), 1: PartitionSpec()}
        sharding = NamedSharding(mesh, specs[count])
        if before is None:
            state = jax.device_put(tree, sharding)
        else:
            target = {'params': {'kernel': jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)}}
            assert run.store.latest() == before
            _, state, _ = run.store.restore(target)
        assert state['params']['kernel'].sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(np.asarray(state['params']['kernel']), tree['params']['kernel'])
        run.store.save(step, state, {})
        run.store.wait()
        before = step


def test_donated_buffers_do_not_change_what_is_saved(make_run: MakeRun):
    run = make_run()
    draw = np.random.default_rng(2)
    state = {'params': {str(i): jnp.asarray(draw.normal(size=(512, 401)), jnp.float32) for i in range(7)}}
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 5, tree), donate_argnums=0)
    abstract = describe(state)
    jax.block_until_ready(update(describe_zeros(abstract)))  # compiled, so that the update races with the writing
    run.store.save(1, state, {})
    state = jax.block_until_ready(update(state))
    _, restored, _ = run.store.restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def describe_zeros(abstract):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


def test_other_dtype_shape_or_structure_is_refused_by_name(make_run: MakeRun):
    run = make_run()
    params = make_params(1)
    run.store.save(1, {'params': params, 'step': jnp.int32(1)}, {})
    good = describe({'params': params, 'step': jnp.int32(1)})

    def altered(**leaves):
        return good | {'params': {**good['params'], **leaves}}

    cast = altered(scale=jax.ShapeDtypeStruct((13,), jnp.float32))
    with pytest.raises(
        MismatchError, match=r'params/scale has dtype bfloat16 in the checkpoint and float32 in this run'
    ):
        run.store.restore(cast)
    longer = altered(scale=jax.ShapeDtypeStruct((17,), jnp.bfloat16))
    with pytest.raises(
        MismatchError, match=r'params/scale has shape \(13,\) in the checkpoint and \(17,\) in this run'
    ):
        run.store.restore(longer)
    more = altered(new=jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(MismatchError, match='params/new is not in the checkpoint'):
        run.store.restore(more)
    fewer = good | {'params': {name: leaf for name, leaf in good['params'].items() if name != 'scale'}}
    with pytest.raises(MismatchError, match='params/scale is in the checkpoint only'):
        run.store.restore(fewer)
    with pytest.raises(MismatchError, match='root/step is in the checkpoint only'):
        run.store.restore({'params': good['params']})
    with pytest.raises(MismatchError, match=r'params/scale has dtype bfloat16'):
        run.store.restore_params(cast['params'])
    assert run.store.restore(good)[0] == 1, 'a tree that does not fit is no damage'


def test_another_kind_of_key_is_refused(make_run: MakeRun):
    run = make_run()
    state = make_state(1, generator='rbg')
    run.store.save(1, state, {})
    with pytest.raises(MismatchError, match=r'key<rbg> in the checkpoint and key<fry>'):
        run.store.restore(describe(make_state(1, generator='threefry2x32')))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_state_that_is_not_finite_never_becomes_a_checkpoint(make_run: MakeRun, bad: float, dtype):
    run = make_run()
    good = {'params': {'kernel': jnp.ones((5, 3), dtype)}, 'step': jnp.int32(1)}
    run.store.save(1, good, {})
    run.store.wait()
    mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    poisoned = jax.device_put(jnp.ones((8, 3), dtype).at[6, 2].set(bad), NamedSharding(mesh, PartitionSpec('data')))
    with pytest.raises(NonFiniteError, match='params/kernel hold NaN or infinity'):
        run.store.save(2, good | {'params': {'kernel': poisoned}}, {})
    assert run.store.latest() == 1


def test_leaves_that_are_no_arrays_or_would_be_cast_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r'a/b is a float; a checkpoint holds arrays'):
        arrays.as_arrays(arrays.split({'a': {'b': 1.5}}))
    with pytest.raises(CheckpointError, match=r'a/b has dtype float64, which jax would cast'):
        arrays.as_arrays(arrays.split({'a': {'b': np.zeros(3)}}))
    with pytest.raises(CheckpointError, match='named children'):
        arrays.split(np.zeros(3))
    assert not list(epath.Path(tmp_path).iterdir())
