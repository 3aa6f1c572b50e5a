"""Every position scheme inside a whole encoder-decoder: with the cache, with packing, with padding on either side."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests import oracles
from tests.models.test_decoding import Search
from tests.models.tiny import compute_logits, make_batch, make_model, make_params
from transformer_jax.config import AttentionConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.positions import SCHEMES

HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5)  # an even width, as rope needs
SOURCES, TARGETS = [7, 4, 3], [5, 2, 6]


def make(scheme: str, **changes: Any) -> Model:
    settings = {'attention': HEADS, 'relative_clip': 2, 't5_buckets': 6, 't5_max_distance': 9, 'max_length': 67}
    return make_model(positions=scheme, **(settings | changes))


def some(*quick: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in SCHEMES]


@pytest.mark.slow
@pytest.mark.parametrize(('depth', 'window'), [(1, 3), (2, 3), (3, 3), (3, None)])
@pytest.mark.parametrize('scheme', SCHEMES)
def test_cached_steps_equal_the_full_pass_in_every_layer(scheme: str, depth: int, window: int | None) -> None:
    """The output of a stack of `depth` layers is what its layer `depth` makes; a window is smaller than the steps."""
    attention = dataclasses.replace(HEADS, window=window)
    search = Search(make(scheme, attention=attention, num_decoder_layers=depth), width=2, slots=6)
    for _ in range(6):
        search.step()
        search.reorder()


@pytest.mark.parametrize('scheme', some('shaw'))
def test_padding_on_either_side_and_packing_change_nothing(scheme: str) -> None:
    model = make(scheme)
    params, alone = make_params(model), make_batch(SOURCES, TARGETS)
    expected = np.asarray(compute_logits(model, params, alone))[alone.target_segment_ids > 0]
    for left, right in ((3, 17), (17, 3)):
        padded = Batch(*(np.pad(array, ((0, 0), (left, right))) for array in alone))
        got = np.asarray(compute_logits(model, params, padded))[padded.target_segment_ids > 0]
        oracles.assert_close(got, expected, 1e-5)
    packed = pack(alone)
    got = np.asarray(compute_logits(model, params, packed))[packed.target_segment_ids > 0]
    oracles.assert_close(got, expected, 1e-5)


@pytest.mark.parametrize('scheme', some('rope'))
def test_order_is_seen_and_texts_may_be_longer_than_in_training(scheme: str) -> None:
    """Of a text as long as `max_length` allows, every row is finite; other orders of it are told apart, but by none."""
    model = make(scheme)
    params, batch = make_params(model), make_batch([67], [3])
    swapped = batch._replace(inputs=batch.inputs[:, [1, 0, *range(2, 67)]])
    ours, other = (np.asarray(compute_logits(model, params, one)) for one in (batch, swapped))
    assert np.isfinite(ours).all()
    assert (np.abs(ours - other).max() > 1e-4) == (scheme != 'none')


def pack(batch: Batch) -> Batch:
    """All pairs of a batch in one row, with three columns of padding behind."""

    def side(ids: Any, segments: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pieces = [row[real > 0] for row, real in zip(np.asarray(ids), np.asarray(segments), strict=True)]
        numbers = [np.full(len(piece), place + 1) for place, piece in enumerate(pieces)]
        counts = [np.arange(len(piece)) for piece in pieces]
        joined = (np.pad(np.concatenate(each), (0, 3))[None].astype(np.int32) for each in (pieces, numbers, counts))
        ids, segments, positions = joined
        return ids, segments, positions

    inputs, targets = side(batch.inputs, batch.input_segment_ids), side(batch.targets, batch.target_segment_ids)
    return Batch(inputs[0], targets[0], inputs[1], targets[1], inputs[2], targets[2])
