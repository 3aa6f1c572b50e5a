"""The programs of a run, compiled for other devices: the update that trains, and the step that decodes."""

import dataclasses
from math import prod
from typing import Any, NamedTuple

import jax

from transformer_jax import models
from transformer_jax.attention import variants_of
from transformer_jax.config import Config, ConfigError, ModelConfig
from transformer_jax.decoding import sizes
from transformer_jax.decoding.candidates import Specials
from transformer_jax.decoding.hypotheses import StopRule
from transformer_jax.decoding.length_penalty import LengthPenalty
from transformer_jax.decoding.search import Searcher
from transformer_jax.decoding.text_search import make_method
from transformer_jax.models.interface import Model
from transformer_jax.parallel.jaxpr_costs import UnknownTurnsError, count_flops
from transformer_jax.parallel.mesh import ROWS, num_data_shards, replicated
from transformer_jax.parallel.plan import Plan, compile_program
from transformer_jax.parallel.platform import compiling_for
from transformer_jax.parallel.rules import sharding_tree
from transformer_jax.parallel.targets import Target
from transformer_jax.training.update import Update, abstract_batch, make_update


class Shape(NamedTuple):
    """Rows of a global batch, and slots of each of them."""

    rows: int
    source_length: int
    target_length: int


class StateBytes(NamedTuple):
    """What lies on one device from one run of a program to the next."""

    parameters: int
    optimizer: int
    average: int


def plan_training(config: Config, model: Model, target: Target, mesh: jax.sharding.Mesh, shape: Shape) -> Plan:
    """The update that training runs, `config.train.accumulation` micro-batches of this shape, compiled."""
    with compiling_for(target.platform):
        update = make_update(config, model, mesh)
    batch: Any = abstract_batch(*shape, update.batch)
    return compile_program(update.jitted, (update.state, (batch,) * config.train.accumulation), target, mesh)


def training_bytes(config: Config, model: Model, target: Target, mesh: jax.sharding.Mesh) -> StateBytes:
    """What training keeps on each device. Raises `ConfigError` where the mesh can't split a parameter."""
    with compiling_for(target.platform):
        update: Update = make_update(config, model, mesh)
    state = update.state
    return StateBytes(*(_device_bytes(part) for part in (state.params, state.optimizer, state.average)))


def plan_decoding(
    config: Config, model: Model, target: Target, mesh: jax.sharding.Mesh, shape: Shape
) -> tuple[Plan, StateBytes]:
    """One step of the search that the config asks for, with the longest cache that such sources come to.

    Parameters lie as in training, sentences over the mesh axes that split rows.
    """
    if not (model.task.translates or model.task.generates):
        raise ConfigError(f'--decode: a model made for {model.task.name} writes no text')
    decoding = config.decoding
    method, stop = make_method(decoding, 1), StopRule(decoding.stop)
    searcher = Searcher(
        model,
        method,
        Specials(1, (0,)),  # which ids they are makes no difference to the program
        LengthPenalty(decoding.length_penalty, decoding.alpha),
        stop,
        num_best=1 if stop.kind == 'exact' else method.num_hypotheses,
    )
    with compiling_for(target.platform):
        params = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))
        params = _lay(params, sharding_tree(model.logical_axes(), params, mesh))
        search = searcher.abstract_search(params, shape.rows, shape.source_length, decode_slots(config, model, shape))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(ROWS))
    whole = replicated(mesh)
    fits = shape.rows % num_data_shards(mesh) == 0
    where = jax.tree.map(lambda leaf: rows if fits and leaf.ndim and leaf.shape[0] == shape.rows else whole, search)
    search = _lay(search, where)
    step = jax.jit(searcher.step, out_shardings=where, donate_argnums=1)
    return compile_program(step, (params, search), target, mesh), StateBytes(_device_bytes(params), 0, 0)


def decode_slots(config: Config, model: Model, shape: Shape) -> int:
    """Target slots of the longest cache of a search over sources of this length."""
    return sizes.round_length(min(shape.source_length + config.decoding.max_extra_length, model.max_length))


def training_flops(config: Config, shape: Shape, *, vocab_size: int) -> float | None:
    """What one update takes by the model's definition: three times the products of its forward pass.

    Counted in the traced forward pass with dense attention (all of T x S, whatever a mask hides) and the projection of
    every slot; what an implementation skips, computes again or adds is not in it. None where a loop can't be counted.
    """
    with compiling_for('cpu'):
        model: Any = _define(config, vocab_size)

        def forward(params: Any, batch: Any, rng: Any) -> Any:
            task = model.objective(batch, jax.random.split(rng, shape.rows))
            return model.project(params, model.hidden(params, task))

        key = jax.eval_shape(jax.random.key, 0)
        params = jax.eval_shape(model.init, key)
        flops = _count(jax.jit(forward).trace(params, abstract_batch(*shape, None), key).jaxpr)
    return None if flops is None else 3 * flops * config.train.accumulation


def decoding_flops(config: Config, shape: Shape, *, vocab_size: int) -> float | None:
    """The products of one step for all hypotheses, attending to every slot of the cache."""
    with compiling_for('cpu'):
        model: Any = _define(config, vocab_size)
        slots, width = decode_slots(config, model, shape), make_method(config.decoding, 1).num_hypotheses

        def start(params: Any, ids: Any) -> Any:
            return model.broadcast(model.init_decode(params, model.encode(params, ids, ids, ids), slots), width)

        params = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))
        ids = jax.ShapeDtypeStruct((shape.rows, shape.source_length), 'int32')
        tokens = jax.ShapeDtypeStruct((shape.rows, width), 'int32')
        cache = jax.eval_shape(start, params, ids)
        return _count(jax.jit(model.decode_step).trace(params, tokens, cache).jaxpr)


def _define(config: Config, vocab_size: int) -> Model:
    """The model with each attention in its dense form, where its kind has one, and without recomputing."""
    model = config.model
    uses = models.uses_of_attention(config)
    dense = {use.name: 'dense' if 'dense' in variants_of(use.config.kind) else 'auto' for use in uses}
    overlays: dict[str, Any] = {
        name: dataclasses.replace(getattr(model, name), impl=impl)
        for name, impl in dense.items()
        if hasattr(model, name)
    }
    defined: ModelConfig = dataclasses.replace(model, **overlays)
    execution = dataclasses.replace(config.execution, remat='none', unroll=1)
    return models.build(defined, vocab_size=vocab_size, start_id=0, execution=execution)


def _count(jaxpr: Any) -> float | None:
    try:
        return count_flops(jaxpr)
    except UnknownTurnsError:
        return None


def _lay(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, where)


def _device_bytes(tree: Any) -> int:
    shapes = ((leaf, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
    return sum(leaf.dtype.itemsize * prod(shape) for leaf, shape in shapes)
