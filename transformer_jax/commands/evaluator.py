"""The evaluator of a run's split, put together from its config, and where the verbs say what they do."""

import functools
import sys
from collections.abc import Callable

import jax

from transformer_jax.commands.shared_translation import SharedTranslator
from transformer_jax.config import Config
from transformer_jax.data import NO_LANGUAGE
from transformer_jax.data.corpus import Corpus
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.evaluator import Evaluator
from transformer_jax.models.interface import Model
from transformer_jax.parallel.hosts import Hosts
from transformer_jax.training.stopping import pause

Report = Callable[[str], None]


def say(text: str) -> None:
    """A line on standard error, which leaves standard output to results."""
    print(text, file=sys.stderr, flush=True)


def make_evaluator(
    config: Config,
    model: Model,
    corpus: Corpus,
    split: str,
    *,
    max_pairs: int | None = None,
    bleu: bool = True,
    mesh: jax.sharding.Mesh | None = None,
    hosts: Hosts | None = None,
    report: Report = say,
) -> Evaluator:
    """The evaluator of one split, as the config has it; `max_pairs` takes the first pairs alone.

    `bleu` scores translations as well, where that is what the model is for. Of several `hosts` each has its share of
    the work, every one calls the evaluator alike and gets the whole result, and between batches they may all stop.
    """
    between, make = None, Translator
    if hosts is not None and hosts.count > 1:
        if mesh is None:
            raise ValueError('several hosts evaluate on one mesh, and mesh is None')
        between = functools.partial(pause, hosts)
        make = functools.partial(SharedTranslator, hosts, mesh, between)
    translator = None
    if bleu and model.task.translates:
        translator = make(model, {}, corpus.vocabulary, config.decoding, report=report)
    return Evaluator(
        model,
        corpus.prepared(split),
        corpus.pairs(split, max_pairs),
        corpus.vocabulary,
        batch_tokens=config.evaluation.batch_tokens,
        translator=translator,
        target_language=None if config.data.source in NO_LANGUAGE else config.target_language,
        mesh=mesh,
        pause=between,
    )
