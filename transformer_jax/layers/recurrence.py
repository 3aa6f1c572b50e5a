"""Recurrent cells, and recurrence along a text as a token-mixing layer. Table 1 of the paper, second row.

A state is reset where a segment begins and held where there is padding, so that packed rows, padding on either side and
rows read piece by piece give what the text alone gives.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import RecurrenceConfig
from transformer_jax.layers.declaring import declare
from transformer_jax.layers.kv_cache import Reading, RunningState
from transformer_jax.parameters import Parameter
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Bool, Float, Int, PRNGKey

State = tuple[Array, ...]  # what a cell keeps, `[..., D]` each, float32; the first is the output h


class Cell(NamedTuple):
    """A cell of width D: `step(gates, state, kernel) -> state`.

    `gates` `[..., G, D]` is what the inputs give to each gate, bias included; `kernel` `[D, G, D]` is what h gives.
    """

    num_gates: int
    num_states: int
    step: Callable[[Array, State, Array], State]
    gates_open: tuple[int, ...] = ()  # gates whose bias starts at 1, so that the state is kept at first


def rnn_step(gates: Float[Array, '... 1 D'], state: State, kernel: Float[Array, 'D 1 D']) -> State:
    """The plain cell, h' = tanh(W x + U h + b). Elman, 1990."""
    (h,) = state
    return (jnp.tanh(gates + _product(h, kernel))[..., 0, :],)


def gru_step(gates: Float[Array, '... 3 D'], state: State, kernel: Float[Array, 'D 3 D']) -> State:
    """The gated unit, h' = (1 - z) h + z tanh(W x + U (r h) + b), gates z and r. Cho et al., 2014.

    r multiplies h before U as in the paper; some libraries multiply U h.
    """
    (h,) = state
    opened = jax.nn.sigmoid(gates[..., :2, :] + _product(h, kernel[:, :2]))
    update, reset = opened[..., 0, :], opened[..., 1, :]
    candidate = jnp.tanh(gates[..., 2:, :] + _product(reset * h, kernel[:, 2:]))[..., 0, :]
    return ((1 - update) * h + update * candidate,)


def lstm_step(gates: Float[Array, '... 4 D'], state: State, kernel: Float[Array, 'D 4 D']) -> State:
    """Long short-term memory, c' = f c + i tanh(g) and h' = o tanh(c'), gates in the order i, f, g, o.

    Hochreiter and Schmidhuber, 1997, with the forget gate f of Gers et al., 2000.
    """
    h, c = state
    gates = gates + _product(h, kernel)
    write, keep, show = (jax.nn.sigmoid(gates[..., index, :]) for index in (0, 1, 3))
    c = keep * c + write * jnp.tanh(gates[..., 2, :])
    return (show * jnp.tanh(c), c)


CELLS: dict[str, Cell] = {
    'rnn': Cell(1, 1, rnn_step),
    'gru': Cell(3, 1, gru_step),
    'lstm': Cell(4, 2, lstm_step, gates_open=(1,)),
}


def _product(h: Float[Array, '... D'], kernel: Float[Array, 'D G E']) -> Float[Array, '... G E']:
    """U h of each gate, computed in the kernel's type and added up in that of h."""
    return jnp.einsum('...D,DGE->...GE', h.astype(kernel.dtype), kernel).astype(h.dtype)


def cell_parameters(cell: Cell, width_in: int, width: int) -> dict[str, Parameter]:
    """W `[D_in, G, D]`, U `[D, G, D]` and b `[G, D]`: Glorot's, orthogonal and zero at first, each gate on its own."""

    def draw_bias(rng: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Array:
        is_open = jnp.array([[gate in cell.gates_open] for gate in range(cell.num_gates)])
        return jnp.broadcast_to(is_open, shape).astype(dtype)

    return {
        'input_kernel': input_parameter(cell, width_in, width),
        'recurrent_kernel': Parameter(_draw_orthogonal, (width, cell.num_gates, width), ('embed', None, None)),
        'bias': Parameter(draw_bias, (cell.num_gates, width), (None, 'embed')),
    }


def input_parameter(cell: Cell, width_in: int, width: int) -> Parameter:
    """The map `[D_in, G, D]` of an input to the gates."""
    glorot = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=0, out_axis=2, batch_axis=1)
    return Parameter(glorot, (width_in, cell.num_gates, width), ('embed', None, None))


def _draw_orthogonal(rng: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Array:
    draw = nn.initializers.orthogonal()
    keys = jax.random.split(rng, shape[1])
    return jnp.stack([draw(key, (shape[0], shape[2]), dtype) for key in keys], axis=1)


def empty_state(cell: Cell, *shape: int) -> State:
    """A state that has read nothing."""
    return (jnp.zeros(shape, jnp.float32),) * cell.num_states


def input_gates(
    params: Mapping[str, Array], inputs: Float[Array, '... E'], dtype: jnp.dtype
) -> Float[Array, '... G D']:
    """W x + b of each gate, in float32."""
    gates = jnp.einsum('...E,EGD->...GD', inputs.astype(dtype), params['input_kernel'].astype(dtype))
    return gates.astype(jnp.float32) + jnp.broadcast_to(params['bias'], gates.shape)


def segment_starts(segment_ids: Int[Array, 'B T'], *, reverse: bool = False) -> Bool[Array, 'B T']:
    """The row of each segment that is read first; with `reverse` rows are read from the right."""
    ids = jnp.flip(segment_ids, 1) if reverse else segment_ids
    index = jnp.arange(ids.shape[1])[None]
    last = jax.lax.cummax(jnp.where(ids > 0, index, -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.where(before >= 0, jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1), 0)
    starts = (ids > 0) & (ids != previous)
    return jnp.flip(starts, 1) if reverse else starts


def read_rows(
    cell: Cell,
    gates: Float[Array, 'B T G D'],
    kernel: Float[Array, 'D G D'],
    state: State,
    holds: Bool[Array, 'B T'],
    starts: Bool[Array, 'B T'] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, 'B T D'], State]:
    """The output h after each row, and the last state. O(T) steps one after another.

    The state is emptied before a row of `starts`, and rows that are not in `holds` (padding) leave it as it is.
    """

    def step(state: State, row: tuple[Array, Array, Array | None]) -> tuple[State, Array]:
        gates, hold, start = row
        before = state if start is None else jax.tree.map(lambda a: jnp.where(start[:, None], 0, a), state)
        after = cell.step(gates, before, kernel)
        state = jax.tree.map(lambda new, old: jnp.where(hold[:, None], new, old), after, state)
        return state, state[0]

    rows = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (gates, holds, starts))
    state, outputs = jax.lax.scan(step, state, rows, reverse=reverse)
    return jnp.moveaxis(outputs, 0, 1), state


class ParameterGroup(nn.Module):
    """Described parameters under one name."""

    parameters: Mapping[str, Parameter]

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return declare(self, self.parameters)


class Recurrence(nn.Module):
    """A recurrent layer of width D; unless causal, one that reads each way and a linear map of both, `[2 D, D]`.

    O(T D^2) time in O(T) sequential steps; a decode keeps one state whatever the length.
    """

    config: RecurrenceConfig
    d_model: int
    dtype: jnp.dtype
    causal: bool

    def setup(self) -> None:
        parameters = cell_parameters(self._cell, self.d_model, self.d_model)
        self.forward = ParameterGroup(parameters)
        if not self.causal:
            self.backward = ParameterGroup(parameters)
            glorot: Any = nn.with_logical_partitioning(nn.initializers.glorot_uniform(), (None, 'embed'))
            self.output = nn.Dense(self.d_model, use_bias=False, dtype=self.dtype, kernel_init=glorot)

    @property
    def _cell(self) -> Cell:
        return CELLS[self.config.cell]

    def mix(
        self, inputs: Float[Array, 'B T D'], mask: Mask, shared_terms: PositionTerms | None = None
    ) -> Float[Array, 'B T D']:
        """Each row with what was read before it in its segment (and, unless causal, after it)."""
        if mask.k_prefix is not None:
            raise ValueError('a recurrence that reads one way has no prefix that sees both ways')
        states = self.read(inputs, mask.q_segments)
        return states if self.causal else self.join(states)

    def read(self, inputs: Float[Array, 'B T D'], segment_ids: Int[Array, 'B T']) -> Float[Array, 'B T E']:
        """The states h after each row, E = D; unless causal those of both directions side by side, E = 2 D."""
        holds = segment_ids > 0
        inputs = jnp.where(holds[..., None], inputs, 0)  # padding may hold anything
        directions = [(self.forward(), False)] + ([] if self.causal else [(self.backward(), True)])
        states = []
        for params, reverse in directions:
            outputs, _ = read_rows(
                self._cell,
                input_gates(params, inputs, self.dtype),
                params['recurrent_kernel'].astype(self.dtype),
                empty_state(self._cell, inputs.shape[0], self.d_model),
                holds,
                segment_starts(segment_ids, reverse=reverse),
                reverse=reverse,
            )
            states.append(outputs)
        return jnp.concatenate(states, axis=-1).astype(self.dtype)

    def join(self, states: Float[Array, 'B T E']) -> Float[Array, 'B T D']:
        """One row of width D of the states of both directions."""
        return self.output(states)

    def init_state(self, batch: int, num_slots: int) -> RunningState:
        """The state of the cell, whatever the number of slots."""
        return RunningState.of(empty_state(self._cell, batch, self.d_model))

    def extend(
        self,
        inputs: Float[Array, 'B T D'],
        state: RunningState,
        reading: Reading,
        shared_terms: PositionTerms | None = None,
    ) -> tuple[Float[Array, 'B T D'], RunningState]:
        """Reads new target rows, W hypotheses with one each or one with several, on from their states."""
        params, holds = self.forward(), reading.holds_by_hypothesis()
        rows = jnp.where(holds[..., None], reading.by_hypothesis(inputs), 0)
        kernel = params['recurrent_kernel'].astype(self.dtype)
        outputs, new = read_rows(self._cell, input_gates(params, rows, self.dtype), kernel, tuple(state.flat()), holds)
        return outputs.astype(self.dtype).reshape(inputs.shape), state.renew(new)
