"""Reading a target step by step through the cache equals reading it at once, whatever the search does in between."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG, START, VARIANTS, V, compute_logits, make_batch, make_model, make_params
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionOverlayConfig
from transformer_jax.data.batch import Batch
from transformer_jax.layers.kv_cache import Reading, empty_key_values
from transformer_jax.models.interface import Model

SOURCES = [7, 4, 1, 5]
STEPS = 6

encode = jax.jit(lambda model, *args: model.encode(*args), static_argnums=0)
init_decode = jax.jit(lambda model, *args: model.init_decode(*args), static_argnums=(0, 3))
prefill = jax.jit(lambda model, *args: model.prefill(*args), static_argnums=0)
decode_step = jax.jit(lambda model, *args: model.decode_step(*args), static_argnums=0)
reorder = jax.jit(lambda model, *args: model.reorder(*args), static_argnums=0)


class Search:
    """A decode beside a plain record of what each hypothesis has read; `check` compares the two."""

    def __init__(
        self,
        model: Model,
        width: int,
        slots: int,
        *,
        limit: float = 1e-5,
        seed: int = 0,
        factor: float = 1.0,
        spoil_padding: bool = False,
    ) -> None:
        self.model, self.limit = model, limit
        self.params = jax.tree.map(lambda leaf: leaf * factor, make_params(model))
        self.source = make_batch(SOURCES, [1] * len(SOURCES), pads=(2, 0))
        self.rng = np.random.default_rng(seed)
        source = self.source
        memory = encode(model, self.params, source.inputs, source.input_segment_ids, source.input_positions)
        if spoil_padding:
            real = source.input_segment_ids > 0
            assert not real.all()
            memory = jax.tree.map(
                lambda leaf: jnp.where(real[..., None], leaf, jnp.nan) if leaf.ndim == 3 else leaf, memory
            )
        self.cache = init_decode(model, self.params, memory, slots)
        self.sentences = list(range(len(SOURCES)))
        self.histories: list[list[list[int]]] = [[[]] for _ in SOURCES]  # sentence, hypothesis, tokens read
        if width > 1:
            self.broadcast(width)

    def broadcast(self, width: int) -> None:
        self.cache = self.model.broadcast(self.cache, width)
        self.histories = [[list(row[0]) for _ in range(width)] for row in self.histories]

    def prefill(self, lengths: list[int]) -> None:
        tokens = self.rng.integers(3, V, (len(lengths), max(lengths)))
        tokens[:, 0] = START
        logits, self.cache = prefill(
            self.model, self.params, jnp.int32(tokens), jnp.array(lengths, jnp.int32), self.cache
        )
        for row, (length, read) in enumerate(zip(lengths, tokens.tolist(), strict=True)):
            self.histories[row] = [read[:length]]
        expected = self.expected()
        for row, length in enumerate(lengths):
            assert np.abs(np.asarray(logits)[row, :length] - expected[row][0, :length]).max() <= self.limit

    def step(self) -> None:
        width = len(self.histories[0])
        first = not self.histories[0][0]
        tokens = (
            np.full((len(self.histories), width), START)
            if first
            else self.rng.integers(3, V, (len(self.histories), width))
        )
        logits, self.cache = decode_step(self.model, self.params, jnp.int32(tokens), self.cache)
        for row, read in zip(self.histories, tokens.tolist(), strict=True):
            for history, token in zip(row, read, strict=True):
                history.append(token)
        for row, expected in enumerate(self.expected()):
            for w, history in enumerate(self.histories[row]):
                error = np.abs(np.asarray(logits)[row, w] - expected[w, len(history) - 1]).max()
                assert error <= self.limit, (row, w, error)

    def reorder(self) -> None:
        parents = self.rng.integers(0, len(self.histories[0]), (len(self.histories), len(self.histories[0])))
        self.cache = reorder(self.model, self.cache, jnp.int32(parents))
        self.histories = [[list(row[p]) for p in own] for row, own in zip(self.histories, parents, strict=True)]

    def select(self, kept: list[int]) -> None:
        self.cache = self.model.select(self.cache, jnp.array(kept, jnp.int32))
        self.histories = [[list(history) for history in self.histories[i]] for i in kept]
        self.sentences = [self.sentences[i] for i in kept]

    def expected(self) -> list[np.ndarray]:
        """Teacher-forced logits of each sentence's hypotheses, `[W, T, V]`; places not read yet are padding."""
        rows = [(s, history) for s, own in zip(self.sentences, self.histories, strict=True) for history in own]
        width = 16
        targets = np.zeros((len(rows), width), np.int32)
        segments = np.zeros_like(targets)
        for i, (_, history) in enumerate(rows):
            targets[i, : len(history) - 1] = history[1:]
            segments[i, : len(history)] = 1
        positions = np.where(segments > 0, np.arange(width), 0).astype(np.int32)
        own = [s for s, _ in rows]
        batch = Batch(
            self.source.inputs[own], targets, self.source.input_segment_ids[own], segments,
            self.source.input_positions[own], positions,
        )  # fmt: skip
        logits = np.asarray(compute_logits(self.model, self.params, batch))
        return np.split(logits, len(self.sentences))


@pytest.mark.parametrize(
    'variant', ['paper', *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != 'paper')]
)
def test_one_token_at_a_time_equals_the_whole_target(variant: str) -> None:
    search = Search(make_model(variant), width=1, slots=STEPS)
    for _ in range(STEPS):
        search.step()


def kind(name: str, **changes: Any) -> dict[str, Any]:
    return {'attention': dataclasses.replace(CONFIG.attention, kind=name, **changes)}


KINDS: dict[str, dict[str, Any]] = {
    'performer': {'decoder_self': AttentionOverlayConfig(kind='performer', num_features=11)},
    'general': kind('general', num_kv_heads=1),
    'concat': kind('concat', score_dim=11),
    'additive': kind('additive', score_dim=11),
    'low-rank memory': {'cross': AttentionOverlayConfig(kind='low_rank', rank=3)},
    'window to one side': kind('dot', window=3, window_right=1),
}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.slow if name in ('general', 'concat') else []) for name in KINDS]
)
def test_every_kind_of_attention_reads_through_the_cache(name: str) -> None:
    search = Search(make_model(num_encoder_layers=1, num_decoder_layers=1, **KINDS[name]), width=2, slots=5)
    for _ in range(5):
        search.step()
        search.reorder()


@pytest.mark.parametrize('positions', ['sinusoidal', 'learned'])
def test_a_target_as_long_as_the_model_writes(positions: str) -> None:
    """Up to its last position: the longest source of these is as long."""
    model = make_model(positions=positions, max_length=9, num_encoder_layers=1, num_decoder_layers=1)
    search = Search(model, width=1, slots=9)
    for _ in range(9):
        search.step()


def test_what_padding_of_the_memory_holds_reaches_no_step() -> None:
    search = Search(make_model('paper'), width=2, slots=STEPS, spoil_padding=True)
    for _ in range(STEPS):
        search.step()


def test_new_rows_without_a_token_are_kept_as_zeros() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 3, 5, 7)).astype(np.float32)  # B T N H
    holds = np.array([[True, True, False], [True, False, False]])
    mask = Mask(*(jnp.zeros((2, 3), jnp.int32),) * 4)
    reading = Reading(jnp.zeros((2, 3), jnp.int32), jnp.asarray(holds), mask, jnp.int32(1), num_hypotheses=1)
    spoiled = jnp.where(holds[..., None, None], rows, jnp.nan)
    kept = empty_key_values(2, 4, 5, 7, 7, jnp.dtype('float32')).write(spoiled, -spoiled, reading)
    expected = np.zeros((2, 4, 5, 7), np.float32)
    expected[:, 1:] = np.where(holds[..., None, None], rows, 0)
    np.testing.assert_array_equal(kept.keys, expected)
    np.testing.assert_array_equal(kept.values, -expected)


@pytest.mark.parametrize('variant', ['paper', 'pre-norm'])
@pytest.mark.parametrize('width', [2, 5])
def test_hypotheses_that_are_reordered_at_every_step(variant: str, width: int) -> None:
    search = Search(make_model(variant), width, slots=STEPS)
    for _ in range(STEPS):
        search.step()
        search.reorder()
        search.reorder()  # twice: the second permutes what the first made


def test_sentences_that_are_dropped_repeated_and_moved() -> None:
    search = Search(make_model(), width=3, slots=STEPS)
    search.step()
    search.reorder()
    search.step()
    search.select([3, 0, 3])
    search.step()
    search.reorder()
    search.select([1])
    search.step()


def test_a_cache_that_grows() -> None:
    search = Search(make_model(), width=3, slots=2)
    for _ in range(2):
        search.step()
        search.reorder()
    search.cache = search.model.grow(search.cache, 5)
    for _ in range(3):
        search.step()
        search.reorder()


@pytest.mark.parametrize('variant', [pytest.param('paper', marks=pytest.mark.slow), 'pre-norm'])
@pytest.mark.parametrize('lengths', [[1, 1, 1, 1], [3, 1, 4, 2]])
def test_a_forced_prefix_of_another_length_in_each_row(variant: str, lengths: list[int]) -> None:
    search = Search(make_model(variant), width=1, slots=10)
    search.prefill(lengths)
    search.step()
    search.broadcast(3)
    for _ in range(3):
        search.step()
        search.reorder()
    search.select([2, 1])
    search.step()


def test_slots_beyond_what_is_needed_change_nothing() -> None:
    search = Search(make_model(), width=2, slots=29)
    for _ in range(3):
        search.step()
        search.reorder()


def test_bfloat16_decodes_as_it_trains() -> None:
    # The largest logits are near 8, where bfloat16 steps by 0.03: 0.15 is 2e-2 of them.
    search = Search(make_model('pre-norm', compute_dtype='bfloat16'), width=2, slots=4, limit=0.15)
    for _ in range(4):
        search.step()
        search.reorder()


def test_64_bit_mode_decodes_alike() -> None:
    with jax.enable_x64(True):
        search = Search(make_model(), width=2, slots=3)
        for _ in range(3):
            search.step()
            search.reorder()


def test_reorder_moves_every_leaf_that_depends_on_the_hypothesis_and_no_other() -> None:
    search = Search(make_model(), width=3, slots=4)
    search.step()
    before, parents = search.cache, jnp.int32([[2, 0, 1]] * len(SOURCES))
    after = search.model.reorder(before, parents)
    changed = [
        jax.tree_util.keystr(path)
        for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
        if not np.array_equal(old, new)
    ]
    assert changed == ['.state.past.ancestors']  # keys and values stay where they were written


def test_what_depends_on_the_source_alone_is_held_once_a_sentence() -> None:
    narrow, wide = Search(make_model(), width=1, slots=4).cache, Search(make_model(), width=5, slots=4).cache

    def sizes(cache: Any) -> dict[str, int]:
        return {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(cache)}

    for path, size in sizes(wide).items():
        if path.startswith(('.cross', '.source')):
            assert size == sizes(narrow)[path]
        elif path.startswith(('.state.layers', '.state.past.ancestors')):
            assert size == 5 * sizes(narrow)[path]


def test_caches_refuse_what_they_can_not_do() -> None:
    search = Search(make_model(), width=2, slots=4)
    with pytest.raises(ValueError, match='2 hypotheses'):
        search.model.broadcast(search.cache, 3)
    with pytest.raises(ValueError, match='4 slots.*3'):
        search.model.grow(search.cache, 3)
