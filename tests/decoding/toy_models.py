"""A model small enough to list all of its outputs, and the vocabulary it speaks.

The next subword's logits are looked up by sentence, position and the last two subwords, so that a search which mixes up
sentences, positions or the pasts of its hypotheses gets other numbers.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import DecodingConfig
from transformer_jax.data.batch import Batch
from transformer_jax.data.vocabulary import Vocabulary
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.interface import TRANSLATION

PAD, EOS, UNK, BOS = 0, 1, 2, 3


class TableCache(NamedTuple):
    sentence: Any  # [B], which table
    tokens: Any  # [B, W, L], read so far
    num_read: Any  # [B], real tokens; slots may be more
    last_two: Any  # [B, W, 2]
    next_slot: Any  # []


@dataclass(frozen=True)
class TableModel:
    """Parameters: a table `[sentences, positions, V, V, V]` of logits; a source picks its sentence by a hash."""

    vocab_size: int = 6
    max_length: int = 64
    num_positions: int = 7
    num_sentences: int = 5
    start_id: int = BOS
    scale: float = 1.5
    task = TRANSLATION
    traced: list[str] = field(default_factory=list, compare=False)  # names of the methods, as often as traced

    def init(self, rng):
        V = self.vocab_size
        shape = (self.num_sentences, self.num_positions, V, V, V)
        return {'table': self.scale * jax.random.normal(rng, shape)}

    def logical_axes(self):
        return {'table': (None,) * 5}

    def sentence_of(self, inputs, segment_ids):
        weights = np.arange(1, inputs.shape[1] + 1)[None] * (segment_ids > 0)
        return (inputs * weights).sum(1) % self.num_sentences

    def encode(self, params, inputs, segment_ids, positions):
        self.traced.append('encode')
        return self.sentence_of(inputs, segment_ids)

    def init_decode(self, params, memory, max_length):
        B = memory.shape[0]
        return TableCache(memory, jnp.zeros((B, 1, max_length), jnp.int32), jnp.zeros(B, jnp.int32),
                          jnp.zeros((B, 1, 2), jnp.int32), jnp.zeros((), jnp.int32))  # fmt: skip

    def _look_up(self, params, sentence, positions, before, last):
        return params['table'][sentence, positions % self.num_positions, before, last]

    def prefill(self, params, tokens, lengths, cache):
        self.traced.append('prefill')
        B, P = tokens.shape
        before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        positions = jnp.broadcast_to(jnp.arange(P), (B, P))
        logits = self._look_up(params, cache.sentence[:, None], positions, before, tokens)
        stored = cache.tokens.at[:, 0, :P].set(tokens)
        ends = (lengths - 1)[:, None]
        last_two = jnp.concatenate([jnp.take_along_axis(before, ends, 1), jnp.take_along_axis(tokens, ends, 1)], 1)
        return logits, cache._replace(
            tokens=stored, num_read=lengths, last_two=last_two[:, None], next_slot=jnp.asarray(P, jnp.int32)
        )

    def broadcast(self, cache, num_hypotheses):
        def spread(leaf):
            return jnp.repeat(leaf, num_hypotheses, axis=1)

        return cache._replace(tokens=spread(cache.tokens), last_two=spread(cache.last_two))

    def decode_step(self, params, tokens, cache):
        self.traced.append('decode_step')
        positions = cache.num_read[:, None]
        before = cache.last_two[..., 1]
        logits = self._look_up(params, cache.sentence[:, None], positions, before, tokens)
        stored = jax.lax.dynamic_update_slice(cache.tokens, tokens[:, :, None], (0, 0, cache.next_slot))
        # A slot beyond the last one is clamped by the update: make the fault visible.
        logits = jnp.where(cache.next_slot < cache.tokens.shape[2], logits, jnp.nan)
        return logits, cache._replace(
            tokens=stored, num_read=cache.num_read + 1, last_two=jnp.stack([before, tokens], -1),
            next_slot=cache.next_slot + 1,
        )  # fmt: skip

    def reorder(self, cache, parents):
        def move(leaf):
            return jnp.take_along_axis(leaf, parents[..., None], axis=1)

        return cache._replace(tokens=move(cache.tokens), last_two=move(cache.last_two))

    def select(self, cache, sentences):
        return jax.tree.map(lambda leaf: leaf[sentences] if leaf.ndim else leaf, cache)

    def grow(self, cache, max_length):
        more = max_length - cache.tokens.shape[2]
        return cache._replace(tokens=jnp.pad(cache.tokens, ((0, 0), (0, 0), (0, more))))

    def hidden(self, params, batch: Batch, *, dropout_rng=None):
        last = jnp.where(batch.target_positions == 0, self.start_id, jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0))))
        before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
        sentence = self.sentence_of(batch.inputs, batch.input_segment_ids)
        return self._look_up(params, sentence[:, None], batch.target_positions, before, last)

    def project(self, params, hidden):
        return hidden


class WordVocabulary(Vocabulary):
    """Words are spelled by their ids: 'w4 w5'. Specials are pad 0, eos 1, unk 2, bos 3."""

    kind = 'words'
    pad_id, eos_id, unk_id, bos_id, start_id = PAD, EOS, UNK, BOS, BOS
    fingerprint = 'words'

    def __init__(self, size: int):
        self.size = size

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word[1:]) for word in text.split()] for text in texts]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_source(texts)

    def piece(self, token: int) -> str:
        return f'w{token}'

    def files(self) -> dict[str, bytes]:
        return {}

    def _join(self, ids: list[int]) -> str:
        return ' '.join(map(self.piece, ids))


def list_outputs(
    model: TableModel, params: Any, sentence: int, longest: int, *, min_length: int = 0, prefix: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], float, int, bool]]:
    """Every output by brute force: (subwords, log probability, scored length with eos, ended), in float64.

    `longest` counts the scored subwords with eos. Outputs that reach it without eos are listed as not ended.
    """
    table = np.asarray(params['table'], np.float64)
    log_p = table - np.log(np.exp(table).sum(-1, keepdims=True))
    forbidden = {PAD, BOS, model.start_id}
    found = []

    def extend(tokens: tuple[int, ...], total: float) -> None:
        past = (0, model.start_id, *prefix, *tokens)
        row = log_p[sentence, (len(past) - 2) % model.num_positions, past[-2], past[-1]]
        for token in range(model.vocab_size):
            if token in forbidden:
                continue
            value = total + row[token]
            if token == EOS:
                if len(tokens) >= min_length:
                    found.append((tokens, value, len(tokens) + 1, True))
            elif len(tokens) + 1 == longest:
                found.append(((*tokens, token), value, longest, False))
            else:
                extend((*tokens, token), value)

    extend((), 0.0)
    return found


def make_translator(model: TableModel, params: Any, *, longest: int | None = None, **settings: Any) -> Translator:
    """A translator that reports nothing; `longest` replaces the model's limit on length.

    Small batches and short outputs unless `settings` say otherwise, so that few programs are compiled.
    """
    if longest is not None:
        model = dataclasses.replace(model, max_length=longest)
    vocabulary = WordVocabulary(model.vocab_size)
    return Translator(
        model,
        params,
        vocabulary,
        DecodingConfig(**{'batch_size': 8, 'max_extra_length': 8} | settings),
        report=lambda line: None,
    )


def sentence_of(model: TableModel, source: str) -> int:
    """The table that a source picks."""
    ids = [int(word[1:]) for word in source.split()] + [EOS]
    return sum(token * place for place, token in enumerate(ids, 1)) % model.num_sentences


def random_sources(count: int, seed: int, *, longest: int = 9, vocab_size: int = 6) -> list[str]:
    """Distinct random sources of 1 to `longest` words."""
    rng = np.random.default_rng(seed)
    sources: dict[str, None] = {}
    while len(sources) < count:
        sources[' '.join(f'w{word}' for word in rng.integers(2, vocab_size, rng.integers(1, longest + 1)))] = None
    return list(sources)


def divisor(kind: str, alpha: float, length: int) -> float:
    """The documented length penalty."""
    return ((5 + length) / 6) ** alpha if kind == 'gnmt' else float(length) ** alpha
