"""Random symbol strings to be copied or reversed: the smallest task that needs cross-attention."""

import hashlib
import itertools
import string
from collections.abc import Iterator

import numpy as np

from transformer_jax.config import ConfigError, CopyingConfig
from transformer_jax.data.batch import Pair

# A string belongs to the split that its hash falls to, so no split shares a string with another.
_SHARES = {'train': range(80), 'validation': range(80, 90), 'test': range(90, 100)}
_TRIES_A_PAIR = 1000
VERSION = 1  # raise it when the same settings give other strings


class CopyingSource:
    """Strings of `min_length` to `max_length` symbols, each a word; the target is the same or the reverse."""

    def __init__(self, config: CopyingConfig, seed: int):
        self._config = config
        self._seed = seed
        self._symbols = _name_symbols(config.num_symbols)

    def splits(self) -> tuple[str, ...]:
        return tuple(_SHARES)

    def size(self, split: str) -> int:
        return int(getattr(self._config, f'num_{_known(split)}'))

    def read(self, split: str) -> Iterator[Pair]:
        rng = np.random.default_rng((self._seed, list(_SHARES).index(_known(split))))
        for index in range(self.size(split)):
            words = self._draw(rng, split)
            target = words if self._config.task == 'copy' else words[::-1]
            yield Pair(index, ' '.join(words), ' '.join(target))

    def fingerprint(self, split: str) -> str:
        """Names all that decides the pairs."""
        config = self._config
        decides = (config.task, config.num_symbols, config.min_length, config.max_length, self.size(split), self._seed)
        return hashlib.sha256(repr((VERSION, split, *decides)).encode()).hexdigest()

    def contents(self, split: str) -> dict[str, str]:
        """The fingerprint, by the config group that makes the pairs."""
        return {'config.data.copying': self.fingerprint(split)}

    def _draw(self, rng: np.random.Generator, split: str) -> list[str]:
        for _ in range(_TRIES_A_PAIR):
            length = rng.integers(self._config.min_length, self._config.max_length, endpoint=True)
            words = [self._symbols[i] for i in rng.integers(len(self._symbols), size=length)]
            if int(hashlib.sha256(' '.join(words).encode()).hexdigest(), 16) % 100 in _SHARES[split]:
                return words
        raise ConfigError(
            f'config.data.copying has too few strings ({self._config.num_symbols} symbols, at most '
            f'{self._config.max_length} long) for the split {split!r}; raise num_symbols or max_length'
        )


def _known(split: str) -> str:
    if split not in _SHARES:
        raise ValueError(f'there is no split {split!r}; there are {", ".join(_SHARES)}')
    return split


def _name_symbols(count: int) -> list[str]:
    """The first `count` words of equal length over a to z."""
    width = 1
    while len(string.ascii_lowercase) ** width < count:
        width += 1
    letters = itertools.product(string.ascii_lowercase, repeat=width)
    return [''.join(word) for word in itertools.islice(letters, count)]
