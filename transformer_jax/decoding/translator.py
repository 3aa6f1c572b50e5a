"""Text in, text out: the translations of a list of lines, in its order, one for each."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transformer_jax.config import ConfigError, DecodingConfig
from transformer_jax.data.batch import Batch
from transformer_jax.data.vocabulary import Vocabulary
from transformer_jax.decoding import sizes
from transformer_jax.decoding.beam import Beam
from transformer_jax.decoding.candidates import Specials
from transformer_jax.decoding.greedy import Greedy
from transformer_jax.decoding.hypotheses import Method, StopRule, Traced
from transformer_jax.decoding.length_penalty import LengthPenalty
from transformer_jax.decoding.opened_run import open_run
from transformer_jax.decoding.requests import Request, group_requests, seed_of
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Searcher
from transformer_jax.decoding.width import check_count, check_width
from transformer_jax.models.interface import Model
from transformer_jax.models.likelihood import token_log_probabilities
from transformer_jax.shapes import Params, PRNGKey


@dataclass(frozen=True)
class Translation:
    """One output of a model.

    A forced prefix is part of `text` and `ids`, but is not scored: `log_probability`, `score` and `length` are those of
    what the model chose itself.
    """

    text: str
    ids: tuple[int, ...]  # subwords without eos
    log_probability: float  # natural; the sum over the scored subwords, eos among them
    score: float  # log_probability over the length penalty of `length`
    length: int  # scored subwords, eos among them
    finished: bool  # False: cut by the limit on length, without eos


@dataclass
class Counts:
    """What a translator has met so far."""

    lines: int = 0
    blank: int = 0  # not decoded: the translation is blank
    cut: int = 0  # sources longer than the model can read
    unfinished: int = 0  # best translations that the limit on length cut


class Translator:
    """A model with the vocabulary and settings to translate by. Programs are compiled when first needed and kept."""

    def __init__(
        self,
        model: Model,
        params: Params,
        vocabulary: Vocabulary,
        config: DecodingConfig,
        *,
        report: Callable[[str], None] = print,
        num_workers: int = 2,
    ):
        """`report` is told what was cut; `num_workers` batches are searched at the same time.

        Two batches keep the cores of a CPU busier than one, whose many small operations run on one core each. Raises
        `ConfigError` for settings that can not be met.
        """
        if vocabulary.size != model.vocab_size:
            raise ConfigError(f'the vocabulary has {vocabulary.size} subwords, the model {model.vocab_size}')
        if config.min_length >= model.max_length:
            raise ConfigError(
                f'config.decoding.min_length is {config.min_length}; with eos that is above the longest output of the '
                f'model, config.model.max_length {model.max_length}'
            )
        check_width(model, config)
        self._penalty = LengthPenalty(config.length_penalty, config.alpha)
        self._penalty.check(model.max_length)
        self.model = model
        self.params = jax.device_put(params)
        self.vocabulary = vocabulary
        self.config = config
        self.counts = Counts()
        self._report = report
        self._num_workers = num_workers
        specials = (vocabulary.pad_id, vocabulary.bos_id, model.start_id)
        forbidden = {token for token in specials if token is not None} - {vocabulary.eos_id}
        self._specials = Specials(vocabulary.eos_id, tuple(sorted(forbidden)))
        self._searchers: dict[int, Searcher] = {}
        self._score_batch = jax.jit(lambda params, batch: token_log_probabilities(model, params, batch))

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: str | int | None = None,
        report: Callable[[str], None] = print,
        num_workers: int = 2,
        **decoding: Any,
    ) -> 'Translator':
        """The translator of a run folder.

        `checkpoint` is as in `OpenedRun.load_params`: a step, 'best', 'latest' or a folder; None takes the best.
        Further arguments replace fields of the run's `config.decoding`, such as `beam_size=8`.
        """
        run = open_run(run_dir, {f'decoding.{name}': value for name, value in decoding.items()})
        params, _ = run.load_params(checkpoint, report=report)
        return cls(run.model, params, run.vocabulary, run.config.decoding, report=report, num_workers=num_workers)

    @property
    def num_programs(self) -> int:
        """How many search programs were compiled so far."""
        return sum(searcher.num_programs() for searcher in self._searchers.values())

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
        _require_lines(texts=texts, prefixes=prefixes)
        if prefixes is not None and len(prefixes) != len(texts):
            raise ValueError(f'there are {len(prefixes)} prefixes for {len(texts)} lines')
        before = Counts(**vars(self.counts))
        requests = self._make_requests(texts, prefixes)
        results: list[list[Translation]] = [[] for _ in texts]
        searcher = self._searcher(n)
        rng = jax.random.key(0) if rng is None else rng
        batches = group_requests(requests, self.config.batch_size)

        def search(batch: list[int]) -> list[list[Traced]]:
            rows = sizes.fit_rows(len(batch), self.config.batch_size)
            return searcher.run(self.params, [requests[line] for line in batch], rows, rng)

        with ThreadPoolExecutor(self._num_workers) as workers:
            for batch, found in zip(batches, workers.map(search, batches), strict=True):
                for line, traced in zip(batch, found, strict=True):
                    results[line] = self._finish(requests[line], traced[:n], line)
        self.counts.unfinished += sum(not best[0].finished for best in results if best)
        self._report_since(before)
        return results

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[Translation]:
        """Each target as a translation of its source, teacher-forced; every subword and eos are scored.

        A source too long for the model is cut and counted; a target too long raises `ValueError`.
        """
        _require_lines(sources=sources, targets=targets)
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

    def _searcher(self, n: int) -> Searcher:
        if n not in self._searchers:
            method = self._method(n)
            stop = StopRule(self.config.stop)
            num_best = n if stop.kind == 'exact' else method.num_hypotheses
            self._searchers[n] = Searcher(self.model, method, self._specials, self._penalty, stop, num_best=num_best)
        return self._searchers[n]

    def _method(self, n: int) -> Method:
        config = self.config
        if config.method == 'greedy':
            return Greedy()
        if config.method == 'beam':
            return Beam(config.beam_size)
        if config.method == 'sampling':
            return Sampling(n, config.temperature, config.top_k, config.top_p)
        raise ConfigError(f'config.decoding.method is {config.method!r}; it must be greedy, beam or sampling')

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

    def _require_fits(self, length: int, name: str, line: int) -> None:
        if length > self.model.max_length:
            raise ValueError(
                f'the {name} of line {line + 1} has {length:,} subwords with eos; the longest that the model can hold '
                f'is config.model.max_length, {self.model.max_length:,}'
            )

    def _finish(self, request: Request, traced: list[Traced], line: int) -> list[Translation]:
        if not traced or any(np.isnan(one.log_probability) for one in traced):
            raise ValueError(f'the model gives no finite probabilities for line {line + 1}; are its parameters finite?')
        ids = [request.prefix + one.tokens for one in traced]
        texts = self.vocabulary.decode(ids)
        return [
            Translation(text, whole, one.log_probability, self._score(one.log_probability, one.length), one.length,
                        one.is_finished)
            for text, whole, one in zip(texts, ids, traced, strict=True)
        ]  # fmt: skip

    def _score(self, log_probability: float, length: int) -> float:
        return log_probability / float(self._penalty(length))

    def _report_since(self, before: Counts) -> None:
        if cut := self.counts.cut - before.cut:
            self._report(f'{_lines(cut)} longer than {self.model.max_length:,} subwords with eos and cut to that')
        if unfinished := self.counts.unfinished - before.unfinished:
            self._report(f'{_lines(unfinished)} given a translation that the limit on length cut')


def _require_lines(**arguments: Sequence[str] | None) -> None:
    """A text is a sequence of texts to Python, and would be translated letter by letter."""
    for name, lines in arguments.items():
        if isinstance(lines, str | bytes):
            raise TypeError(f'{name} is the one text {lines!r:.60}; it must be a list of texts, as [{lines!r:.60}]')


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
