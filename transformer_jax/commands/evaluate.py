"""The verb `evaluate`: a run on one split of its data, or of other data."""

import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from transformer_jax.commands.evaluator import make_evaluator, say
from transformer_jax.commands.validation import open_checked_run
from transformer_jax.config import ConfigError
from transformer_jax.data.corpus import open_corpus
from transformer_jax.evaluation.comparison import Comparison, divergence, require_same_parameters


def evaluate_run(
    run_dir: str | os.PathLike[str],
    split: str,
    checkpoint: str | None,
    *,
    changes: Mapping[str, Any],
    num_examples: int,
) -> None:
    """Prints the scores, and the first `num_examples` translations with source and reference.

    The result, the translations and the references go into a new folder under the run's `evaluations`. Where `changes`
    swap the attention, the model as it was trained is evaluated too, and what changed is printed.
    """
    run = open_checked_run(run_dir, changes, may_swap_attention=True)
    require_same_parameters(run.trained_model, run.model)
    if num_examples and not run.model.task.translates:
        raise ConfigError(f'--examples shows translations, and this model was made for {run.model.task.name}')
    corpus = open_corpus(run.config, run.folder.vocabulary, run.folder.data, report=say)
    corpus.require(split)
    params, known = run.load_params(checkpoint, report=say)
    name = f'step {known["step"]:,}' if known.get('step') is not None else f'the parameters in {checkpoint}'
    say(f'evaluating {name} on {split}')
    evaluator = make_evaluator(run.config, run.model, corpus, split)
    folder = _new_folder(run.folder.evaluations, split, known)
    result = evaluator(params, folder=folder)
    if num_examples:
        _print_examples(folder, split, [pair.source for pair in corpus.pairs(split, num_examples)])
    print(result.format())
    if run.config.model != run.trained_config.model:
        trained = make_evaluator(run.config, run.trained_model, corpus, split)
        apart = divergence(run.trained_model, run.model, params, evaluator.batches())
        print(Comparison(trained(params), result, apart).format())
    say(f'the scores, the translations and the references are in {folder}')


def _new_folder(evaluations: epath.Path, split: str, known: Mapping[str, Any]) -> epath.Path:
    """A folder of its own for each evaluation, so that none replaces another's files."""
    name = f'{split}_step_{known["step"]}' if known.get('step') is not None else f'{split}_parameters'
    folder, number = evaluations / name, 2
    while folder.exists():
        folder, number = evaluations / f'{name}_{number}', number + 1
    return folder


def _print_examples(folder: epath.Path, split: str, sources: list[str]) -> None:
    hypotheses, references = (
        (folder / f'{split}.{name}.txt').read_bytes().decode().split('\n') for name in ('hypotheses', 'references')
    )
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=False):
        print(f'source:      {source}\ntranslation: {hypothesis}\nreference:   {reference}\n')
