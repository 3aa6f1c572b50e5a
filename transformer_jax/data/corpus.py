"""The data of one run: its source, its vocabulary, and the prepared ids of each split."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from transformer_jax import files
from transformer_jax.config import Config, ConfigError
from transformer_jax.data import Pair, Source, make_source
from transformer_jax.data.prepared import Prepared, prepare
from transformer_jax.data.vocabulary import Vocabulary, holds_vocabulary, load_vocabulary
from transformer_jax.data.vocabulary_training import make_vocabulary


@dataclass(frozen=True)
class Corpus:
    """Text and ids of every split, made once and reused at each later start."""

    source: Source
    vocabulary: Vocabulary
    cache_dir: str
    report: Callable[[str], None]

    def has(self, split: str) -> bool:
        """Whether the source has this split."""
        return split in self.source.splits()

    def prepared(self, split: str) -> Prepared:
        """The ids of a split. Raises `ConfigError` when the source has no such split."""
        self.require(split)
        return prepare(self.source, split, self.vocabulary, self.cache_dir, report=self.report)

    def pairs(self, split: str, most: int | None = None) -> list[Pair]:
        """The text of a split, or of its first pairs."""
        self.require(split)
        return list(itertools.islice(self.source.read(split), most))

    def require(self, split: str) -> None:
        """Raises `ConfigError` when the source has no such split."""
        if not self.has(split):
            raise ConfigError(f'the data have no {split!r} split; they have {", ".join(self.source.splits())}')


def read_contents(source: Source) -> dict[str, dict[str, str]]:
    """What each of the three splits is read from, with digests (see `Source.contents`), of those that there are.

    Reads every file of them through, so that whatever is wrong with any is said before a run is made of them.
    """
    return {split: source.contents(split) for split in ('train', 'validation', 'test') if split in source.splits()}


def open_corpus(
    config: Config,
    vocabulary_folder: epath.Path,
    default_cache_dir: epath.Path,
    *,
    source: Source | None = None,
    report: Callable[[str], None] = print,
) -> Corpus:
    """Opens the data of a run; the first time, the vocabulary is made from them and saved. Raises `ConfigError`.

    `source` is the one that the config names, where it is open already.
    """
    source = source or make_source(config, report)
    if holds_vocabulary(vocabulary_folder):
        vocabulary = load_vocabulary(vocabulary_folder)
    else:
        vocabulary = make_vocabulary(config.vocabulary, source, report=report)
        vocabulary.save(vocabulary_folder)
    if vocabulary.size != config.vocabulary.size:
        raise ConfigError(
            f'config.vocabulary.size is {config.vocabulary.size}, but the vocabulary in {vocabulary_folder} has '
            f'{vocabulary.size} pieces'
        )
    return Corpus(source, vocabulary, config.data.cache_dir or _local(default_cache_dir), report)


def _local(folder: epath.Path) -> str:
    """The folder itself, or for one on an object store the user's own cache: ids are mapped from a local disk."""
    if files.is_local(folder):
        return str(folder)
    cache = os.environ.get('XDG_CACHE_HOME')
    return str((Path(cache) if cache else Path.home() / '.cache') / 'transformer_jax' / 'prepared')
