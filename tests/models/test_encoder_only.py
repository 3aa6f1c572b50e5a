"""Masked language modelling: what is masked, what is learned from it, and the encoder against loops."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.test_decoder_only import pack
from tests.models.tiny import V, compute_logits, make_batch, make_model, make_params
from transformer_jax.config import Config, ConfigError, EncoderOnlyConfig, EvaluationConfig, MeshConfig, TrainConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models import build, validate
from transformer_jax.models.encoder_only import mask_subwords
from transformer_jax.models.interface import Model
from transformer_jax.models.likelihood import score_tokens
from transformer_jax.overlay import load_config_file
from transformer_jax.parallel.mesh import make_mesh, place_batch
from transformer_jax.training.loss import loss_sum
from transformer_jax.training.step import _row_keys

ROOT = Path(__file__).parent.parent.parent
HALF = EncoderOnlyConfig(selected_rate=0.5)  # of rows as short as those below something is selected


def make(own: EncoderOnlyConfig = HALF, **changes: Any) -> Model:
    changes = {'positions': 'learned', 'activation': 'gelu', 'output_bias': True} | changes
    return make_model(family='encoder_only', encoder_only=own, **changes)


@functools.partial(jax.jit, static_argnums=0)
def pose(model: Model, batch: Batch, keys: Any) -> Batch:
    return model.objective(batch, keys)


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed, impl='threefry2x32'), count)


def as_jax(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def mask_many(config: EncoderOnlyConfig) -> tuple[np.ndarray, ...]:
    rows, length = 64, 257
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1009, (rows, length)).astype(np.int32)
    segments = np.where(np.arange(length) < 240, 1 + (np.arange(length) >= 100), 0) * np.ones((rows, 1), int)
    segments = segments.astype(np.int32)
    inputs, selected = jax.jit(mask_subwords, static_argnums=(3, 4))(
        jnp.asarray(ids), jnp.asarray(segments), keys(rows), config, 1009
    )
    return ids, segments, np.asarray(inputs), np.asarray(selected)


@pytest.mark.parametrize(
    'config', [EncoderOnlyConfig(), EncoderOnlyConfig(selected_rate=0.4, masked_share=0.5, random_share=0.3)]
)
def test_the_rates_of_masking(config: EncoderOnlyConfig) -> None:
    ids, segments, inputs, selected = mask_many(config)
    assert not selected[segments == 0].any()
    assert not selected[:, [99, 239]].any()  # the eos of both texts
    open_to_choice = 64 * 238

    def near(count: int, rate: float, total: int) -> bool:
        return abs(count - rate * total) < 4 * (rate * (1 - rate) * total) ** 0.5

    total = int(selected.sum())
    assert near(total, config.selected_rate, open_to_choice)
    assert near(int((inputs[selected] == 1009).sum()), config.masked_share, total)
    kept = 1 - config.masked_share - config.random_share
    assert near(int((inputs[selected] == ids[selected]).sum()), kept + config.random_share / 1009, total)
    np.testing.assert_array_equal(inputs[~selected], ids[~selected])
    drawn = inputs[selected & (inputs != 1009) & (inputs != ids)]
    assert drawn.min() < 1009 * 0.05
    assert drawn.max() > 1009 * 0.95
    assert abs(drawn.mean() / 504 - 1) < 0.15


def test_what_is_drawn_depends_on_the_row_and_the_slot_alone() -> None:
    model, batch = make(), make_batch([7, 4, 9, 6], [1] * 4)
    whole = pose(model, as_jax(batch), keys(4))
    longer = make_batch([7, 4, 9, 6], [1] * 4, pads=(5, 2))
    padded = pose(model, as_jax(longer), keys(4))
    np.testing.assert_array_equal(padded.inputs[:, :9], whole.inputs)
    np.testing.assert_array_equal(padded.target_segment_ids[:, :9], whole.target_segment_ids)
    some = pose(model, as_jax(jax.tree.map(lambda rows: rows[[2, 0]], batch)), keys(4)[jnp.array([2, 0])])
    np.testing.assert_array_equal(some.inputs, np.asarray(whole.inputs)[[2, 0]])
    other = pose(model, as_jax(batch), keys(4, seed=1))
    assert (np.asarray(other.target_segment_ids) != np.asarray(whole.target_segment_ids)).any()


def test_the_other_side_can_be_modelled() -> None:
    batch = as_jax(make_batch([2, 3], [9, 8]))
    posed = pose(make(dataclasses.replace(HALF, side='target')), batch, keys(2))
    np.testing.assert_array_equal(posed.targets, batch.targets)
    np.testing.assert_array_equal(posed.input_positions, batch.target_positions)
    np.testing.assert_array_equal(posed.input_segment_ids, batch.target_segment_ids)
    assert make(dataclasses.replace(HALF, side='target')).task.sides == ('target',)


def test_masks_do_not_depend_on_the_number_of_devices() -> None:
    model, batch = make(), make_batch([7, 4, 9, 6, 3, 5, 8, 2], [1] * 8)

    @jax.jit
    def posed(batch: Batch) -> Batch:
        return model.objective(batch, _row_keys(jax.random.key(3, impl='rbg'), 8))

    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        sharded = posed(place_batch(batch, mesh))
    np.testing.assert_array_equal(np.asarray(sharded.inputs), np.asarray(posed(as_jax(batch)).inputs))


class Loops(oracles.Transformer):
    """BERT's encoder on one row without padding."""

    def logits_of(self, ids: list[int]) -> np.ndarray:
        table = np.concatenate([self.params['target_embedding']['table'][:V], self.params['mask_embedding'][None]])
        scale = self.config.d_model**0.5 if self.config.scale_embedding else 1.0
        x = table[ids] * scale + self.params['source_positions']['table'][: len(ids)]
        if self.config.encoder_only.embedding_norm:
            x = self.normalize(self.params['embedding_norm'], x)
        x, visible = x[None], np.ones((1, len(ids), len(ids)), bool)
        for layer in self.layers('encoder', self.config.num_encoder_layers):
            x = self.join(layer, 'self_attention', x, lambda y, p: oracles.multi_head(p, y, y, visible))
            x = self.join(layer, 'feed_forward', x, lambda y, p: oracles.feed_forward(p, y, self.config.activation))
        x = self.finish('encoder', x)[0]
        if self.config.encoder_only.prediction_layer:
            dense = self.params['prediction']
            x = oracles.activate(self.config.activation, x @ dense['kernel'] + dense['bias'])
            x = self.normalize(self.params['prediction_norm'], x)
        output = self.params['target_embedding' if self.config.tie_embeddings == 'all' else 'output_table']
        output = output['table'] if isinstance(output, dict) else output
        return (x @ output.T + self.params['output_bias'])[:, :V]


@pytest.mark.parametrize(
    ('own', 'changes'),
    [
        (HALF, {}),
        (
            EncoderOnlyConfig(selected_rate=0.5, embedding_norm=False, prediction_layer=False),
            {'norm_order': 'pre', 'tie_embeddings': 'none', 'scale_embedding': False, 'vocab_pad_multiple': 8},
        ),
    ],
    ids=['bert', 'pre-norm, bare'],
)
def test_the_loss_is_of_the_selected_subwords_alone(own: EncoderOnlyConfig, changes: dict[str, Any]) -> None:
    model = make(own, **changes)
    params = make_params(model)
    posed = pose(model, as_jax(make_batch([9, 7, 8], [1] * 3, pads=(2, 0))), keys(3))
    loops = Loops(params, model.config, None)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    logits = np.zeros((*posed.inputs.shape, V))
    for row, length in enumerate([9, 7, 8]):
        logits[row, :length] = loops.logits_of(np.asarray(posed.inputs[row, :length]).tolist())
    actual = np.asarray(compute_logits(model, params, posed))
    real = np.asarray(posed.input_segment_ids) > 0
    oracles.assert_close(actual[real], logits[real])
    selected = np.asarray(posed.target_segment_ids) > 0
    assert 5 < selected.sum() < real.sum() - 5
    assert V in np.asarray(posed.inputs)[selected]
    config = TrainConfig(loss_block_tokens=5)

    @jax.jit
    def compute(params: Any, posed: Batch) -> Any:
        return jax.value_and_grad(lambda p: loss_sum(model, p, posed, config, dropout_rng=None)[0])(params)

    loss, gradients = compute(params, posed)
    expected, _ = oracles.cross_entropy(logits, np.asarray(posed.targets), selected, 0.1)
    assert float(loss) == pytest.approx(expected, rel=5e-6)
    changed = posed._replace(targets=jnp.where(selected, posed.targets, (posed.targets + 1) % V))
    again, same = compute(params, changed)
    assert float(again) == float(loss)
    jax.tree.map(np.testing.assert_array_equal, gradients, same)
    assert np.abs(gradients['mask_embedding']).max() > 0


def test_only_the_most_probable_entry_is_a_correct_prediction() -> None:
    model = make()
    params = make_params(model)
    posed = pose(model, as_jax(make_batch([9, 7, 8], [1] * 3)), keys(3))
    logits = np.asarray(compute_logits(model, params, posed))
    is_even = np.arange(9)[None] % 2 == 0
    targets = (logits.argmax(axis=2) + ~is_even) % V
    scores = jax.jit(score_tokens, static_argnums=0)(model, params, posed._replace(targets=jnp.asarray(targets)))
    selected = np.asarray(posed.target_segment_ids) > 0
    np.testing.assert_array_equal(scores.correct, selected & is_even)
    gold = np.take_along_axis(logits, targets[:, :, None], axis=2)[..., 0]
    expected = np.where(selected, gold - np.log(np.exp(logits.astype(np.float64)).sum(axis=2)), 0)
    oracles.assert_close(scores.log_probabilities, expected)


def test_packed_texts_are_as_they_are_apart() -> None:
    lengths = [(4, 3), (1, 5), (6, 2)]
    apart = make_batch(*[list(side) for side in zip(*lengths, strict=True)])
    model = make()
    params = make_params(model)
    expected = np.asarray(compute_logits(model, params, apart))
    packed = np.asarray(compute_logits(model, params, pack(apart, lengths)))[0]
    start = 0
    for row, (length, _) in enumerate(lengths):
        oracles.assert_close(packed[start : start + length], expected[row, :length])
        start += length


def test_the_page_has_the_shape_of_bert_base() -> None:
    model_config = load_config_file(f'{ROOT}/configs/encoder_only.py:size=bert_base').model
    model = build(model_config, vocab_size=30_522, start_id=0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    V_, D, F, P, L = 30_522, 768, 3072, 512, 12
    layer = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 2 * 2 * D
    count = V_ * D + P * D + 2 * D + L * layer + (D * D + D) + 2 * D + V_
    assert count + 2 * D == 109_514_298  # the published model for masked language modelling, with its 2 token types
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count + D  # and our mask symbol beside the vocabulary


def test_what_does_not_go_together_is_refused_before_tracing() -> None:
    def check(bleu: bool = False, score: str = 'loss', **changes: Any) -> None:
        model = dataclasses.replace(Config().model, family='encoder_only', **changes)
        validate(Config(model=model, evaluation=EvaluationConfig(bleu=bleu, score=score)))

    check()
    with pytest.raises(ConfigError, match=r'evaluation\.bleu is True.*masked language modelling'):
        check(bleu=True, score='bleu')
    with pytest.raises(ConfigError, match=r"tie_embeddings is 'output'"):
        check(tie_embeddings='output')
    with pytest.raises(ConfigError, match=r'masked_share 0\.8 and random_share 0\.3 .* only 0\.2 is left'):
        check(encoder_only=EncoderOnlyConfig(random_share=0.3))
