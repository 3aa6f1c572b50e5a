"""The verb `generate`: prompts in, as many texts that begin with them out, whole or not at all."""

import time
from collections.abc import Sequence

import jax

from transformer_jax.commands.evaluator import say
from transformer_jax.decoding.generator import Generator
from transformer_jax.decoding.opened_run import OpenedRun
from transformer_jax.decoding.text_search import Translation


def load_generator(run: OpenedRun, checkpoint: str | None) -> Generator:
    """The generator of a run that was opened with the changes of the command line."""
    params, _ = run.load_params(checkpoint, report=say)
    return Generator(run.model, params, run.vocabulary, run.config.decoding, report=say)


def generate_lines(generator: Generator, prompts: Sequence[str], *, n_best: int, seed: int) -> list[list[Translation]]:
    """The texts for each prompt; tells standard error what was done and what was cut."""
    start = time.monotonic()
    texts = generator.generate_n_best(prompts, n_best, rng=jax.random.key(seed))
    counts, seconds = generator.counts, time.monotonic() - start
    say(f'{counts.lines:,} prompts: {counts.blank:,} blank, {counts.unfinished:,} texts cut; {seconds:,.1f} s')
    return texts
