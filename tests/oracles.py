"""The paper's equations as numpy loops in float64: slow, obvious, and importing nothing of the package under test.

Parameters are the nested dicts of arrays that the model under test makes; batches are anything with the fields named
here. Every exact computation of the package is compared with these.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Tree = Any


def assert_close(actual: Any, expected: Any, limit: float = 5e-6) -> None:
    """max|actual - expected| / max|expected| is at most `limit`, and both have the same shape."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f'{actual.shape} is not {expected.shape}'
    assert np.isfinite(actual).all(), 'not finite'
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= limit, f'relative error {error:.2e} is above {limit:.0e}'


def numeric_gradient(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The whole gradient by central differences in float64."""
    at = np.array(at, np.float64)
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        kept = at[index]
        at[index] = kept + step
        above = function(at)
        at[index] = kept - step
        below = function(at)
        at[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


def visibility(
    q_segments: np.ndarray, k_segments: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray, *, causal: bool
) -> np.ndarray:
    """Which query may see which key, `[B, T, S]`: same segment, not padding, and not later if causal."""
    batch, length_q, length_k = q_segments.shape[0], q_segments.shape[1], k_segments.shape[1]
    visible = np.zeros((batch, length_q, length_k), bool)
    for b in range(batch):
        for t in range(length_q):
            for s in range(length_k):
                same = q_segments[b, t] == k_segments[b, s] and k_segments[b, s] != 0
                visible[b, t, s] = same and (not causal or k_positions[b, s] <= q_positions[b, t])
    return visible


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(d_k)) v for each batch row, query and head; zeros where nothing is visible. Equation 1."""
    return attention_and_weights(q, k, v, visible)[0]


def attention_and_weights(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The output `[B, T, N, U]`, and the weights `[B, N, T, S]`."""
    batch, length_q, heads, d_k = q.shape
    output = np.zeros((batch, length_q, heads, v.shape[-1]))
    weights = np.zeros((batch, heads, length_q, k.shape[1]))
    for b in range(batch):
        for t in range(length_q):
            for n in range(heads):
                seen = [s for s in range(k.shape[1]) if visible[b, t, s]]
                if not seen:
                    continue
                scores = np.array([np.dot(q[b, t, n], k[b, s, n]) / math.sqrt(d_k) for s in seen], np.float64)
                powers = np.exp(scores - scores.max())
                powers = powers / powers.sum()
                for s, power in zip(seen, powers, strict=True):
                    weights[b, n, t, s] = power
                    output[b, t, n] += power * v[b, s, n]
    return output, weights


def multi_head(params: Tree, inputs_q: np.ndarray, inputs_kv: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Concat(head_1 .. head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V). Section 3.2.2."""

    def project(name: str, inputs: np.ndarray) -> np.ndarray:
        kernel = params[name]['kernel']  # [D, N, H]
        heads = [inputs @ kernel[:, n] for n in range(kernel.shape[1])]
        out = np.stack(heads, axis=-2)
        return out + params[name]['bias'] if 'bias' in params[name] else out

    heads = attention(project('query', inputs_q), project('key', inputs_kv), project('value', inputs_kv), visible)
    kernel = params['output']['kernel']  # [N, U, D]
    out = sum(heads[:, :, n] @ kernel[n] for n in range(kernel.shape[0]))
    return out + params['output']['bias'] if 'bias' in params['output'] else out


def layer_norm(params: Tree, x: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * params['scale'] + params['bias']


def rms_norm(params: Tree, x: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """X / sqrt(mean(x^2) + epsilon) * scale."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * params['scale']


def activate(name: str, x: np.ndarray) -> np.ndarray:
    """The activation of section 3.3 and its alternatives."""
    if name == 'relu':
        return np.maximum(0.0, x)
    if name == 'gelu':
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == 'gelu_tanh':
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))  # swish, and the gate of swiglu


def feed_forward(params: Tree, x: np.ndarray, activation: str = 'relu') -> np.ndarray:
    """max(0, x W_1 + b_1) W_2 + b_2. Equation 2."""
    hidden = activate(activation, x @ params['expand']['kernel'] + params['expand']['bias'])
    if activation == 'swiglu':
        hidden = hidden * (x @ params['gate']['kernel'] + params['gate']['bias'])
    return hidden @ params['contract']['kernel'] + params['contract']['bias']


def sinusoids(num_positions: int, d_model: int) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d)). Section 3.5."""
    table = np.zeros((num_positions, d_model))
    for pos in range(num_positions):
        for i in range(d_model // 2):
            angle = pos / 10_000 ** (2 * i / d_model)
            table[pos, 2 * i] = math.sin(angle)
            table[pos, 2 * i + 1] = math.cos(angle)
    return table


def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, real: np.ndarray, epsilon: float, *, over: str = 'all'
) -> tuple[float, float]:
    """Label-smoothed cross-entropy and plain negative log-likelihood, summed over the real tokens. Section 5.4.

    `over` 'all': the target distribution is 1 - epsilon on the right entry plus epsilon / V on every one; 'others':
    1 - epsilon on the right entry and epsilon / (V - 1) on each wrong one.
    """
    loss = nll = 0.0
    num_entries = logits.shape[-1]
    for place in np.ndindex(targets.shape):
        if not real[place]:
            continue
        row = logits[place].astype(np.float64)
        log_probabilities = row - row.max() - math.log(np.exp(row - row.max()).sum())
        for entry in range(num_entries):
            right = entry == targets[place]
            if over == 'all':
                wanted = (1 - epsilon) * right + epsilon / num_entries
            else:
                wanted = 1 - epsilon if right else epsilon / (num_entries - 1)
            loss -= wanted * log_probabilities[entry]
        nll -= log_probabilities[targets[place]]
    return loss, nll


class Transformer:
    """The whole encoder-decoder, section 3, from a parameter tree and a model config. No dropout."""

    def __init__(self, params: Tree, config: Any, start_id: int) -> None:
        self.params, self.config, self.start_id = to_float64(params), config, start_id

    def logits(self, batch: Any) -> np.ndarray:
        """Teacher-forced scores of every target place, `[B, T, V]`, padded rows of the table included."""
        hidden = self.decode(batch, self.encode(batch))
        tied = self.config.tie_embeddings != 'none'
        table = self.params['target_embedding']['table'] if tied else self.params['output_table']
        return hidden @ table.T + self.params.get('output_bias', 0.0)

    def encode(self, batch: Any) -> np.ndarray:
        segments, positions = np.asarray(batch.input_segment_ids), np.asarray(batch.input_positions)
        name = 'target_embedding' if self.config.tie_embeddings == 'all' else 'source_embedding'
        x = self.embed(name, np.asarray(batch.inputs), positions)
        visible = visibility(segments, segments, positions, positions, causal=False)
        for layer in self.layers('encoder', self.config.num_encoder_layers):
            x = self.join(layer, 'self_attention', x, lambda y, p: multi_head(p, y, y, visible))
            x = self.join(layer, 'feed_forward', x, lambda y, p: feed_forward(p, y, self.config.activation))
        return self.finish('encoder', x)

    def decode(self, batch: Any, memory: np.ndarray) -> np.ndarray:
        segments, positions = np.asarray(batch.target_segment_ids), np.asarray(batch.target_positions)
        sources, source_positions = np.asarray(batch.input_segment_ids), np.asarray(batch.input_positions)
        x = self.embed('target_embedding', self.shift(np.asarray(batch.targets), positions), positions)
        past = visibility(segments, segments, positions, positions, causal=True)
        cross = visibility(segments, sources, positions, source_positions, causal=False)
        for layer in self.layers('decoder', self.config.num_decoder_layers):
            x = self.join(layer, 'self_attention', x, lambda y, p: multi_head(p, y, y, past))
            x = self.join(layer, 'cross_attention', x, lambda y, p: multi_head(p, y, memory, cross))
            x = self.join(layer, 'feed_forward', x, lambda y, p: feed_forward(p, y, self.config.activation))
        return self.finish('decoder', x)

    def shift(self, targets: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The outputs shifted right by one, the start id at position 0 of every segment."""
        shifted = np.full_like(targets, self.start_id)
        for b, t in np.ndindex(targets.shape):
            if positions[b, t] != 0:
                shifted[b, t] = targets[b, t - 1]
        return shifted

    def embed(self, name: str, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        scale = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        table, places = self.params[name]['table'], sinusoids(self.config.max_length, self.config.d_model)
        return table[ids] * scale + places[positions]

    def layers(self, stack: str, num_layers: int) -> list[Tree]:
        """The parameters of each layer, from arrays stacked on their first axis."""
        stacked = self.params[stack]['layers']
        return [map_tree(lambda array, i=i: array[i], stacked) for i in range(num_layers)]

    def join(self, layer: Tree, name: str, x: np.ndarray, sublayer: Callable[[np.ndarray, Tree], np.ndarray]) -> Any:
        """LayerNorm(x + Sublayer(x)); with pre-norm, x + Sublayer(LayerNorm(x)). Section 5.4."""
        norm = layer[f'{name}_residual']['norm']
        if self.config.norm_order == 'pre':
            return x + sublayer(self.normalize(norm, x), layer[name])
        return self.normalize(norm, x + sublayer(x, layer[name]))

    def normalize(self, params: Tree, x: np.ndarray) -> np.ndarray:
        function = rms_norm if self.config.norm == 'rms_norm' else layer_norm
        return function(params, x, self.config.norm_epsilon)

    def finish(self, stack: str, x: np.ndarray) -> np.ndarray:
        return self.normalize(self.params[stack]['final_norm'], x) if self.config.norm_order == 'pre' else x


def to_float64(tree: Tree) -> Tree:
    """The same tree of nested dicts in float64 numpy."""
    return map_tree(lambda array: np.asarray(array, np.float64), tree)


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Applies a function to every leaf of nested dicts."""
    if isinstance(tree, dict):
        return {key: map_tree(function, value) for key, value in tree.items()}
    return function(tree)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def recurrent_step(cell: str, gates: np.ndarray, u: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
    """One step of 'rnn', 'gru' or 'lstm', from what the inputs give to the gates `[G, D]` and from U `[D, G, D]`."""
    h = state[0]
    if cell == 'rnn':
        return [np.tanh(gates[0] + h @ u[:, 0])]
    if cell == 'gru':
        update, reset = sigmoid(gates[0] + h @ u[:, 0]), sigmoid(gates[1] + h @ u[:, 1])
        return [(1 - update) * h + update * np.tanh(gates[2] + (reset * h) @ u[:, 2])]
    write, keep, candidate, show = (gates[index] + h @ u[:, index] for index in range(4))
    memory = sigmoid(keep) * state[1] + sigmoid(write) * np.tanh(candidate)
    return [sigmoid(show) * np.tanh(memory), memory]


def read_recurrently(
    cell: str, params: Tree, inputs: np.ndarray, segments: np.ndarray, *, reverse: bool = False
) -> np.ndarray:
    """The output h of a cell at every real row, zeros at padding: each segment is read on its own."""
    outputs = np.zeros(inputs.shape)
    for b in range(inputs.shape[0]):
        for segment in set(np.asarray(segments)[b].tolist()) - {0}:
            rows = [t for t in range(inputs.shape[1]) if segments[b, t] == segment]
            state = [np.zeros(inputs.shape[2])] * (2 if cell == 'lstm' else 1)
            for t in reversed(rows) if reverse else rows:
                w = params['input_kernel']
                gates = np.stack([inputs[b, t] @ w[:, g] + params['bias'][g] for g in range(w.shape[1])])
                state = recurrent_step(cell, gates, params['recurrent_kernel'], state)
                outputs[b, t] = state[0]
    return outputs


def recurrence(cell: str, params: Tree, inputs: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """A recurrent layer: one way, or where there are parameters of a way back, both and a linear map of the two."""
    forward = read_recurrently(cell, params['forward'], inputs, segments)
    if 'backward' not in params:
        return forward
    backward = read_recurrently(cell, params['backward'], inputs, segments, reverse=True)
    return np.concatenate([forward, backward], axis=-1) @ params['output']['kernel']


def convolution(
    params: Tree, inputs: np.ndarray, segments: np.ndarray, dilation: int, *, causal: bool, gated: bool = False
) -> np.ndarray:
    """Zeros at padding. Place j of K looks j - (K - 1) rows away if causal, else j - K // 2, times the dilation."""
    width = len(params['depthwise'] if 'depthwise' in params else params['kernel'])
    outputs = np.zeros((*inputs.shape[:2], len(params['bias'])))
    for b, t in np.ndindex(inputs.shape[:2]):
        if segments[b, t] == 0:
            continue
        for j in range(width):
            s = t + (j - (width - 1 if causal else width // 2)) * dilation
            if 0 <= s < inputs.shape[1] and segments[b, s] == segments[b, t]:
                if 'depthwise' in params:
                    outputs[b, t] += (inputs[b, s] * params['depthwise'][j]) @ params['pointwise']
                else:
                    outputs[b, t] += inputs[b, s] @ params['kernel'][j]
        outputs[b, t] += params['bias']
    if not gated:
        return outputs
    values, gates = np.split(outputs, 2, axis=-1)
    return values * sigmoid(gates) * (np.asarray(segments) > 0)[..., None]
