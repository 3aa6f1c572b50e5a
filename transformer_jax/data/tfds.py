"""Translation sets of TensorFlow Datasets, without TensorFlow: prepared as array_record and read by index."""

import difflib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from transformer_jax.config import ConfigError, TfdsConfig
from transformer_jax.data.batch import Pair

_EXAMPLES_AT_ONCE = 1024
_BYTES_AT_ONCE = 1 << 22
SPLITS = ('train', 'validation', 'test')


class TfdsSource:
    """The pairs of a set that has a text feature for each of the two languages, source and target.

    Pair i is example i of the split. A set that is not yet in `config.data_dir` is downloaded and prepared. Splits may
    be slices (`train[2000:]`). Line ends inside a text become spaces and are counted. Raises `ConfigError` naming the
    field for an unknown set, language or split, and for a set prepared in another file format.
    """

    def __init__(self, config: TfdsConfig, languages: tuple[str, str], *, report: Callable[[str], None] = print):
        self._config, self._languages = config, languages
        self._report = report
        self._builder = _open_builder(config, report)
        self._names = {split: getattr(config, f'{split}_split') for split in SPLITS}
        _check_languages(config.name, languages, list(self._builder.info.features or {}))
        for split, name in self._names.items():
            _check_split(split, name, list(self._builder.info.splits))

    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def size(self, split: str) -> int:
        return int(self._info(split).num_examples)

    def read(self, split: str) -> Iterator[Pair]:
        try:
            data = self._builder.as_data_source(self._names[split])
        except NotImplementedError as error:
            raise ConfigError(
                f'config.data.tfds.name {self._config.name!r} was prepared in a file format that can not be read '
                f'without TensorFlow; prepare it as array_record in another config.data.tfds.data_dir ({error})'
            ) from error
        num_changed = 0
        for start in range(0, len(data), _EXAMPLES_AT_ONCE):
            indices = range(start, min(start + _EXAMPLES_AT_ONCE, len(data)))
            for index, example in zip(indices, data.__getitems__(list(indices)), strict=True):
                texts = [_as_text(example[language], self._names[split], index) for language in self._languages]
                lines = [text.replace('\r', ' ').replace('\n', ' ') for text in texts]
                num_changed += lines != texts
                yield Pair(index, lines[0], lines[1])
        if num_changed:
            self._report(f'{self._config.name} {split}: line ends inside {num_changed:,} pairs became spaces')

    def fingerprint(self, split: str) -> str:
        """Hashes the record files of the split, which part of each it takes, and the direction."""
        digest = hashlib.sha256(' '.join(self._languages).encode())
        for part in self._info(split).file_instructions:
            digest.update(f' {part.skip} {part.take} {part.examples_in_shard} '.encode())
            with epath.Path(part.filename).open('rb') as file:
                while block := file.read(_BYTES_AT_ONCE):
                    digest.update(block)
        return digest.hexdigest()

    def contents(self, split: str) -> dict[str, str]:
        """The fingerprint, by the name of the set and of the split in it."""
        return {f'config.data.tfds {self._config.name} {self._names[split]}': self.fingerprint(split)}

    def _info(self, split: str) -> Any:
        if split not in self._names:
            raise ValueError(f'there is no split {split!r}; there are {", ".join(SPLITS)}')
        return self._builder.info.splits[self._names[split]]


def _open_builder(config: TfdsConfig, report: Callable[[str], None]) -> Any:
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate  # registers wmt14_translate and its like, which are lazy otherwise

    try:
        # An already prepared set keeps the format it has; asking for another one would be refused.
        builder = tfds.builder(config.name, data_dir=config.data_dir)
        if not builder.is_prepared():
            builder = tfds.builder(config.name, data_dir=config.data_dir, file_format='array_record')
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f'config.data.tfds.name is {config.name!r}: {reason}') from error
    if not builder.is_prepared():
        report(f'{config.name} is not in {builder.data_dir}: downloading and preparing it')
        builder.download_and_prepare()
    return builder


def _check_languages(name: str, languages: tuple[str, str], known: list[str]) -> None:
    for side, language in zip(('source', 'target'), languages, strict=True):
        if language not in known:
            raise ConfigError(f'config.{side}_language is {language!r}; {name} has {", ".join(map(repr, known))}')
    if languages[0] == languages[1]:
        raise ConfigError(f'config.target_language is {languages[1]!r}, as is config.source_language')


def _check_split(split: str, name: str, known: list[str]) -> None:
    # A name may be a sum of slices, as in 'train[:10%]+test'.
    for part in name.split('+'):
        base = part.split('[')[0].strip()
        if base not in known:
            near = difflib.get_close_matches(base, known, n=1)
            hint = f' (did you mean {near[0]!r}?)' if near else ''
            raise ConfigError(
                f'config.data.tfds.{split}_split is {name!r}{hint}; the set has {", ".join(map(repr, known))}, '
                "and slices such as 'train[2000:]' are allowed"
            )


def _as_text(value: bytes | str, split: str, index: int) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f'example {index} of the split {split!r} is not UTF-8: {error}') from error
