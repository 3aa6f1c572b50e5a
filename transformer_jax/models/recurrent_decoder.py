"""The decoder of the recurrent family: parameters, and one step as a plain function. See `models.recurrent`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.additive import ADDITIVE, CONCAT, additive_maps, attend, concat_maps
from transformer_jax.attention.api import make_options
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.general import GENERAL
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Variant
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.layers.recurrence import (
    CELLS,
    ParameterGroup,
    State,
    cell_parameters,
    empty_state,
    input_gates,
    input_parameter,
)
from transformer_jax.models.stacks import REMAT_POLICIES
from transformer_jax.parameters import Parameter
from transformer_jax.shapes import Array, Bool, Float, Int

_MAPS = {'additive': additive_maps, 'concat': concat_maps}  # scores that map a key whatever the query
_VARIANTS: dict[str, Variant] = {'additive': ADDITIVE, 'concat': CONCAT, 'general': GENERAL, 'dot': DENSE}


def scoring_of(config: ModelConfig) -> AttentionConfig | None:
    """How the decoder attends: one head over whole states, scores unscaled as both papers have them; None = not."""
    own = config.recurrence
    if own.attention == 'none':
        return None
    kind = 'additive' if own.attention == 'bahdanau' else own.luong_score
    return AttentionConfig(kind=kind, impl='dense', num_heads=1, head_dim=config.d_model, scale=None)


def decoder_parameters(config: ModelConfig) -> dict[str, dict[str, Parameter]]:
    """The decoder's parameters by group."""
    own, width, cell = config.recurrence, config.d_model, CELLS[config.recurrence.cell]
    groups = {f'layer_{i}': cell_parameters(cell, width, width) for i in range(config.num_decoder_layers)}
    if own.attention != 'luong' or own.input_feeding:
        groups['layer_0']['context_kernel'] = input_parameter(cell, width, width)
    groups['initial_state'] = _affine(2 * width, config.num_decoder_layers * cell.num_states * width)
    groups['readout'] = _affine((2 if own.attention == 'luong' else 3) * width, width, bias=own.attention != 'luong')
    scoring = scoring_of(config)
    if scoring is None:
        groups['fixed_vector'] = _affine(2 * width, width)
    elif declared := _VARIANTS[scoring.kind].parameters:
        groups['attention'] = declared(scoring, config.max_length)
    return groups


def _affine(width_in: int, width_out: int, *, bias: bool = True) -> dict[str, Parameter]:
    parameters = {'kernel': Parameter(nn.initializers.glorot_uniform(), (width_in, width_out), (None, 'embed'))}
    return parameters | ({'bias': Parameter(nn.initializers.zeros_init(), (width_out,), ('embed',))} if bias else {})


class Decoder(nn.Module):
    """The parameters of `decoder_parameters`; what is done with them are plain functions of this module."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> dict[str, dict[str, Array]]:
        return {name: ParameterGroup(group, name=name)() for name, group in decoder_parameters(self.config).items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """What attention looks at, once a sentence: keys (mapped already where the score maps them) and annotations."""

    keys: Float[Array, 'B S 1 D']
    annotations: Float[Array, 'B S 1 D']
    segment_ids: Int[Array, 'B S']


class Row(NamedTuple):
    """What one step reads, for W hypotheses a sentence; arrays of several steps have the step axis first."""

    embedded: Float[Array, 'B W D']
    segment_ids: Int[Array, 'B W']  # 0 is padding, which changes no state
    fixed: Float[Array, 'B W D'] | None = None  # the fixed vector, without attention
    starts: Bool[Array, 'B W'] | None = None  # where a segment begins; None = nowhere
    initial: tuple[State, ...] | None = None  # the states that it begins with, one a layer
    kept: tuple[Float[Array, 'B W D'], ...] = ()  # dropout between the layers: what each output is multiplied by


class Carry(NamedTuple):
    """What depends on the target read so far."""

    states: tuple[State, ...]  # one a layer
    fed: Float[Array, 'B W D'] | None  # the last attentional vector, with input feeding


def map_source(
    config: ModelConfig, weights: Mapping[str, Any], annotations: Float[Array, 'B S D'], segment_ids: Int[Array, 'B S']
) -> Source | None:
    """What the decoder attends to; None without attention. O(S D^2), once a sentence."""
    scoring = scoring_of(config)
    if scoring is None:
        return None
    annotations = jnp.where((segment_ids > 0)[..., None], annotations, 0)[:, :, None]
    keys = annotations
    if scoring.kind in _MAPS:
        _, keys = _MAPS[scoring.kind](annotations[:, :1], annotations, weights['attention'])
    return Source(keys, annotations, segment_ids)


def look_up(
    config: ModelConfig,
    weights: Mapping[str, Any],
    source: Source,
    query: Float[Array, 'B W D'],
    segment_ids: Int[Array, 'B W'],
) -> tuple[Float[Array, 'B W D'], Float[Array, 'B 1 W S']]:
    """The weighted sum of the annotations of each query's segment, and the weights."""
    scoring = scoring_of(config)
    assert scoring is not None
    mask = Mask(segment_ids, source.segment_ids, jnp.zeros_like(segment_ids), jnp.zeros_like(source.segment_ids))
    q = query.astype(source.keys.dtype)[:, :, None]
    options = make_options(q, scoring, params=weights.get('attention'))
    function = _VARIANTS[scoring.kind].function
    if scoring.kind in _MAPS:
        own_maps = _MAPS[scoring.kind]

        def maps(q: Array, mapped: Array, params: Mapping[str, Array]) -> tuple[Array, Array]:
            return own_maps(q, mapped[:, :1], params)[0], mapped

        function = functools.partial(attend, maps=maps, in_blocks=False)
    context, scores = function(q, source.keys, source.annotations, mask, options)
    assert scores is not None
    return context[:, :, 0], scores


def take_step(
    config: ModelConfig, weights: Mapping[str, Any], source: Source | None, carry: Carry, row: Row
) -> tuple[Carry, tuple[Float[Array, 'B W D'], Float[Array, 'B 1 W S'] | None]]:
    """Reads one subword of each hypothesis: the state before the vocabulary projection, and where it looked."""
    own, cell, dtype = config.recurrence, CELLS[config.recurrence.cell], row.embedded.dtype
    if row.starts is not None:
        carry = _restart(carry, row)
    # The weights and what is summed by them are computed again in the backward pass, rather than held for each step.
    search = jax.checkpoint(functools.partial(look_up, config), prevent_cse=False)
    context, scores = carry.fed if own.attention == 'luong' else row.fixed, None
    if own.attention == 'bahdanau':
        context, scores = search(weights, source, carry.states[0][0], row.segment_ids)
    x, states = row.embedded, []
    for index, state in enumerate(carry.states):
        layer = weights[f'layer_{index}']
        if index and row.kept:
            x = x * row.kept[index - 1]
        gates = input_gates(layer, x, dtype)
        if index == 0 and context is not None:
            gates += jnp.einsum('BWD,DGE->BWGE', context.astype(dtype), layer['context_kernel'].astype(dtype))
        states.append(cell.step(gates, state, layer['recurrent_kernel'].astype(dtype)))
        x = states[-1][0].astype(dtype)
    if own.attention == 'luong':
        context, scores = search(weights, source, x, row.segment_ids)
        hidden = jnp.tanh(_apply_affine(weights['readout'], context, x))
    else:
        hidden = jnp.tanh(_apply_affine(weights['readout'], x, row.embedded, context))
    new = Carry(tuple(states), None if carry.fed is None else hidden)
    return _where(row.segment_ids > 0, new, carry), (hidden, scores)


def _restart(carry: Carry, row: Row) -> Carry:
    assert row.starts is not None
    assert row.initial is not None
    fed = None if carry.fed is None else jnp.zeros_like(carry.fed)
    return _where(row.starts, Carry(row.initial, fed), carry)


def _where(condition: Bool[Array, 'B W'], new: Carry, old: Carry) -> Carry:
    return jax.tree.map(lambda a, b: jnp.where(condition[..., None], a, b), new, old)


def _apply_affine(params: Mapping[str, Array], *inputs: Any) -> Array:
    joined = jnp.concatenate(inputs, axis=-1)
    outputs = joined @ params['kernel'].astype(joined.dtype)
    return (
        outputs + jnp.broadcast_to(params['bias'], outputs.shape).astype(outputs.dtype) if 'bias' in params else outputs
    )


def take_steps(
    config: ModelConfig, weights: Mapping[str, Any], source: Source | None, carry: Carry, rows: Row, remat: str = 'none'
) -> tuple[Carry, tuple[Float[Array, 'P B W D'], Float[Array, 'P B 1 W S'] | None]]:
    """One step after another."""

    def step(carry: Carry, row: Row) -> Any:
        return take_step(config, weights, source, carry, row)

    if remat != 'none':
        step = jax.checkpoint(step, prevent_cse=False, policy=REMAT_POLICIES[remat])
    return jax.lax.scan(step, carry, rows)


def begin(
    config: ModelConfig, weights: Mapping[str, Any], summary: Float[Array, 'B W E']
) -> tuple[tuple[State, ...], Float[Array, 'B W D'] | None]:
    """The decoder's first states, one a layer, and the fixed vector where there is no attention."""
    num_states = CELLS[config.recurrence.cell].num_states
    made = jnp.tanh(_apply_affine(weights['initial_state'], summary)).astype(jnp.float32)
    pieces = jnp.split(made, config.num_decoder_layers * num_states, axis=-1)
    states = tuple(tuple(pieces[i : i + num_states]) for i in range(0, len(pieces), num_states))
    has_fixed = config.recurrence.attention == 'none'
    return states, jnp.tanh(_apply_affine(weights['fixed_vector'], summary)) if has_fixed else None


def empty_carry(config: ModelConfig, batch: int, width: int) -> Carry:
    """Before the first row of any segment."""
    states = empty_state(CELLS[config.recurrence.cell], batch, width, config.d_model)
    feeds = config.recurrence.attention == 'luong' and config.recurrence.input_feeding
    fed = jnp.zeros((batch, width, config.d_model), config.compute_dtype) if feeds else None
    return Carry((states,) * config.num_decoder_layers, fed)
