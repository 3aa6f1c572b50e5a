"""What one step through the cache computes: the newest row of each hypothesis, whatever has been read before."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.models.test_decoding import decode_step
from tests.models.tiny import CONFIG, START, V, make_model, make_params
from transformer_jax.models.interface import Model

B, W, SOURCE, SLOTS, LAYERS = 3, 5, 7, 211, 2


def make_cache(**changes: Any) -> tuple[Model, Any, Any]:
    model = make_model(num_encoder_layers=1, num_decoder_layers=LAYERS, max_length=SLOTS, **changes)
    params = make_params(model)
    ids = jax.ShapeDtypeStruct((B, SOURCE), jnp.int32)

    def start(params: Any, ids: Any) -> Any:
        memory = model.encode(params, ids, jnp.ones_like(ids), jnp.zeros_like(ids))
        return model.broadcast(model.init_decode(params, memory, SLOTS), W)

    empty = jax.eval_shape(start, params, ids)
    return model, params, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)


def find_products(jaxpr: Any) -> Iterator[Any]:
    """Every `dot_general`, those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            inner = getattr(inner, 'jaxpr', inner)
            if hasattr(inner, 'eqns'):
                yield from find_products(inner)


def count_flops(product: Any) -> int:
    (contracted, _), _ = product.params['dimension_numbers']
    sizes = [product.invars[0].aval.shape[axis] for axis in contracted]
    return 2 * product.outvars[0].aval.size * math.prod(sizes)


def test_a_step_multiplies_the_newest_rows_alone() -> None:
    """No product has more queries than hypotheses, and all of them together are what the equations ask for."""
    model, params, cache = make_cache()
    tokens = jnp.full((B, W), START, jnp.int32)
    jaxpr = jax.make_jaxpr(model.decode_step)(params, tokens, cache).jaxpr
    products = list(find_products(jaxpr))
    for product in products:
        # Of heads of the newest rows with keys or values: one side has the hypotheses alone beside the batch.
        (_, batch), shapes = product.params['dimension_numbers'], [x.aval.shape for x in product.invars]
        if batch[0]:
            contracted = product.params['dimension_numbers'][0]
            free = [
                math.prod(size for axis, size in enumerate(shape) if axis not in (*batch[side], *contracted[side]))
                for side, shape in enumerate(shapes)
            ]
            assert W in free, shapes
    D, F = CONFIG.d_model, CONFIG.d_ff
    N, H, U = (getattr(CONFIG.attention, name) for name in ('num_heads', 'head_dim', 'value_dim'))
    rows = 2 * B * W
    self_attention = D * N * (2 * H + U) + SLOTS * W * N * (H + U) + N * U * D
    cross_attention = D * N * H + SOURCE * N * (H + U) + N * U * D
    layer = self_attention + cross_attention + 2 * D * F
    assert sum(map(count_flops, products)) == rows * (LAYERS * layer + D * V)


@pytest.mark.parametrize('kind', ['dot', pytest.param('linear', marks=pytest.mark.slow)])
def test_a_later_step_costs_no_more(kind: str) -> None:
    model, params, cache = make_cache(attention=dataclasses.replace(CONFIG.attention, kind=kind))
    tokens = jnp.full((B, W), START, jnp.int32)
    found, programs = {}, 0
    for step in range(1, 201):
        _, cache = decode_step(model, params, tokens, cache)
        programs = programs or decode_step._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
        if step in (20, 200):
            analysis = decode_step.lower(model, params, tokens, cache).compile().cost_analysis()
            assert analysis is not None
            found[step] = analysis['flops'], jax.tree.map(jnp.shape, cache)
    assert found[20][0] > 2 * B * W * SLOTS
    assert found[20] == found[200]
    assert decode_step._cache_size() == programs  # pyright: ignore[reportFunctionMemberAccess]
