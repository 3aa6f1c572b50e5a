"""What translating and generating have in common: requests in, texts with their scores out."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from transformer_jax.config import ConfigError, DecodingConfig, refuse_unread
from transformer_jax.data.vocabulary import Vocabulary
from transformer_jax.decoding import sizes
from transformer_jax.decoding.beam import Beam
from transformer_jax.decoding.candidates import Specials
from transformer_jax.decoding.greedy import Greedy
from transformer_jax.decoding.hypotheses import Method, StopRule, Traced
from transformer_jax.decoding.length_penalty import LengthPenalty
from transformer_jax.decoding.opened_run import open_run
from transformer_jax.decoding.requests import Request, group_requests
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Searcher
from transformer_jax.decoding.width import check_width
from transformer_jax.models.interface import Model, Task
from transformer_jax.parallel.rules import ambient_mesh
from transformer_jax.shapes import Params, PRNGKey

_Kind = TypeVar('_Kind', bound='TextSearch')


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


class TextSearch:
    """A model with the vocabulary and settings to search by. Programs are compiled when first needed and kept.

    A subclass makes the requests, and names in `ability` the field of `Task` that its model must have.
    """

    ability = ''

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
        """`report` is told what was cut; `num_workers` batches are searched at the same time on one device.

        Two batches keep the cores of a CPU busier than one, whose many small operations run on one core each. Raises
        `ConfigError` for settings that can not be met, and for a model with another task.
        """
        require_task(model.task, self.ability)
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

    @classmethod
    def load(
        cls: type[_Kind],
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: str | int | None = None,
        report: Callable[[str], None] = print,
        num_workers: int = 2,
        **decoding: Any,
    ) -> _Kind:
        """That of a run folder.

        `checkpoint` is as in `OpenedRun.load_params`: a step, 'best', 'latest' or a folder; None takes the best.
        Further arguments replace fields of the run's `config.decoding`, such as `beam_size=8`.
        """
        run = open_run(run_dir, {f'decoding.{name}': value for name, value in decoding.items()})
        require_task(run.model.task, cls.ability)
        params, _ = run.load_params(checkpoint, report=report)
        return cls(run.model, params, run.vocabulary, run.config.decoding, report=report, num_workers=num_workers)

    @property
    def num_programs(self) -> int:
        """How many search programs were compiled so far."""
        return sum(searcher.num_programs() for searcher in self._searchers.values())

    def _search(
        self, requests: dict[int, Request], num_lines: int, n: int, rng: PRNGKey | None
    ) -> list[list[Translation]]:
        """The `n` best texts for each line, best first; none for a line without a request."""
        results: list[list[Translation]] = [[] for _ in range(num_lines)]
        searcher = self._searcher(n)
        rng = jax.random.key(0) if rng is None else rng
        batches = group_requests(requests, self.config.batch_size)

        def search(batch: list[int]) -> list[list[Traced]]:
            rows = sizes.fit_rows(len(batch), self.config.batch_size)
            return searcher.run(self.params, [requests[line] for line in batch], rows, rng)

        with ThreadPoolExecutor(self._num_workers) as workers:
            # Programs that devices run together must start in one order on all of them: one after another.
            in_order = map if ambient_mesh() is not None else workers.map
            for batch, found in zip(batches, in_order(search, batches), strict=True):
                for line, traced in zip(batch, found, strict=True):
                    results[line] = self._finish(requests[line], traced[:n], line)
        self.counts.unfinished += sum(not best[0].finished for best in results if best)
        return results

    def _searcher(self, n: int) -> Searcher:
        if n not in self._searchers:
            method = make_method(self.config, n)
            stop = StopRule(self.config.stop)
            num_best = n if stop.kind == 'exact' else method.num_hypotheses
            self._searchers[n] = Searcher(self.model, method, self._specials, self._penalty, stop, num_best=num_best)
        return self._searchers[n]

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


def check_decoding(config: DecodingConfig) -> None:
    """Raises `ConfigError` for a changed field that the method does not read (`beam_size` may stay: recipes set it)."""
    reads = {'greedy': (), 'beam': (), 'sampling': ('temperature', 'top_k', 'top_p')}
    refuse_unread(config, 'config.decoding', 'method', reads)


def make_method(config: DecodingConfig, n: int) -> Method:
    """How a search chooses when it is to give `n` texts a line."""
    if config.method == 'greedy':
        return Greedy()
    if config.method == 'beam':
        return Beam(config.beam_size)
    if config.method == 'sampling':
        return Sampling(n, config.temperature, config.top_k, config.top_p)
    raise ConfigError(f'config.decoding.method is {config.method!r}; it must be greedy, beam or sampling')


def require_task(task: Task, ability: str) -> None:
    """Raises `ConfigError` unless models of this task 'translates' or 'generates'."""
    if getattr(task, ability):
        return
    verbs = {'translates': 'translate', 'generates': 'generate'}
    instead = [verb for name, verb in verbs.items() if getattr(task, name)]
    raise ConfigError(
        f'this model was made for {task.name}, which does not {verbs[ability]}; '
        + (f'use {instead[0]}' if instead else 'use evaluate')
    )


def require_lines(**arguments: Sequence[str] | None) -> None:
    """A text is a sequence of texts to Python, and would be translated letter by letter."""
    for name, lines in arguments.items():
        if isinstance(lines, str | bytes):
            raise TypeError(f'{name} is the one text {lines!r:.60}; it must be a list of texts, as [{lines!r:.60}]')
