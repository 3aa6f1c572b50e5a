"""Buckets: within the budget, little padding, every pair once an epoch, another order in each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import ConfigError
from transformer_jax.data.bucketing import (
    Bucket,
    assign_buckets,
    choose_buckets,
    move_leftovers,
    padding,
    plan_epoch,
)


def make_lengths(count: int, seed: int = 0, longest: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Caption-like lengths with eos: lognormal, means near 15, both sides correlated."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(2.62, 0.3, count)
    source, target = (np.clip(np.exp(shared + rng.normal(0, 0.12, count)), 3, longest).astype(int) for _ in range(2))
    return source, target


def count_slots(plan, buckets, group=1):
    return sum(
        buckets[index].rows * group * (buckets[index].source_length + buckets[index].target_length)
        for index in plan.buckets
    )


lengths_strategy = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)


@settings(max_examples=40, deadline=None)
@given(
    lengths_strategy, st.integers(1, 5), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 3]), st.integers(0, 99)
)
def test_every_pair_once_within_the_budget(lengths, num_buckets, rows_multiple, group, seed):
    source, target = np.asarray(lengths).T
    buckets = choose_buckets(
        source,
        target,
        batch_tokens=347,
        num_buckets=num_buckets,
        rows_multiple=rows_multiple,
        max_length=40,
        group=group,
    )
    assert 1 <= len(buckets) <= num_buckets
    for bucket in buckets:
        assert bucket.rows * bucket.target_length <= 347
        assert bucket.rows > 0
        assert bucket.rows % rows_multiple == 0
    assigned = assign_buckets(source, target, buckets)
    plans = [plan_epoch(assigned, buckets, seed=seed, epoch=epoch, group=group) for epoch in (0, 1, 7)]
    assert len({len(plan.buckets) for plan in plans}) == 1
    for plan in plans:
        assert sorted(plan.pairs) == list(range(len(lengths)))
        assert np.all(np.diff(plan.starts) > 0)
        for index, start, end in zip(plan.buckets, plan.starts[:-1], plan.starts[1:], strict=True):
            members = plan.pairs[start:end]
            assert len(members) <= buckets[index].rows * group
            assert source[members].max() <= buckets[index].source_length
            assert target[members].max() <= buckets[index].target_length


@pytest.mark.parametrize('rows_multiple', [1, 8])
def test_padding_of_captions_is_small(rows_multiple):
    source, target = make_lengths(29_000)
    buckets = choose_buckets(
        source, target, batch_tokens=4096, num_buckets=8, rows_multiple=rows_multiple, max_length=128
    )
    plan = plan_epoch(assign_buckets(source, target, buckets), buckets, seed=0, epoch=0)
    real = int(source.sum() + target.sum())
    wasted = padding(plan, buckets, real)
    assert wasted == pytest.approx(1 - real / count_slots(plan, buckets))
    assert len(buckets) <= 8
    assert wasted < 0.15


def test_buckets_are_near_the_best_of_all_on_a_small_grid():
    rng = np.random.default_rng(5)
    source, target = rng.integers(1, 7, (2, 5000))
    found = choose_buckets(source, target, batch_tokens=13, num_buckets=2, rows_multiple=1, max_length=6)

    def slots(buckets):
        plan = plan_epoch(assign_buckets(source, target, buckets), buckets, seed=0, epoch=0)
        return count_slots(plan, buckets)

    best = min(
        slots([Bucket(s, t, 13 // t), Bucket(6, 6, 2)]) for s in range(1, 7) for t in range(1, 7) if (s, t) != (6, 6)
    )
    assert slots(found) <= best


def test_pairs_go_where_they_fit_and_cost_least():
    buckets = [Bucket(5, 9, 2), Bucket(9, 5, 2), Bucket(9, 9, 2), Bucket(3, 3, 7)]
    source, target = np.asarray([(6, 5), (5, 6), (6, 6), (3, 3), (1, 7), (7, 1)]).T
    assert assign_buckets(source, target, buckets).tolist() == [1, 0, 2, 3, 0, 1]
    with pytest.raises(ValueError, match='pair 1 of lengths 2 and 10 fits no bucket'):
        assign_buckets(np.asarray([1, 2]), np.asarray([1, 10]), buckets)


def test_leftovers_ride_in_free_rows_of_larger_buckets():
    buckets = [Bucket(3, 3, 7), Bucket(5, 6, 5), Bucket(6, 5, 6)]
    assert move_leftovers(buckets, [24, 7, 6]) == [(0, 1, 3)]  # the third has no free row
    assert move_leftovers(buckets, [24, 10, 3]) == [(0, 2, 3)]
    assert move_leftovers(buckets, [21, 7, 5]) == []
    assert move_leftovers(buckets, [24, 8, 5]) == []  # no bucket has three free rows
    assert move_leftovers(buckets, [17, 8, 5], group=2) == [(0, 2, 3)]
    cheaper = [Bucket(3, 3, 10), *buckets[1:]]
    assert move_leftovers(cheaper, [23, 8, 5]) == [(0, 1, 3)]  # a batch more there takes 55 slots, here 60


def test_order_is_a_function_of_seed_and_epoch():
    source, target = make_lengths(3000)
    buckets = choose_buckets(source, target, batch_tokens=512, num_buckets=4, rows_multiple=1, max_length=50)
    assigned = assign_buckets(source, target, buckets)

    def plan(seed, epoch):
        return plan_epoch(assigned, buckets, seed=seed, epoch=epoch)

    first, again, second, other = plan(3, 0), plan(3, 0), plan(3, 1), plan(4, 0)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for changed in (second, other):
        assert not np.array_equal(first.buckets, changed.buckets)  # buckets are interleaved anew
        mates = [
            {frozenset(plan.pairs[a:b].tolist()) for a, b in zip(plan.starts[:-1], plan.starts[1:], strict=True)}
            for plan in (first, changed)
        ]
        assert len(mates[0] & mates[1]) <= 2  # batches are made of other pairs
    runs = np.count_nonzero(np.diff(first.buckets)) + 1
    assert runs > len(first.buckets) / 2


def test_a_small_corpus_gets_no_more_rows_than_it_fills():
    source, target = np.asarray([5, 7, 6, 5, 4]), np.asarray([4, 6, 8, 5, 5])
    for rows_multiple, rows in ((1, 5), (8, 8)):
        (bucket,) = choose_buckets(
            source, target, batch_tokens=4096, num_buckets=1, rows_multiple=rows_multiple, max_length=64
        )
        assert bucket == Bucket(7, 8, rows)


def test_a_budget_below_the_longest_pair_is_refused():
    source, target = make_lengths(50)
    with pytest.raises(ConfigError, match=r'batch_tokens is 1000, but 8 rows .*max_length 126 take 1008'):
        choose_buckets(source, target, batch_tokens=1000, num_buckets=3, rows_multiple=8, max_length=126)
    assert choose_buckets(source, target, batch_tokens=1008, num_buckets=3, rows_multiple=8, max_length=126)


def test_pairs_over_the_limit_are_refused():
    with pytest.raises(ValueError, match='none longer than 8'):
        choose_buckets(np.asarray([9]), np.asarray([2]), batch_tokens=99, num_buckets=1, rows_multiple=1, max_length=8)
