"""The vocabulary of a new run: a SentencePiece model that is given, or one trained on the run's own text."""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import sentencepiece
from etils import epath

from transformer_jax.config import ConfigError, VocabularyConfig
from transformer_jax.data.vocabulary import JointVocabulary, Vocabulary

if TYPE_CHECKING:
    from transformer_jax.data import Source

LONGEST_TRAINING_LINE = 4192  # bytes; SentencePiece leaves longer lines out
_RESERVED = ('\0', '\u2585')  # SentencePiece leaves training lines with these out


def make_vocabulary(config: VocabularyConfig, source: 'Source', *, report: Callable[[str], None] = print) -> Vocabulary:
    """The vocabulary of a new run: the given model file as it is, or one trained on the training split of `source`."""
    if config.model_file is None:
        return train_vocabulary(config, _training_texts(source, config.num_training_lines), report=report)
    path = epath.Path(config.model_file)
    try:
        model = path.read_bytes()
    except OSError as error:
        raise ConfigError(f'config.vocabulary.model_file {str(path)!r} can not be read: {error}') from error
    vocabulary = JointVocabulary(model, name=f'config.vocabulary.model_file {str(path)!r}')
    report(f'vocabulary: {vocabulary.size:,} pieces of {path}')
    return vocabulary


def train_vocabulary(
    config: VocabularyConfig, texts: Iterable[str], *, report: Callable[[str], None] = print
) -> JointVocabulary:
    """Trains a joint SentencePiece BPE of exactly `config.size` pieces: pad 0, eos 1, unk 2, bos 3, bytes, subwords.

    The same texts give the same pieces. Lines that SentencePiece would leave out are counted and reported. Raises
    `ConfigError` when no line is left or `size` does not suit the texts, with the nearest size that does.
    """
    usable = _UsableLines(texts)
    lines = iter(usable)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f'there is no text to train a vocabulary on: {usable.describe()}')
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], lines),
            model_writer=model,
            model_type='bpe',
            vocab_size=config.size,
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            max_sentence_length=LONGEST_TRAINING_LINE,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            num_threads=2,  # stored in the model: a fixed number keeps the file itself the same on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(_explain_training_error(config.size, usable, str(error))) from error
    vocabulary = JointVocabulary(model.getvalue())
    report(f'vocabulary: {vocabulary.size:,} pieces, {config.normalization}, trained on {usable.describe()}')
    return vocabulary


class _UsableLines:
    """Passes on the lines that SentencePiece trains on and counts the others."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.used = self.blank = self.too_long = self.reserved = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if not text.strip():
                self.blank += 1
            elif len(text.encode()) > LONGEST_TRAINING_LINE:
                self.too_long += 1
            elif any(character in text for character in _RESERVED):
                self.reserved += 1
            else:
                self.used += 1
                yield text

    def describe(self) -> str:
        """The counts in words."""
        words = f'{self.used:,} lines'
        for count, reason in (
            (self.blank, 'blank'),
            (self.too_long, f'longer than {LONGEST_TRAINING_LINE:,} bytes'),
            (self.reserved, 'with U+0000 or U+2585'),
        ):
            words += f', {count:,} left out: {reason}' if count else ''
        return words


def _training_texts(source: 'Source', num_lines: int) -> Iterable[str]:
    """Both sides of at most `num_lines` training pairs, spread evenly over the split: corpora are often in blocks."""
    size = source.size('train')
    taken = min(num_lines, size)
    for index, pair in enumerate(source.read('train')):
        if (index + 1) * taken // size > index * taken // size:
            yield pair.source
            yield pair.target


def _explain_training_error(size: int, usable: _UsableLines, message: str) -> str:
    start = f'config.vocabulary.size is {size:,}, '
    if found := re.search(r'too high \(\d+\).*?<= (\d+)', message):
        return (
            f'{start}but the text ({usable.describe()}) has enough for {int(found[1]):,} at most; set it to {found[1]}'
        )
    if found := re.search(r'smaller than required_chars\. \d+ vs (\d+)', message):
        return (
            f'{start}but the specials, bytes and single characters of the text alone are {int(found[1]):,}; '
            'raise it or lower config.vocabulary.character_coverage'
        )
    return f'the vocabulary could not be trained on {usable.describe()}: {message}'
