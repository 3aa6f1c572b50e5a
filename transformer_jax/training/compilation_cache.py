"""Compiled programs kept from one start to the next."""

import os

import jax
from etils import epath

from transformer_jax.config import ConfigError

_HIT, _MISS = '/jax/compilation_cache/cache_hits', '/jax/compilation_cache/cache_misses'


class CompilationCache:
    """Keeps compiled programs in a folder and counts how many came from there; None = JAX's own setting.

    A folder whose programs can't be read costs a warning of JAX's and the compiling, not the run.
    """

    def __init__(self, folder: str | None) -> None:
        self.hits = self.misses = 0
        self._folder = folder
        self._before = jax.config.jax_compilation_cache_dir

    def __enter__(self) -> 'CompilationCache':
        if self._folder is not None:
            try:
                epath.Path(self._folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f'config.execution.compilation_cache is {self._folder!r}, which can not be made: {error.strerror}'
                ) from error
            jax.config.update('jax_compilation_cache_dir', os.fspath(self._folder))
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        if self._folder is not None:
            jax.config.update('jax_compilation_cache_dir', self._before)

    def describe(self) -> str | None:
        """How much it saved, in words; None where no program was looked up."""
        if not self.hits + self.misses:
            return None
        return f'compiled programs: {self.hits:,} taken from the cache, {self.misses:,} made'

    def counts(self) -> dict[str, int]:
        """For the run's record."""
        return {'hits': self.hits, 'misses': self.misses}

    def _count(self, event: str, **details: str | int | float) -> None:
        del details
        self.hits += event == _HIT
        self.misses += event == _MISS
