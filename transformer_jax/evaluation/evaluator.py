"""A model on a split: likelihood of what it is to predict, and scores of its translations."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from transformer_jax.data.batch import Batch, HostBatch, Pair
from transformer_jax.data.pipeline import evaluation_batches
from transformer_jax.data.prepared import Prepared
from transformer_jax.data.vocabulary import Vocabulary
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import (
    ExactMatch,
    LengthScore,
    Score,
    check_lines,
    chrf_score,
    exact_match,
    sacrebleu_score,
    scores_by_length,
    split_bleu_score,
)
from transformer_jax.models.interface import TRANSLATION, Model, abstract_params
from transformer_jax.models.likelihood import score_tokens
from transformer_jax.parallel.mesh import SEQUENCE, num_data_shards, place_batch, replicated, rows_of_process
from transformer_jax.parameters import shapes_by_name
from transformer_jax.shapes import Array, Int, Params


@dataclass(frozen=True)
class Result:
    """What one evaluation found. `scores`, `by_length` and `match` are empty and None when nothing was translated."""

    split: str
    num_pairs: int
    num_tokens: int  # that were to be predicted: target subwords with eos, or what was masked
    num_words: int  # of the raw references, split at whitespace; 0 where not all of the text was to be predicted
    nll: float  # nats, summed over these subwords; no smoothing
    num_correct: int = 0  # subwords that the model found most probable where they were to be predicted
    predicts: str = TRANSLATION.predicts  # in words: what those subwords are
    scores: tuple[Score, ...] = ()
    by_length: tuple[LengthScore, ...] = ()
    match: ExactMatch | None = None

    @property
    def loss(self) -> float:
        """Plain negative log-likelihood in nats a subword."""
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Per subword that was to be predicted, eos included where it is one."""
        return _exp(self.loss)

    @property
    def accuracy(self) -> float:
        """The share of subwords, teacher-forced or masked, that the model found most probable."""
        return self.num_correct / self.num_tokens

    @property
    def word_perplexity(self) -> float | None:
        """Per word of the raw references, so that vocabularies can be compared; None when they hold no word."""
        return _exp(self.nll / self.num_words) if self.num_words else None

    @property
    def bleu(self) -> float | None:
        """The sacreBLEU score, or None when nothing was translated."""
        return self.scores[0].value if self.scores else None

    def score(self, name: str) -> float:
        """The figure that `config.evaluation.score` names: 'loss' (less is better) or 'bleu' (more is)."""
        if name == 'loss':
            return self.loss
        if name == 'bleu' and self.bleu is not None:
            return self.bleu
        known = "'loss'" if self.bleu is None else "'loss' or 'bleu'"
        raise ValueError(f'there is no score {name!r} of the {self.split} split; it must be {known}')

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            'split': self.split,
            'num_pairs': self.num_pairs,
            'num_tokens': self.num_tokens,
            'num_words': self.num_words,
            'loss': self.loss,
            'perplexity': self.perplexity,
            'word_perplexity': self.word_perplexity,
            'accuracy': self.accuracy,
            'scores': [dataclasses.asdict(score) for score in self.scores],
            'by_length': [dataclasses.asdict(score) for score in self.by_length],
            'exact_match': None if self.match is None else dataclasses.asdict(self.match),
        }

    def format(self) -> str:
        """A few lines to read; the last ones are scores by sentence length, and exact matches by phenomenon."""
        num_words = f', {self.num_words:,} words' if self.num_words else ''
        words = '' if self.word_perplexity is None else f', {self.word_perplexity:.2f} a word'
        lines = [
            f'{self.split}: {self.num_pairs:,} pairs, {self.num_tokens:,} {self.predicts}{num_words}',
            f'NLL: {self.loss:.4f} nats a subword',
            f'perplexity: {self.perplexity:.2f} a subword{words}',
            f'accuracy: {100 * self.accuracy:.1f} % of these subwords',
            *(f'{score.name}: {score.value:.2f} ({score.signature})' for score in self.scores),
        ]
        if self.by_length:
            lines.append('by words of the source:')
            lines += [
                f'  {_words(score):<10} {score.bleu:6.2f} sacreBLEU, {score.exact_match:5.1f} % exact match of '
                f'{score.num_lines:,}'
                for score in self.by_length
            ]
        if self.match is not None:
            lines.append(f'exact match: {self.match.value:.1f} %')
            width = max(map(len, self.match.by_phenomenon), default=0)
            lines += [
                f'  {name:<{width}} {value:5.1f} % of {self.match.num_lines_by_phenomenon[name]:,}'
                for name, value in self.match.by_phenomenon.items()
            ]
        return '\n'.join(lines)


class PairScores(NamedTuple):
    """How each pair was predicted, `[pairs]` each."""

    nll: np.ndarray  # nats, float64
    num_tokens: np.ndarray  # to predict
    num_correct: np.ndarray  # found most probable


class Evaluator:
    """Evaluates parameters on one split: `evaluator(params)` gives a `Result`. Programs are compiled once a shape.

    Args:
        model: whose parameters come with each call.
        prepared: ids of the split.
        pairs: its text, the first pairs of the split or all of them; what is evaluated.
        vocabulary: the one the ids were made with.
        batch_tokens: slots of a batch.
        translator: translates the sources, with the parameters of each call; None = likelihood alone.
        target_language: 'de' adds the paper's split BLEU; None = a task whose lines are not of a natural language.
        mesh: the rows of a batch lie over its data axis; None = the default device.
        pause: called before each batch; what it raises ends the evaluation there.
    """

    def __init__(
        self,
        model: Model,
        prepared: Prepared,
        pairs: Sequence[Pair],
        vocabulary: Vocabulary,
        *,
        batch_tokens: int,
        translator: Translator | None = None,
        target_language: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        pause: Callable[[], None] | None = None,
    ):
        if not pairs:
            raise ValueError(f'the {prepared.split} split has no pairs to evaluate')
        if [pair.id for pair in pairs] != list(range(len(pairs))) or len(pairs) > prepared.num_pairs:
            raise ValueError(
                f'{len(pairs)} pairs to evaluate, but {prepared.num_pairs} prepared in the {prepared.split} split; '
                'give the first pairs of the split, in order'
            )
        self._references = [pair.target for pair in pairs]
        check_lines(self._references, self._references)
        longest = max(prepared.source_lengths[: len(pairs)].max(), prepared.target_lengths[: len(pairs)].max())
        self._model = _make_room(model, int(longest))
        self._prepared, self._pairs, self._vocabulary = prepared, list(pairs), vocabulary
        self._batch_tokens, self._mesh = batch_tokens, mesh
        self._pause = pause
        self.hypotheses: list[str] | None = None  # the translations of the last call
        self._translator, self._target_language = translator, target_language
        self._pose = jax.jit(self._pose_program)
        self._score_tokens = jax.jit(
            lambda params, batch: score_tokens(self._model, params, batch),
            out_shardings=None if mesh is None else replicated(mesh),
        )

    @property
    def model(self) -> Model:
        """The model, with room for the longest pair."""
        return self._model

    def __call__(self, params: Params) -> Result:
        """Scores every pair once."""
        with self._on_mesh():
            return self._evaluate(params)

    def _evaluate(self, params: Params) -> Result:
        pairs = self.score_pairs(params)
        task = self._model.task
        if not pairs.num_tokens.sum():
            raise ValueError(f'the {self._prepared.split} split has no {task.predicts}; evaluate more pairs')
        whole_text = task.translates or task.generates
        result = Result(
            split=self._prepared.split,
            num_pairs=len(self._pairs),
            num_tokens=int(pairs.num_tokens.sum()),
            num_words=sum(len(reference.split()) for reference in self._references) if whole_text else 0,
            nll=float(pairs.nll.sum()),
            num_correct=int(pairs.num_correct.sum()),
            predicts=task.predicts,
        )
        if self._translator is None:
            return result
        self._translator.params = params
        self.hypotheses = self._translator.translate([pair.source for pair in self._pairs])
        return dataclasses.replace(result, **self._score(self.hypotheses))

    def negative_log_likelihoods(self, params: Params) -> np.ndarray:
        """Nats of what is to be predicted of each pair (in translation, its target), float64 `[pairs]`."""
        return self.score_pairs(params).nll

    def score_pairs(self, params: Params) -> PairScores:
        """Scores each pair exactly once."""
        scores = PairScores(*(np.zeros(len(self._pairs), dtype) for dtype in (np.float64, np.int64, np.int64)))
        scored = np.zeros(len(self._pairs), np.int64)
        for task in self.batches():
            if self._pause is not None:
                self._pause()
            ids = task.pair_ids
            with self._on_mesh():
                log_probabilities, correct = self._score_tokens(params, self._place(task.batch))
            scores.nll[ids] = -np.asarray(log_probabilities, np.float64)[: len(ids)].sum(axis=1)
            scores.num_correct[ids] = np.asarray(correct)[: len(ids)].sum(axis=1)
            scores.num_tokens[ids] = (task.batch.target_segment_ids > 0)[: len(ids)].sum(axis=1)
            np.add.at(scored, ids, 1)
        if not (scored == 1).all():
            bad = int(np.flatnonzero(scored != 1)[0])
            raise RuntimeError(
                f'pair {bad} of the {self._prepared.split} split was scored {scored[bad]} times, not once'
            )
        return scores

    def batches(self) -> Iterator[HostBatch]:
        """Every pair exactly once, on the host, as `model.objective` poses it.

        What is masked of a pair hangs on its id alone, so that every evaluation asks the same.
        """
        batches = evaluation_batches(
            self._prepared,
            vocabulary=self._vocabulary,
            batch_tokens=self._batch_tokens,
            rows_multiple=1 if self._mesh is None else num_data_shards(self._mesh),
            length_multiple=1 if self._mesh is None else self._mesh.shape[SEQUENCE],
            max_pairs=len(self._pairs),
        )
        for loaded in batches:
            row_ids = np.zeros(len(loaded.batch.inputs), np.uint32)
            row_ids[: len(loaded.pair_ids)] = loaded.pair_ids
            yield loaded._replace(batch=jax.device_get(self._pose(loaded.batch, row_ids)))

    def _pose_program(self, batch: Batch, row_ids: Int[Array, 'B']) -> Batch:
        key = jax.random.key(0, impl='threefry2x32')
        return self._model.objective(batch, jax.vmap(functools.partial(jax.random.fold_in, key))(row_ids))

    def _on_mesh(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _place(self, batch: Batch) -> Batch:
        """This process's rows of a global batch, on the mesh; each process makes all batches and reads all results."""
        if self._mesh is None:
            return batch
        index, count = rows_of_process(self._mesh)
        return place_batch(jax.tree.map(lambda rows: np.split(rows, count)[index], batch), self._mesh)

    def _score(self, hypotheses: list[str]) -> dict[str, Any]:
        references, language = self._references, self._target_language
        scores = [sacrebleu_score(hypotheses, references, language), chrf_score(hypotheses, references)]
        if language == 'de':
            scores.append(split_bleu_score(hypotheses, references))
        tagged = all(pair.info is not None and 'phenomena' in pair.info for pair in self._pairs)
        phenomena = [pair.info['phenomena'] for pair in self._pairs if pair.info is not None] if tagged else None
        sources = [pair.source for pair in self._pairs]
        return {
            'scores': tuple(scores),
            'by_length': scores_by_length(hypotheses, references, sources, language),
            'match': exact_match(hypotheses, references, phenomena),
        }

    def write(self, folder: epath.PathLike, result: Result) -> None:
        """The result of the last call, its translations and the raw references as files of `folder`."""
        folder = epath.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{result.split}.json').write_text(json.dumps(result.to_dict(), indent=1) + '\n')
        if self.hypotheses is None:
            return
        for name, lines in (('hypotheses', self.hypotheses), ('references', self._references)):
            text = ''.join(f'{line}\n' for line in lines)
            (folder / f'{result.split}.{name}.txt').write_bytes(text.encode())


def _make_room(model: Model, longest: int) -> Model:
    """A model that takes the longest pair: references are scored whole, however long the model's own limit."""
    if longest <= model.max_length:
        return model
    config = getattr(model, 'config', None)
    roomier: Any = None if config is None else dataclasses.replace(config, max_length=longest)
    roomier = None if roomier is None else dataclasses.replace(model, config=roomier)  # type: ignore[type-var]
    if roomier is None or shapes_by_name(abstract_params(roomier)) != shapes_by_name(abstract_params(model)):
        raise ValueError(
            f'the longest side of a pair has {longest} subwords with eos, above config.model.max_length '
            f'{model.max_length}, and parameters with a row for each position, such as learned positions, reach no '
            'further; raise it or take the pair out'
        )
    return roomier


def _words(score: LengthScore) -> str:
    return f'{score.min_words} or more' if score.max_words is None else f'{score.min_words} to {score.max_words}'


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
