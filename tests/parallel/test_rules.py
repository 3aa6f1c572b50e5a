"""Shardings from logical axes, and the errors that name what does not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from transformer_jax.config import MeshConfig
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import activation_spec, constrain, sharding_tree

AXES: dict[str, Any] = {
    'attention': {'kernel': ('layers', 'embed', 'heads', 'head_dim'), 'bias': ('layers', None)},
    'table': ('vocab', 'embed'),
}
SHAPES: dict[str, Any] = {'attention': {'kernel': (3, 10, 4, 5), 'bias': (3, 7)}, 'table': (12, 10)}
SPLIT = {'vocab': 'model', 'heads': 'model', 'embed': 'fsdp', 'layers': None, 'head_dim': None}


def make_shapes(**changes: Any) -> Any:
    sizes = SHAPES | changes
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), sizes, is_leaf=lambda s: isinstance(s, tuple))


def make_wide_mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ('fsdp', 'model'), axis_types=(AxisType.Auto,) * 2)


def test_with_a_data_axis_alone_every_parameter_is_whole() -> None:
    mesh = make_mesh(MeshConfig())
    shardings = sharding_tree(AXES, make_shapes(), mesh)
    for sharding in jax.tree.leaves(shardings):
        assert sharding.mesh == mesh
        assert sharding.is_fully_replicated


def test_rules_split_each_axis_as_the_table_says() -> None:
    shardings = sharding_tree(AXES, make_shapes(), make_wide_mesh(), SPLIT)
    assert jax.tree.map(lambda s: s.spec, shardings) == {
        'attention': {'kernel': PartitionSpec(None, 'fsdp', 'model', None), 'bias': PartitionSpec(None, None)},
        'table': PartitionSpec('model', 'fsdp'),
    }
    table = jax.device_put(jnp.zeros((12, 10)), shardings['table'])
    assert {shard.data.shape for shard in table.addressable_shards} == {(3, 5)}


def test_an_indivisible_size_names_parameter_axis_size_and_what_fits() -> None:
    message = (
        r"parameter table: axis 'vocab' of size 17 is not divisible by the 4 ways of mesh axis 'model'; "
        r'a size of 16 or 20 would fit, and so would config\.execution\.mesh\.model=1'
        r'; config\.model\.vocab_pad_multiple=4 would pad it to 20'
    )
    with pytest.raises(ValueError, match=message):
        sharding_tree(AXES, make_shapes(table=(17, 10)), make_wide_mesh(), SPLIT)


def test_a_mesh_axis_can_not_split_a_parameter_twice() -> None:
    with pytest.raises(ValueError, match="parameter table: mesh axis 'model' would split both 'vocab' and 'embed'"):
        sharding_tree(
            {'table': AXES['table']}, {'table': make_shapes()['table']}, make_wide_mesh(), SPLIT | {'embed': 'model'}
        )


def test_an_axis_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter table: logical axis 'vocabulary' has no rule.*'vocab'"):
        sharding_tree(AXES | {'table': ('vocabulary', 'embed')}, make_shapes(), make_wide_mesh(), SPLIT)


def test_a_rule_for_a_missing_mesh_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the rule for 'embed' names mesh axis 'pod', which this mesh does not have"):
        sharding_tree(AXES, make_shapes(), make_mesh(MeshConfig()), SPLIT | {'embed': 'pod'})


def test_other_ranks_and_trees_are_refused() -> None:
    mesh = make_mesh(MeshConfig())
    with pytest.raises(ValueError, match=r'parameter table has shape \(12, 10\) but 1 logical axes'):
        sharding_tree(AXES | {'table': ('vocab',)}, make_shapes(), mesh)
    with pytest.raises(ValueError, match=r"only with axes: \['extra'\], only with shapes: \[\]"):
        sharding_tree(AXES | {'extra': ('embed',)}, make_shapes(), mesh)


def test_an_axis_may_be_split_by_two_mesh_axes() -> None:
    rules = SPLIT | {'embed': ('fsdp', 'model'), 'vocab': None}
    table = {'table': jax.ShapeDtypeStruct((12, 16), jnp.float32)}
    sharding = sharding_tree({'table': AXES['table']}, table, make_wide_mesh(), rules)['table']
    assert sharding.spec == PartitionSpec(None, ('fsdp', 'model'))
    assert sharding.shard_shape((12, 16)) == (12, 2)
    with pytest.raises(ValueError, match='axis .embed. of size 10 is not divisible by the 8 ways'):
        sharding_tree(AXES, make_shapes(), make_wide_mesh(), rules | {'heads': None})


def test_an_activation_lies_as_the_rules_say() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, model=2, sequence=2))

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        return constrain(2 * x, 'batch', 'length', 'heads', None)

    x = np.arange(8.0 * 6 * 4 * 5, dtype=np.float32).reshape(8, 6, 4, 5)
    with jax.set_mesh(mesh):
        doubled = double(x)
    assert doubled.sharding.shard_shape(x.shape) == (4, 3, 2, 5)
    np.testing.assert_array_equal(doubled, 2 * x)
    assert double(x).sharding.is_fully_replicated  # without a mesh


def test_an_axis_of_an_activation_that_does_not_divide_is_whole() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    assert activation_spec((8, 6, 4), ('batch', 'length', 'mlp'), mesh) == PartitionSpec(
        ('data', 'fsdp'), None, 'model'
    )
    assert activation_spec((6, 6, 3), ('batch', 'length', 'mlp'), mesh) == PartitionSpec(None, None, None)
