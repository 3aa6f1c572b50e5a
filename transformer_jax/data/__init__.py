"""Text pairs to batches of ids: sources, vocabulary, buckets, packing and the pipeline."""

from collections.abc import Callable, Iterator
from typing import Protocol

from transformer_jax.config import Config, ConfigError, require_choice
from transformer_jax.data.batch import Batch, HostBatch, Pair

__all__ = ['SOURCES', 'Batch', 'HostBatch', 'Pair', 'Source', 'check', 'make_source']

Report = Callable[[str], None]


class Source(Protocol):
    """Sentence pairs by split."""

    def splits(self) -> tuple[str, ...]:
        """The splits there are, of 'train', 'validation', 'test' and what else the source calls so."""
        ...

    def size(self, split: str) -> int:
        """Number of pairs."""
        ...

    def read(self, split: str) -> Iterator[Pair]:
        """All pairs in the order of their ids, which are 0, 1, 2, ...; each call starts anew."""
        ...

    def fingerprint(self, split: str) -> str:
        """The identity of the split's content; another text has another one."""
        ...

    def contents(self, split: str) -> dict[str, str]:
        """What the split is read from, and a digest of each: its files, or else the config group that makes it.

        Raises `ValueError` for whatever reading the split would meet: files are read through.
        """
        ...


def _make_text_files(config: Config, report: Report) -> Source:
    from transformer_jax.data.text_files import TextFilesSource

    return TextFilesSource(config.data.text_files, report=report)


def _make_tfds(config: Config, report: Report) -> Source:
    from transformer_jax.data.tfds import TfdsSource

    languages = config.source_language, config.target_language
    return TfdsSource(config.data.tfds, languages, report=report)


def _make_grammar(config: Config, report: Report) -> Source:
    from transformer_jax.data.grammar import GrammarSource

    return GrammarSource(config.data.grammar, config.seed)


def _make_copying(config: Config, report: Report) -> Source:
    from transformer_jax.data.copying import CopyingSource

    return CopyingSource(config.data.copying, config.seed)


# Each maker imports its own module, so that a run pays only for the source it reads.
SOURCES: dict[str, Callable[[Config, Report], Source]] = {
    'text_files': _make_text_files,
    'tfds': _make_tfds,
    'grammar': _make_grammar,
    'copying': _make_copying,
}
HAVE_ONE_ANSWER = ('grammar', 'copying')  # each of their lines has one right translation
NO_LANGUAGE = ('copying',)  # their lines are of no language that has rules of tokenisation


def check(config: Config) -> None:
    """Checks what `config.py` can't know of the data section. Reads no file. Raises `ConfigError`."""
    name = config.data.source
    require_choice('config.data.source', name, SOURCES)
    if name == 'text_files':
        from transformer_jax.data.text_files import check_files_named

        check_files_named(config.data.text_files)
    copying = config.data.copying
    if copying.min_length > copying.max_length:
        raise ConfigError(
            f'config.data.copying.min_length is {copying.min_length}, above max_length {copying.max_length}'
        )


def make_source(config: Config, report: Report = print) -> Source:
    """The source that `config.data.source` names. What it replaces in the text it counts and tells `report`."""
    check(config)
    return SOURCES[config.data.source](config, report)
