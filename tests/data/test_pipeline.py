"""From prepared ids to batches: nothing lost, nothing repeated, and the order a function of one number."""

import concurrent.futures
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.data.batch import Pair
from transformer_jax.data.pipeline import TrainingBatches, batch_from_ids, evaluation_batches
from transformer_jax.data.prepared import Prepared, prepare
from transformer_jax.data.vocabulary import Vocabulary

SIZE = 997


class NumberVocabulary(Vocabulary):
    """Reads ids written as numbers, whatever they are: the pipeline must not trust its vocabulary."""

    kind = 'numbers'
    size, pad_id, eos_id, unk_id, bos_id, start_id = SIZE, 0, 1, 2, 3, 3

    def __init__(self, fingerprint: str = 'numbers'):
        self.fingerprint = fingerprint

    def encode_source(self, texts):
        return [list(map(int, text.split())) for text in texts]

    encode_target = encode_source

    def piece(self, token):
        return str(token)

    def files(self):
        return {}

    def _join(self, ids):
        return ' '.join(map(str, ids))


class NumberSource:
    """Pairs of random numbers of random length; the first two ids of a source spell the pair's id."""

    def __init__(self, count: int, seed: int = 0, longest: int = 30, fingerprint: str = 'some text'):
        rng = np.random.default_rng(seed)
        self.pairs = []
        for index in range(count):
            base = int(np.clip(rng.lognormal(2.0, 0.6), 1, longest - 3))
            lengths = np.clip(base + rng.integers(-1, 2, size=2), 0, longest - 3)
            source, target = (rng.integers(4, SIZE, size=length).tolist() for length in lengths)
            self.pairs.append(([4 + index // 900, 4 + index % 900, *source], target))
        self.content = fingerprint
        self.reads = 0

    def splits(self):
        return ('train',)

    def size(self, split):
        return len(self.pairs)

    def read(self, split) -> Iterator[Pair]:
        self.reads += 1
        for index, pair in enumerate(self.pairs):
            texts = [' '.join(map(str, ids)) for ids in pair]
            yield Pair(index, texts[0], texts[1])

    def fingerprint(self, split):
        return self.content

    def contents(self, split):
        return {'numbers': self.content}


def make_prepared(folder, source: NumberSource) -> Prepared:
    return prepare(source, 'train', NumberVocabulary(), folder, progress=False, report=lambda _: None)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> tuple[NumberSource, Prepared]:
    source = NumberSource(733)
    return source, make_prepared(tmp_path_factory.mktemp('prepared'), source)


def make_batches(prepared, *, seed=0, notes=None, batching='buckets', max_length=32, **layout) -> TrainingBatches:
    config = DataConfig(batching=batching, batch_tokens=512, max_length=max_length, num_buckets=4, prefetch=3)
    report = [].append if notes is None else notes.append
    return TrainingBatches(prepared, config, vocabulary=NumberVocabulary(), seed=seed, report=report, **layout)


def read_back(batch) -> list[tuple[list[int], list[int]]]:
    """The pairs in a batch, read from its arrays one slot at a time."""
    pairs = []
    for row in range(len(batch.inputs)):
        for segment in range(1, batch.input_segment_ids[row].max() + 1):
            sides = []
            for ids, segments, positions in (
                (batch.inputs, batch.input_segment_ids, batch.input_positions),
                (batch.targets, batch.target_segment_ids, batch.target_positions),
            ):
                places = np.flatnonzero(segments[row] == segment)
                assert np.all(np.diff(places) == 1)
                assert positions[row, places].tolist() == list(range(len(places)))
                *text, last = ids[row, places].tolist()
                assert last == 1
                sides.append(text)
            pairs.append(tuple(sides))
    return pairs


def check_batch(host_batch, source: NumberSource):
    expected = [source.pairs[index] for index in host_batch.pair_ids]
    assert read_back(host_batch.batch) == [tuple(pair) for pair in expected]
    batch = host_batch.batch
    for ids, segments in ((batch.inputs, batch.input_segment_ids), (batch.targets, batch.target_segment_ids)):
        assert np.all(ids[segments == 0] == 0)
    assert all(array.dtype == np.int32 for array in batch)
    assert host_batch.pair_ids.dtype == np.int64
    assert batch.num_target_tokens == sum(len(pair[1]) + 1 for pair in expected)


def epoch_of(batches: TrainingBatches, epoch: int) -> list:
    count = batches.batches_in_epoch(epoch)
    return [batches.batch(epoch * count + index) for index in range(count)]


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
@pytest.mark.parametrize('group, rows_multiple', [(1, 1), (3, 4)])
def test_every_pair_once_an_epoch(corpus, batching, group, rows_multiple):
    source, prepared = corpus
    batches = make_batches(prepared, batching=batching, group=group, rows_multiple=rows_multiple)
    orders, slots, real = [], 0, 0
    for epoch in (0, 1, 5):
        found = epoch_of(batches, epoch)
        assert len(found) % group == 0
        for host_batch in found:
            check_batch(host_batch, source)
            assert len(host_batch.batch.inputs) % rows_multiple == 0
            assert host_batch.batch.targets.size <= 512
        for first in range(0, len(found), group):
            shapes = {(b.batch.inputs.shape, b.batch.targets.shape) for b in found[first : first + group]}
            assert len(shapes) == 1
        orders.append(np.concatenate([host_batch.pair_ids for host_batch in found]))
        assert sorted(orders[-1]) == list(range(733))
        if epoch == 0:
            slots = sum(b.batch.inputs.size + b.batch.targets.size for b in found)
            real = sum((b.batch.input_segment_ids > 0).sum() + b.batch.num_target_tokens for b in found)
    assert batches.padding == pytest.approx(1 - real / slots)
    assert not np.array_equal(orders[0], orders[1])
    shapes = {(b.batch.inputs.shape, b.batch.targets.shape) for b in epoch_of(batches, 2)}
    assert shapes <= {((b.rows, b.source_length), (b.rows, b.target_length)) for b in batches.buckets}
    if batching == 'packing':
        assert batches.padding < 0.3
        assert len(shapes) == 1


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
def test_resuming_at_any_batch_continues_the_same_stream(corpus, batching):
    _, prepared = corpus
    batches = make_batches(prepared, batching=batching, seed=5)
    count = batches.batches_in_epoch()
    total = 3 * count + 2
    uncut = [b.pair_ids.tolist() for b in itertools.islice(batches.iterate(0), total)]
    for start in (1, count - 1, count, count + 1, 2 * count - 1, 2 * count, 3 * count):
        resumed = make_batches(prepared, batching=batching, seed=5)  # as a new process would
        assert resumed.locate(start) == (start // count, start % count)
        found = [b.pair_ids.tolist() for b in itertools.islice(resumed.iterate(start), total - start)]
        assert found == uncut[start:]


def test_the_seed_decides_and_threads_do_not(corpus, monkeypatch):
    _, prepared = corpus

    def stream(seed, threads):
        monkeypatch.setattr('transformer_jax.data.pipeline._READ_THREADS', threads)
        batches = make_batches(prepared, seed=seed)
        return [b.pair_ids.tolist() for b in itertools.islice(batches.iterate(0), 2 * batches.batches_in_epoch())]

    assert stream(1, 1) == stream(1, 2) == stream(1, 7)
    assert stream(1, 2) != stream(2, 2)


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
def test_hosts_take_the_same_shape_and_share_out_the_rows(corpus, batching):
    source, prepared = corpus
    whole = make_batches(prepared, batching=batching, rows_multiple=4)
    hosts = [
        make_batches(prepared, batching=batching, rows_multiple=4, host_index=index, num_hosts=2) for index in (0, 1)
    ]
    for index in range(whole.batches_in_epoch() + 2):
        expected, parts = whole.batch(index), [host.batch(index) for host in hosts]
        for part in parts:
            check_batch(part, source)
        assert np.array_equal(np.concatenate([part.pair_ids for part in parts]), expected.pair_ids)
        for array, *shares in zip(expected.batch, *(part.batch for part in parts), strict=True):
            assert shares[0].shape == shares[1].shape
            assert np.array_equal(np.concatenate(shares), array)


def test_an_impossible_host_layout_is_refused(corpus):
    for index, multiple in ((2, 2), (0, 3)):
        with pytest.raises(ValueError, match=f'host {index} of 2'):
            make_batches(corpus[1], host_index=index, num_hosts=2, rows_multiple=multiple)


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
def test_long_pairs_are_dropped_counted_and_reported(corpus, batching):
    source, prepared = corpus
    notes = []
    batches = make_batches(prepared, batching=batching, max_length=12, notes=notes)
    short = [i for i, pair in enumerate(source.pairs) if max(map(len, pair)) + 1 <= 12]
    assert 0 < batches.dropped == 733 - len(short)
    assert notes[0].startswith(f'{batches.dropped} of 733 training pairs are longer than config.data.max_length 12')
    assert sorted(np.concatenate([b.pair_ids for b in epoch_of(batches, 0)])) == short
    with pytest.raises(ConfigError, match='no training pair is within config.data.max_length 2'):
        make_batches(prepared, batching=batching, max_length=2)


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
def test_a_budget_below_one_row_a_shard_is_refused(corpus, batching):
    with pytest.raises(ConfigError, match='batch_tokens is 512, but 17 rows .*max_length 32 take 544'):
        make_batches(corpus[1], batching=batching, rows_multiple=17)


def test_stopping_early_leaves_no_thread_behind(corpus):
    before = threading.active_count()
    for _ in range(3):
        stream = make_batches(corpus[1]).iterate(7)
        next(stream)
        stream.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 1  # grain keeps one of its own


@pytest.mark.slow
def test_memory_stays_flat(corpus):
    stream = make_batches(corpus[1]).iterate(0)
    statm = Path('/proc/self/statm')
    if not statm.exists():
        pytest.skip('the size of a process is read from /proc')

    def advance(count):
        for _ in itertools.islice(stream, count):
            pass
        return int(statm.read_text().split()[1])  # resident pages

    advance(2000)
    before, after = advance(1), advance(4000)
    assert after - before < 0.02 * before


@pytest.mark.parametrize('count', [1, 7, 101])
@pytest.mark.parametrize('rows_multiple', [1, 4, 8])
def test_evaluation_sees_every_pair_once(tmp_path, count, rows_multiple):
    source = NumberSource(count, seed=count, longest=90)
    prepared = make_prepared(tmp_path, source)
    found = list(
        evaluation_batches(prepared, vocabulary=NumberVocabulary(), batch_tokens=257, rows_multiple=rows_multiple)
    )
    for host_batch in found:
        check_batch(host_batch, source)
        assert len(host_batch.batch.inputs) % rows_multiple == 0
        assert host_batch.batch.inputs.shape == host_batch.batch.targets.shape
    assert sorted(np.concatenate([b.pair_ids for b in found])) == list(range(count))
    assert len({b.batch.inputs.shape for b in found}) <= 9
    first = list(evaluation_batches(prepared, vocabulary=NumberVocabulary(), batch_tokens=257, max_pairs=5))
    assert sorted(np.concatenate([b.pair_ids for b in first])) == list(range(min(5, count)))


@pytest.mark.parametrize('batching', ['buckets', 'packing'])
def test_lengths_are_multiples_where_devices_split_them(corpus, batching):
    source, prepared = corpus
    batches = make_batches(prepared, batching=batching, max_length=31, length_multiple=4, rows_multiple=2)
    assert len(batches.buckets) == (1 if batching == 'packing' else 4)
    for bucket in batches.buckets:
        assert bucket.source_length % 4 == bucket.target_length % 4 == bucket.rows % 2 == 0
        assert bucket.rows * bucket.target_length <= 512
    seen = [pair for index in range(batches.batches_in_epoch()) for pair in batches.batch(index).pair_ids]
    assert sorted(seen) == np.flatnonzero(np.maximum(prepared.source_lengths, prepared.target_lengths) <= 31).tolist()
    check_batch(batches.batch(0), source)
    found = evaluation_batches(prepared, vocabulary=NumberVocabulary(), batch_tokens=257, length_multiple=8)
    assert {one.batch.inputs.shape[1] % 8 for one in found} == {0}


def test_evaluation_keeps_pairs_longer_than_any_budget(tmp_path):
    source = NumberSource(5)
    source.pairs[3] = ([7] * 5000, [8, 9])
    found = list(evaluation_batches(make_prepared(tmp_path, source), vocabulary=NumberVocabulary(), batch_tokens=64))
    assert sorted(np.concatenate([b.pair_ids for b in found])) == [0, 1, 2, 3, 4]
    assert max(b.batch.inputs.shape[1] for b in found) == 5001


def test_evaluation_is_shared_by_hosts(corpus):
    prepared = corpus[1]
    settings = {'vocabulary': NumberVocabulary(), 'batch_tokens': 300, 'rows_multiple': 4}
    whole = list(evaluation_batches(prepared, **settings))
    hosts = [list(evaluation_batches(prepared, **settings, host_index=index, num_hosts=2)) for index in (0, 1)]
    for expected, *parts in zip(whole, *hosts, strict=True):
        assert np.array_equal(np.concatenate([part.pair_ids for part in parts]), expected.pair_ids)
        assert np.array_equal(np.concatenate([part.batch.inputs for part in parts]), expected.batch.inputs)


def test_a_batch_is_laid_out_as_documented():
    batch = batch_from_ids(
        [[5, 6], [], [7]],
        [[8], [9, 9], []],
        vocabulary=NumberVocabulary(),
        rows=3,
        source_length=5,
        target_length=6,
        row_of=[0, 0, 2],
    )
    assert batch.inputs.tolist() == [[5, 6, 1, 1, 0], [0, 0, 0, 0, 0], [7, 1, 0, 0, 0]]
    assert batch.input_segment_ids.tolist() == [[1, 1, 1, 2, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.input_positions.tolist() == [[0, 1, 2, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert batch.targets.tolist() == [[8, 1, 9, 9, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert batch.target_segment_ids.tolist() == [[1, 1, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert batch.target_positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.integers(4, SIZE - 1), max_size=6)] * 2), max_size=9), st.integers(0, 3))
def test_batches_from_ids_read_back(pairs, empty_rows):
    batch = batch_from_ids(
        [source for source, _ in pairs],
        [target for _, target in pairs],
        vocabulary=NumberVocabulary(),
        rows=len(pairs) + empty_rows + 1,
        source_length=7,
        target_length=8,
    )
    assert read_back(batch) == pairs
    assert batch.inputs.shape == (len(pairs) + empty_rows + 1, 7)


@pytest.mark.parametrize('token', [SIZE, -1])
@pytest.mark.parametrize('side', ['source', 'target'])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, token, side):
    pairs = {'source': [[5], [6]], 'target': [[7], [8]]}
    pairs[side][1] = [9, token]
    layout = {'vocabulary': NumberVocabulary(), 'rows': 2, 'source_length': 4, 'target_length': 4}
    with pytest.raises(ValueError, match=rf'{side} 1 has the id {token}, outside the vocabulary of {SIZE}'):
        batch_from_ids(pairs['source'], pairs['target'], **layout)
    source = NumberSource(7)
    source.pairs[4] = (pairs['source'][1], pairs['target'][1])
    with pytest.raises(ValueError, match=rf'line 5 of the {side} side of the train split .* id {token}; .* 0 to 996'):
        make_prepared(tmp_path, source)
    assert not list(tmp_path.glob('train-*'))


@pytest.mark.parametrize('token', [0, 1, 3])
def test_text_that_encodes_to_a_special_is_refused(tmp_path, token):
    source = NumberSource(7)
    source.pairs[6] = ([5, token], [6])
    with pytest.raises(
        ValueError, match=f'line 7 of the source side of the train split was encoded with the id {token}'
    ):
        make_prepared(tmp_path, source)


def test_what_does_not_fit_is_refused():
    layout = {'vocabulary': NumberVocabulary(), 'rows': 2, 'source_length': 3, 'target_length': 3}
    with pytest.raises(ValueError, match='source row 1 needs 4 slots with eos; there are 3'):
        batch_from_ids([[5], [5, 6, 7]], [[5], [6]], **layout)
    with pytest.raises(ValueError, match='do not fit 2 rows'):
        batch_from_ids([[5]] * 3, [[5]] * 3, **layout)
    with pytest.raises(ValueError, match='1 sources and 2 targets'):
        batch_from_ids([[5]], [[5], [6]], **layout)


def test_prepared_ids_equal_the_text_and_are_made_once(tmp_path):
    source, notes = NumberSource(20_011), []
    vocabulary = NumberVocabulary()
    prepared = prepare(source, 'train', vocabulary, tmp_path / 'cache', progress=False, report=notes.append)
    assert prepared.num_pairs == 20_011
    for index in (0, 1, 8191, 8192, 20_010):
        assert prepared.source_ids(index).tolist() == source.pairs[index][0]
        assert prepared.target_ids(index).tolist() == source.pairs[index][1]
    assert prepared.source_lengths.tolist() == [len(pair[0]) + 1 for pair in source.pairs]
    assert prepared.target_lengths.tolist() == [len(pair[1]) + 1 for pair in source.pairs]
    assert 'prepared train: 20,011 pairs' in notes[0]
    assert prepared.source_ids(0).dtype == np.uint16
    again = prepare(source, 'train', vocabulary, tmp_path / 'cache', progress=False, report=notes.append)
    assert source.reads == 1
    assert len(notes) == 1
    assert again.target_ids(77).tolist() == source.pairs[77][1]


def test_several_starts_at_once_encode_once(tmp_path):
    source = NumberSource(3000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: make_prepared(tmp_path, source), range(4)))
    assert source.reads == 1
    assert {prepared.target_ids(2999).tolist() == source.pairs[2999][1] for prepared in made} == {True}


def test_other_text_or_another_vocabulary_is_prepared_anew(tmp_path):
    made = [
        prepare(NumberSource(3, fingerprint=text), 'train', NumberVocabulary(words), tmp_path, report=lambda _: None)
        for text in ('a', 'b')
        for words in ('c', 'd')
    ]
    assert len({prepared.folder for prepared in made}) == 4


def test_wide_vocabularies_take_wide_ids(tmp_path):
    class Wide(NumberVocabulary):
        size = 70_001

    source = NumberSource(3)
    source.pairs[1] = ([70_000, 65_536], [])
    prepared = prepare(source, 'train', Wide(), tmp_path, report=lambda _: None)
    assert prepared.source_ids(1).tolist() == [70_000, 65_536]
    assert prepared.target_lengths[1] == 1


def test_a_stopped_preparation_leaves_nothing_that_is_taken_for_done(tmp_path):
    source = NumberSource(9000)
    good, source.pairs[8999] = source.pairs[8999], ([SIZE], [])
    with pytest.raises(ValueError, match='line 9000'):
        make_prepared(tmp_path, source)
    assert not list(tmp_path.glob('train-*'))
    source.pairs[8999] = good
    assert make_prepared(tmp_path, source).source_ids(8999).tolist() == good[0]
    assert not list(tmp_path.glob('.*.writing'))


def test_a_full_disk_leaves_nothing_that_is_taken_for_done(tmp_path, files_no_longer_than):
    source = NumberSource(300)
    # Room for the offsets, 2.5 kB, and not for the ids.
    with files_no_longer_than(4000), pytest.raises(OSError, match=r'File too large.*train-'):
        make_prepared(tmp_path, source)
    assert not list(tmp_path.glob('train-*'))
    prepared = make_prepared(tmp_path, source)
    assert [prepared.target_ids(index).tolist() for index in range(300)] == [target for _, target in source.pairs]


@pytest.mark.parametrize('damage', ['cut', 'high id', 'offsets', 'description'])
def test_damaged_prepared_files_are_refused(tmp_path, damage):
    folder = make_prepared(tmp_path, NumberSource(50)).folder
    if damage == 'cut':
        content = (folder / 'target_ids').read_bytes()
        (folder / 'target_ids').write_bytes(content[:-2])
        message = 'target_ids is damaged'
    elif damage == 'high id':
        ids = np.fromfile(folder / 'source_ids', np.uint16)
        ids[0] = SIZE
        ids.tofile(folder / 'source_ids')
        message = f'line 1 of the source side of the train split has the prepared id {SIZE}, outside'
    elif damage == 'offsets':
        offsets = np.load(folder / 'source_offsets.npy')
        offsets[3], offsets[4] = offsets[4], offsets[3]
        np.save(folder / 'source_offsets.npy', offsets)
        message = 'prepared offsets are damaged'
    else:
        (folder / 'description.json').write_text(json.dumps({})[:1])
        message = 'holds no prepared ids'
    with pytest.raises(ValueError, match=message):
        Prepared(folder, NumberVocabulary())


def test_ids_that_skip_and_counts_that_lie_are_refused(tmp_path):
    source = NumberSource(5)
    source.read = lambda split: iter([Pair(0, '5', '6'), Pair(2, '5', '6')])
    with pytest.raises(ValueError, match='pair 1 of the train split has the id 2'):
        make_prepared(tmp_path, source)
    source.read = lambda split: iter([Pair(0, '5', '6')])
    with pytest.raises(ValueError, match='says it has 5 pairs and gave 1'):
        make_prepared(tmp_path, source)
    with pytest.raises(ValueError, match='must be a folder on a local disk'):
        make_prepared('gs://bucket/cache', source)
