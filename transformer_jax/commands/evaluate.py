"""The verb `evaluate`: a run on one split of its data, or of other data."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from transformer_jax.commands.evaluator import make_evaluator, say
from transformer_jax.commands.validation import open_checked_run
from transformer_jax.config import Config, ConfigError
from transformer_jax.data.batch import Pair
from transformer_jax.data.corpus import open_corpus
from transformer_jax.evaluation.comparison import Comparison, divergence, require_same_parameters
from transformer_jax.evaluation.evaluator import Evaluator, Result


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
    if 'imported' in run.folder.read_record() and 'data.source' not in changes:
        _require_text(run.config)
    require_same_parameters(run.trained_model, run.model)
    if num_examples and not run.model.task.translates:
        raise ConfigError(f'--examples shows translations, and this model was made for {run.model.task.name}')
    corpus = open_corpus(run.config, run.folder.vocabulary, run.folder.data, report=say)
    corpus.require(split)
    params, known = run.load_params(checkpoint, report=say)
    name = f'step {known["step"]:,}' if known.get('step') is not None else f'the parameters in {checkpoint}'
    say(f'evaluating {name} on {split}')
    evaluator = make_evaluator(run.config, run.model, corpus, split)
    result = evaluator(params)
    try:
        folder = _keep(evaluator, result, _new_folder(run.folder.evaluations, split, known))
    finally:  # what took minutes is shown whatever became of the files
        if num_examples:
            _print_examples(corpus.pairs(split, num_examples), evaluator.hypotheses or [])
        print(result.format(), flush=True)
    before = run.trained_config.model
    if dataclasses.replace(run.config.model, max_length=before.max_length) != before:
        trained = make_evaluator(run.config, run.trained_model, corpus, split)
        apart = divergence(trained.model, evaluator.model, params, evaluator.batches())
        print(Comparison(trained(params), result, apart).format())
    say(f'the scores, the translations and the references are in {folder}')


def _require_text(config: Config) -> None:
    """Refuses to score an imported model, of which nobody said on what, on the built-in task."""
    if config.data.source == Config().data.source:
        files = ' '.join(f'--config.data.text_files.test_{side}=FILE' for side in ('source', 'target'))
        raise ConfigError(
            f'the model was imported, and no text to score it on is named; add --config.data.source=text_files {files}'
        )


def _new_folder(evaluations: epath.Path, split: str, known: Mapping[str, Any]) -> epath.Path:
    """A folder of its own for each evaluation, so that none replaces another's files."""
    name = f'{split}_step_{known["step"]}' if known.get('step') is not None else f'{split}_parameters'
    folder, number = evaluations / name, 2
    while folder.exists():
        folder, number = evaluations / f'{name}_{number}', number + 1
    return folder


def _keep(evaluator: Evaluator, result: Result, folder: epath.Path) -> epath.Path:
    """Writes the files of an evaluation and returns where: into a temporary folder where the run may only be read."""
    try:
        evaluator.write(folder, result)
    except OSError as error:
        say(f'{folder} could not be written: {error.strerror or error}')
        with contextlib.suppress(OSError):
            folder.rmtree()
        folder = epath.Path(tempfile.mkdtemp(prefix='evaluation_'))
        evaluator.write(folder, result)
    return folder


def _print_examples(pairs: Sequence[Pair], hypotheses: Sequence[str]) -> None:
    for pair, hypothesis in zip(pairs, hypotheses, strict=False):
        print(f'source:      {pair.source}\ntranslation: {hypothesis}\nreference:   {pair.target}\n')
