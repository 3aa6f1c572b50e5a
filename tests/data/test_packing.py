"""Packing: all pairs once, rows within their room, and the same number of rows in every epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.packing import pack_pairs, reshuffle


def rows_of(packing):
    return [packing.pairs[start:end] for start, end in zip(packing.starts[:-1], packing.starts[1:], strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 23), st.integers(1, 23)), min_size=1, max_size=150),
    st.integers(0, 99),
    st.integers(0, 9),
)
def test_every_pair_once_and_every_row_has_room(lengths, seed, epoch):
    source, target = np.asarray(lengths).T
    packing = pack_pairs(source, target, max_length=23, seed=seed)
    shuffled = reshuffle(packing, source, target, seed=seed, epoch=epoch)
    assert shuffled.num_rows == packing.num_rows
    for packed in (packing, shuffled):
        assert sorted(packed.pairs) == list(range(len(lengths)))
        for row in rows_of(packed):
            assert len(row) > 0
            assert source[row].sum() <= 23
            assert target[row].sum() <= 23


def first_fit(source, target, order, room):
    """The definition: the first row with room on both sides, else a new row."""
    rows = []
    for pair in order:
        for row in rows:
            if source[row].sum() + source[pair] <= room and target[row].sum() + target[pair] <= room:
                row.append(pair)
                break
        else:
            rows.append([pair])
    return {tuple(row) for row in rows}


def test_it_is_first_fit():
    rng = np.random.default_rng(2)
    source, target = rng.integers(1, 20, (2, 211))
    packing = pack_pairs(source, target, max_length=31, seed=7)
    order = np.random.default_rng(7).permutation(211)
    assert {tuple(row) for row in rows_of(packing)} == first_fit(source, target, order, 31)


def test_rows_are_dense_with_many_open_rows():
    rng = np.random.default_rng(2)
    source, target = rng.integers(3, 40, (2, 4001))
    packing = pack_pairs(source, target, max_length=128, seed=0)
    assert (source.sum() + target.sum()) / (packing.num_rows * 256) > 0.85


def test_epochs_differ_and_repeat_themselves():
    rng = np.random.default_rng(1)
    source, target = rng.integers(3, 9, (2, 997))
    packing = pack_pairs(source, target, max_length=31, seed=0)

    def shuffle(seed, epoch):
        return reshuffle(packing, source, target, seed=seed, epoch=epoch)

    first = shuffle(0, 0)
    assert all(np.array_equal(a, b) for a, b in zip(first, shuffle(0, 0), strict=True))
    for other in (shuffle(0, 1), shuffle(1, 0)):
        same = {frozenset(row.tolist()) for row in rows_of(first)} & {frozenset(row.tolist()) for row in rows_of(other)}
        assert len(same) < 20  # of about 200 rows: pairs have other neighbours


def test_pairs_over_the_limit_are_refused():
    with pytest.raises(ValueError, match='at most 8'):
        pack_pairs(np.asarray([3]), np.asarray([9]), max_length=8, seed=0)
