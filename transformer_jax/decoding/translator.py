"""Text in, text out: the translations of a list of lines, in its order, one for each."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from transformer_jax.data.batch import Batch
from transformer_jax.decoding import sizes
from transformer_jax.decoding.requests import Request, seed_of
from transformer_jax.decoding.text_search import Counts, TextSearch, Translation, require_lines
from transformer_jax.decoding.width import check_count
from transformer_jax.models.likelihood import token_log_probabilities
from transformer_jax.shapes import Array, Params, PRNGKey

__all__ = ['Counts', 'Translation', 'Translator']


class Translator(TextSearch):
    """A model with the vocabulary and settings to translate by. Programs are compiled when first needed and kept."""

    ability = 'translates'

    @functools.cached_property
    def _score_batch(self) -> Callable[[Params, Batch], Array]:
        return jax.jit(lambda params, batch: token_log_probabilities(self.model, params, batch))

    def translate(
        self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None, rng: PRNGKey | None = None
    ) -> list[str]:
        """The best translation of each line; blank lines stay blank. See `translate_n_best`."""
        best = self.translate_n_best(texts, 1, prefixes=prefixes, rng=rng)
        return [translations[0].text if translations else '' for translations in best]

    def translate_n_best(
        self, texts: Sequence[str], n: int, *, prefixes: Sequence[str] | None = None, rng: PRNGKey | None = None
    ) -> list[list[Translation]]:
        """The `n` best translations of each line, best first; none for a blank line.

        Beam: `n` different sequences of subwords, finished ones before unfinished, at most `beam_size`; fewer only
        where no more exist within the limit on length. Sampling: `n` draws. `prefixes` are texts that the translations
        must start with, '' for none. `rng` (default: key 0) makes the draws of sampling; a line's draws do not depend
        on its neighbours or its place. Raises `ValueError` for an `n` that the method can not give, and `TypeError` for
        a single text in the place of a list.
        """
        check_count(n, self.config)
        require_lines(texts=texts, prefixes=prefixes)
        if prefixes is not None and len(prefixes) != len(texts):
            raise ValueError(f'there are {len(prefixes)} prefixes for {len(texts)} lines')
        before = Counts(**vars(self.counts))
        results = self._search(self._make_requests(texts, prefixes), len(texts), n, rng)
        self._report_since(before)
        return results

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[Translation]:
        """Each target as a translation of its source, teacher-forced; every subword and eos are scored.

        A source too long for the model is cut and counted; a target too long raises `ValueError`.
        """
        require_lines(sources=sources, targets=targets)
        if len(sources) != len(targets):
            raise ValueError(f'there are {len(sources)} sources and {len(targets)} targets')
        before = Counts(**vars(self.counts))
        eos = self.vocabulary.eos_id
        source_ids = [self._cut([*ids, eos]) for ids in self.vocabulary.encode_source(sources)]
        target_ids = [[*ids, eos] for ids in self.vocabulary.encode_target(targets)]
        for line, ids in enumerate(target_ids):
            self._require_fits(len(ids), 'target', line)
        self.counts.lines += len(sources)
        order = sorted(range(len(sources)), key=lambda line: (len(target_ids[line]), len(source_ids[line])))
        sums = np.zeros(len(sources))
        size = self.config.batch_size
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            rows = sizes.fit_rows(len(batch), size)
            inputs, targets_ = ([ids[line] for line in batch] for ids in (source_ids, target_ids))
            scored = self._score_batch(self.params, _pad_pairs(inputs, targets_, rows, self.vocabulary.pad_id))
            sums[batch] = np.asarray(scored, np.float64)[: len(batch)].sum(axis=1)
        self._report_since(before)
        return [
            Translation(text, tuple(ids[:-1]), float(total), self._score(float(total), len(ids)), len(ids), True)
            for text, ids, total in zip(targets, target_ids, sums, strict=True)
        ]

    def _make_requests(self, texts: Sequence[str], prefixes: Sequence[str] | None) -> dict[int, Request]:
        """By line number from 0; blank lines have none."""
        config, model = self.config, self.model
        sources = self.vocabulary.encode_source(texts)
        forced = self.vocabulary.encode_target(prefixes) if prefixes is not None else [[]] * len(texts)
        requests: dict[int, Request] = {}
        seen: Counter[tuple] = Counter()
        for line, (text, ids, prefix) in enumerate(zip(texts, sources, forced, strict=True)):
            self.counts.lines += 1
            if not text.strip() or not ids:
                self.counts.blank += 1
                continue
            source = tuple(self._cut([*ids, self.vocabulary.eos_id]))
            self._require_fits(len(prefix) + 1, 'prefix', line)
            longest = max(len(source) + config.max_extra_length, config.min_length + 1)
            limit = max(min(longest, model.max_length) - len(prefix), 1)
            content = (source, tuple(prefix))
            requests[line] = Request(
                *content, limit, max(config.min_length - len(prefix), 0), seed=seed_of(content, seen[content])
            )
            seen[content] += 1
        return requests

    def _cut(self, source: list[int]) -> list[int]:
        """A source with eos, shortened to what the model can read."""
        if len(source) <= self.model.max_length:
            return source
        self.counts.cut += 1
        return [*source[: self.model.max_length - 1], self.vocabulary.eos_id]

    def _report_since(self, before: Counts) -> None:
        if cut := self.counts.cut - before.cut:
            self._report(f'{_lines(cut)} longer than {self.model.max_length:,} subwords with eos and cut to that')
        if unfinished := self.counts.unfinished - before.unfinished:
            self._report(f'{_lines(unfinished)} given a translation that the limit on length cut')


def _lines(count: int) -> str:
    return f'{count:,} source {"line was" if count == 1 else "lines were"}'


def _pad_pairs(sources: list[list[int]], targets: list[list[int]], rows: int, pad_id: int) -> Batch:
    def pad(lines: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        length = sizes.round_length(max(map(len, lines)))
        ids = np.full((rows, length), pad_id, np.int32)
        segments = np.zeros((rows, length), np.int32)
        for row, line in enumerate(lines):
            ids[row, : len(line)] = line
            segments[row, : len(line)] = 1
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
        return ids, segments, positions * segments

    inputs, input_segments, input_positions = pad(sources)
    outputs, output_segments, output_positions = pad(targets)
    return Batch(inputs, outputs, input_segments, output_segments, input_positions, output_positions)
