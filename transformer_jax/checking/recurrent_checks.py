"""Checks of the recurrent family against its equations: its attention, and its decoder step by step, in float64.

The equations are loops over single vectors that share no code with `models/`; they are called inside
`jax.enable_x64(True)`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checking.case import EXACT_LIMIT
from transformer_jax.checking.findings import Finding, relative_error
from transformer_jax.checking.oracle import to_float64
from transformer_jax.config import ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models import recurrent_decoder
from transformer_jax.models.interface import Model
from transformer_jax.shapes import Array, Params

STEPS_LIMIT = 1e-5  # of the largest value, after a dozen steps of every layer
_SUBJECT = 'decoder'
_SOURCE = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]], np.int32)
_QUERIES = np.array([[1, 2, 2], [1, 1, 0], [1, 1, 1]], np.int32)


def check_recurrent(config: ModelConfig, model: Model, params: Params, batch: Batch) -> Iterator[Finding]:
    """The attention's values and gradients, and the states that the decoder gives to the vocabulary."""
    yield from _check_attention(config, params['decoder'])
    yield _check_steps(config, model, params, batch)


def attend(config: ModelConfig, params: Mapping[str, Any], query: Array, annotations: Array) -> Array:
    """The context `[D]` of one query `[D]` over the annotations `[S, D]` of its text.

    Bahdanau et al. 2015, section 3.1: scores v . tanh(W q + U a). Luong et al. 2015, equation 8: q . a, q W a or
    v . tanh(W [q; a]).
    """
    kind, own = config.recurrence.attention, params.get('attention', {})
    kind = config.recurrence.luong_score if kind == 'luong' else kind
    if kind == 'bahdanau':
        scores = jnp.tanh((query @ own['query_map'][0])[None] + annotations @ own['key_map'][0]) @ own['score'][0]
    elif kind == 'concat':
        pairs = jnp.concatenate([jnp.broadcast_to(query, annotations.shape), annotations], axis=1)
        scores = jnp.tanh(pairs @ own['joint_map'][0]) @ own['score'][0]
    elif kind == 'general':
        scores = annotations @ (query @ own['query_map'][0])
    else:
        scores = annotations @ query
    powers = jnp.exp(scores - scores.max())
    return (powers / powers.sum()) @ annotations


def decode(config: ModelConfig, params: Params, summary: Array, annotations: Array, inputs: Array) -> Array:
    """The states `[T, D]` before the vocabulary projection of one text, of the embeddings `[T, D]` that it reads."""
    weights, kind, width = params['decoder'], config.recurrence.attention, config.d_model
    num_states = 2 if config.recurrence.cell == 'lstm' else 1
    first = jnp.tanh(summary @ weights['initial_state']['kernel'] + weights['initial_state']['bias'])
    states = list(first.reshape(config.num_decoder_layers, num_states, width))
    fed, hidden = jnp.zeros(width), []
    for y in inputs:
        context = fed if config.recurrence.input_feeding else None
        if kind == 'none':
            context = jnp.tanh(summary @ weights['fixed_vector']['kernel'] + weights['fixed_vector']['bias'])
        elif kind == 'bahdanau':
            context = attend(config, weights, states[0][0], annotations)
        x = y
        for index, state in enumerate(states):
            own = weights[f'layer_{index}']
            gates = jnp.einsum('e,egd->gd', x, own['input_kernel']) + own['bias']
            if index == 0 and context is not None:
                gates += jnp.einsum('e,egd->gd', context, own['context_kernel'])
            states[index] = step(config.recurrence.cell, gates, own['recurrent_kernel'], state)
            x = states[index][0]
        if kind == 'luong':
            fed = jnp.tanh(jnp.concatenate([attend(config, weights, x, annotations), x]) @ weights['readout']['kernel'])
            hidden.append(fed)
        else:
            assert context is not None
            joined = jnp.concatenate([x, y, context])
            hidden.append(jnp.tanh(joined @ weights['readout']['kernel'] + weights['readout']['bias']))
    return jnp.stack(hidden)


def step(cell: str, gates: Array, kernel: Array, state: Array) -> Array:
    """The state after one input, `[1, D]`, of an LSTM `[2, D]`: h, then c. `gates` `[G, D]` is what the input gives.

    Elman 1990; Cho et al. 2014, equations 5 to 8; Hochreiter and Schmidhuber 1997 with a forget gate.
    """

    def sigmoid(z: Array) -> Array:
        return 1 / (1 + jnp.exp(-z))

    h = state[0]
    if cell == 'rnn':
        return jnp.tanh(gates[0] + h @ kernel[:, 0])[None]
    if cell == 'gru':
        update, reset = (sigmoid(gates[index] + h @ kernel[:, index]) for index in (0, 1))
        return ((1 - update) * h + update * jnp.tanh(gates[2] + (reset * h) @ kernel[:, 2]))[None]
    write, keep, candidate, show = (gates[index] + h @ kernel[:, index] for index in range(4))
    c = sigmoid(keep) * state[1] + sigmoid(write) * jnp.tanh(candidate)
    return jnp.stack([sigmoid(show) * jnp.tanh(c), c])


def _check_attention(config: ModelConfig, weights: Params) -> Iterator[Finding]:
    """Packed texts, and padding on either side; gradients of queries, annotations and parameters."""
    if config.recurrence.attention == 'none':
        for check in ('values', 'gradients'):
            yield Finding(_SUBJECT, check, None, EXACT_LIMIT, 'it is given a fixed vector and attends to nothing')
        return
    rng = np.random.default_rng(2)
    query = rng.normal(size=(*_QUERIES.shape, config.d_model)).astype(np.float32)
    annotations = (rng.normal(size=(*_SOURCE.shape, config.d_model)) * 0.5).astype(np.float32)
    probe = rng.normal(size=query.shape) * (_QUERIES > 0)[..., None]
    own = {name: weights[name] for name in ('attention',) if name in weights}

    def ours(query: Array, annotations: Array, own: Params) -> tuple[Array, Array]:
        source = recurrent_decoder.map_source(config, own, annotations, jnp.asarray(_SOURCE))
        assert source is not None
        context, _ = recurrent_decoder.look_up(config, own, source, query, jnp.asarray(_QUERIES))
        return (context * probe).sum(), context

    def theirs(query: Array, annotations: Array, own: Params) -> tuple[Array, Array]:
        context = jnp.zeros(query.shape)
        for b, t in np.argwhere(_QUERIES > 0):
            text = annotations[b][_SOURCE[b] == _QUERIES[b, t]]
            context = context.at[b, t].set(attend(config, own, query[b, t], text))
        return (context * probe).sum(), context

    gradients, context = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(query, annotations, own)
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(theirs, argnums=(0, 1, 2), has_aux=True))(*to_float64((query, annotations, own)))
        exact_gradients, exact_context = jax.tree.map(np.asarray, exact)
    yield Finding(_SUBJECT, 'values', relative_error(context, exact_context), EXACT_LIMIT)
    errors = map(relative_error, jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients))
    yield Finding(_SUBJECT, 'gradients', max(errors), EXACT_LIMIT)


def _check_steps(config: ModelConfig, model: Model, params: Params, batch: Batch) -> Finding:
    """All steps of two texts, given what the encoder makes of their sources."""
    hidden = np.asarray(jax.jit(model.hidden)(params, batch))
    arrays = batch.inputs, batch.input_segment_ids, batch.input_positions
    memory: Any = jax.jit(model.encode)(params, *arrays)
    begun = np.full((len(batch.targets), 1), model.start_id)
    read = np.concatenate([begun, batch.targets[:, :-1]], axis=1)
    errors = []
    with jax.enable_x64(True):
        exact = to_float64(params)
        root = config.d_model**0.5 if config.scale_embedding else 1.0
        for row in range(2):
            real = batch.target_segment_ids[row] > 0
            inputs = exact['target_embedding']['table'][read[row, real]] * root
            annotations = to_float64(memory.annotations[row])[batch.input_segment_ids[row] > 0]
            states = decode(config, exact, to_float64(memory.summary[row]), annotations, inputs)
            errors.append(relative_error(hidden[row, real], np.asarray(states)))
    return Finding(_SUBJECT, 'its steps are those of the equations', max(errors), STEPS_LIMIT)
