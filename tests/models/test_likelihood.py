"""Block-wise cross-entropy and token log-probabilities against loops over the definition."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.tiny import V, compute_logits, make_batch, make_model, make_params
from transformer_jax.config import MeshConfig
from transformer_jax.models.likelihood import cross_entropy, label_smoothing, score_tokens, token_log_probabilities
from transformer_jax.parallel.mesh import make_mesh

B, T, D = 3, 7, 14
PADDED_ROWS = {'tie_embeddings': 'none', 'output_bias': True, 'vocab_pad_multiple': 8}


def make_case(**changes: Any) -> tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray]:
    model = make_model(**changes)
    rng = np.random.default_rng(0)
    hidden, targets = rng.normal(size=(B, T, D)), rng.integers(0, V, (B, T)).astype(np.int32)
    real = np.arange(T) < np.array([[7], [2], [5]])
    return model, make_params(model), hidden, targets, real


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=('epsilon', 'over', 'block_tokens', 'mesh'))
def compute(
    model: Any, params: Any, hidden: Any, targets: Any, real: Any, *, epsilon: float = 0.1, over: str = 'all',
    block_tokens: int = 4, mesh: Any = None,
) -> Any:  # fmt: skip
    def loss(params: Any, hidden: Any) -> Any:
        return cross_entropy(
            model, params, hidden, targets, real,
            smoothing=label_smoothing(epsilon, V, over), block_tokens=block_tokens, mesh=mesh,
        )  # fmt: skip

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)


def to_logits(model: Any, params: Any, hidden: np.ndarray) -> np.ndarray:
    params = oracles.to_float64(params)
    table = params['output_table'] if model.config.tie_embeddings == 'none' else params['target_embedding']['table']
    return (hidden @ table.T + params.get('output_bias', 0.0))[..., :V]


@pytest.mark.parametrize('epsilon', [0.0, 0.1])
@pytest.mark.parametrize('over', ['all', 'others'])
@pytest.mark.parametrize('changes', [{}, PADDED_ROWS], ids=['tied', 'padded rows'])
def test_sums_equal_the_loops(epsilon: float, over: str, changes: dict[str, Any]) -> None:
    model, params, hidden, targets, real = make_case(**changes)
    (loss, nll), _ = compute(model, params, jnp.float32(hidden), targets, real, epsilon=epsilon, over=over)
    expected = oracles.cross_entropy(to_logits(model, params, hidden), targets, real, epsilon, over=over)
    assert float(loss) == pytest.approx(expected[0], rel=5e-6)
    assert float(nll) == pytest.approx(expected[1], rel=5e-6)


@pytest.mark.parametrize('factor', [1.0, 300.0])
@pytest.mark.parametrize(
    ('changes', 'num_devices'),
    [({}, 1), (PADDED_ROWS, 1), (PADDED_ROWS, 6)],
    ids=['tied', 'padded rows', 'padded rows on six devices'],
)
def test_gradients_equal_those_of_the_dense_formula(changes: dict[str, Any], num_devices: int, factor: float) -> None:
    """With the factor, logits of one row are so far above the gold one that their exponentials overflow."""
    model, params, hidden, targets, real = make_case(**changes)
    hidden[2] *= factor
    logits = to_logits(model, params, hidden)
    above = logits.max(axis=-1) - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    assert above[:2].max() < 10
    assert (above[2].max() > 100) == (factor > 1)
    mesh = None if num_devices == 1 else make_mesh(MeshConfig(data=3, model=2), jax.devices()[:num_devices])
    (loss, nll), (d_params, d_hidden) = compute(model, params, jnp.float32(hidden), targets, real, mesh=mesh)
    expected = oracles.cross_entropy(logits, targets, real, 0.1, over='all')
    assert (float(loss), float(nll)) == pytest.approx(expected, rel=5e-6)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    wanted = 0.9 * np.eye(V)[targets] + 0.1 / V
    d_logits = (powers / powers.sum(axis=-1, keepdims=True) - wanted) * real[..., None]
    table_name = ('output_table',) if changes else ('target_embedding', 'table')
    table, d_table = params, d_params
    for part in table_name:
        table, d_table = table[part], d_table[part]
    oracles.assert_close(d_hidden, d_logits @ np.asarray(table, np.float64)[:V])
    oracles.assert_close(d_table[:V], np.einsum('BTV,BTD->VD', d_logits, hidden))
    assert (np.asarray(d_table)[V:] == 0).all()
    if changes:
        oracles.assert_close(d_params['output_bias'][:V], d_logits.sum(axis=(0, 1)))


@pytest.mark.parametrize('block_tokens', [1, 3, 21, 64])
def test_the_block_size_changes_nothing(block_tokens: int) -> None:
    case = make_case()
    case[2][1, 4] = 0.0
    expected = compute(*case[:2], jnp.float32(case[2]), *case[3:])
    actual = compute(*case[:2], jnp.float32(case[2]), *case[3:], block_tokens=block_tokens)
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 2e-6), actual, expected)


@pytest.mark.parametrize('poison', [np.nan, np.inf, 1e30])
def test_what_stands_in_padding_never_leaks(poison: float) -> None:
    model, params, hidden, targets, real = make_case()
    dirty = np.where(real[..., None], hidden, poison)
    expected = compute(model, params, jnp.float32(hidden), targets, real)
    actual = compute(model, params, jnp.float32(dirty), np.where(real, targets, V - 1), real)
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-6), actual, expected)


def test_huge_logits_and_a_batch_of_padding_stay_finite() -> None:
    model, params, hidden, targets, real = make_case()
    (loss, nll), gradients = compute(model, params, jnp.float32(hidden * 1e4), targets, real)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, nll, gradients)))
    assert float(nll) > 1e3
    (loss, nll), gradients = compute(model, params, jnp.float32(hidden), targets, np.zeros_like(real))
    assert loss == nll == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_token_log_probabilities_are_those_of_the_softmax() -> None:
    model = make_model()
    params = make_params(model)
    batch = make_batch([7, 4, 1], [5, 2, 6], pads=(2, 1))
    actual = jax.jit(lambda batch: token_log_probabilities(model, params, batch, block_tokens=4))(batch)
    logits = np.asarray(compute_logits(model, params, batch), np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(log_softmax, batch.targets[..., None], axis=-1)[..., 0]
    oracles.assert_close(actual, np.where(batch.target_segment_ids > 0, expected, 0.0))


class Finished:
    """A model whose states before the projection are given."""

    def __init__(self, model: Any, hidden: Any) -> None:
        self._model, self._hidden = model, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, params: Any, batch: Any, *, dropout_rng: Any = None) -> Any:
        return self._hidden


def round_to_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.float64(jnp.bfloat16(leaf)), tree)


@pytest.mark.parametrize('size', [1.0, 1e4])
@pytest.mark.parametrize('num_devices', [1, 6])
def test_bfloat16_states_are_scored_in_float32(num_devices: int, size: float) -> None:
    """As float64 does of the same rounded arrays; logits of ten thousand as well."""
    model, params, hidden, targets, real = make_case(compute_dtype='bfloat16', **PADDED_ROWS)
    params = params | {'output_bias': jnp.float32(round_to_bfloat16(params['output_bias']))}
    products = to_logits(model, round_to_bfloat16(params), hidden) - np.asarray(params['output_bias'])[:V]
    hidden = jnp.bfloat16(hidden * (size / np.abs(products).max()))
    logits = to_logits(model, round_to_bfloat16(params), np.float64(hidden))
    assert 0.9 * size - 1 < np.abs(logits).max() < 1.1 * size + 1
    mesh = None if num_devices == 1 else make_mesh(MeshConfig(data=3, model=2), jax.devices()[:num_devices])
    (loss, nll), gradients = compute(model, params, hidden, targets, real, mesh=mesh)
    assert loss.dtype == nll.dtype == jnp.float32
    expected = oracles.cross_entropy(logits, targets, real, 0.1)
    assert (float(loss), float(nll)) == pytest.approx(expected, rel=1e-4)
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(gradients))
    batch = make_batch([1] * B, [T] * B)._replace(targets=targets, target_segment_ids=real.astype(np.int32))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        scores = jax.jit(lambda batch: score_tokens(Finished(model, hidden), params, batch, block_tokens=4))(batch)
        projected = jax.jit(model.project)(params, hidden)
    top = logits.max(axis=-1, keepdims=True)
    log_softmax = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    gold = np.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
    assert scores.log_probabilities.dtype == projected.dtype == jnp.float32
    oracles.assert_close(scores.log_probabilities, np.where(real, gold, 0), 1e-4)
    np.testing.assert_array_equal(scores.correct, real & (logits.argmax(axis=-1) == targets))
    oracles.assert_close(projected[..., :V], logits, 1e-4)


def test_a_bfloat16_batch_of_padding_scores_nothing() -> None:
    model, params, hidden, targets, real = make_case(compute_dtype='bfloat16')
    nothing = np.zeros_like(real)
    spoiled = jnp.full(hidden.shape, jnp.nan, jnp.bfloat16)
    (loss, nll), gradients = compute(model, params, spoiled, targets, nothing)
    assert loss == nll == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))
    batch = make_batch([1] * B, [T] * B)._replace(targets=targets, target_segment_ids=nothing.astype(np.int32))
    scores = jax.jit(lambda batch: score_tokens(Finished(model, spoiled), params, batch, block_tokens=4))(batch)
    assert (np.asarray(scores.log_probabilities) == 0).all()
    assert not np.asarray(scores.correct).any()
