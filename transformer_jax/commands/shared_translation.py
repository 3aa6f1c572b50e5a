"""Translation by all processes of a job: each translates its share of the lines, and all get every translation."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from transformer_jax.decoding.translator import Translator
from transformer_jax.parallel.hosts import Hosts
from transformer_jax.parallel.mesh import replicated
from transformer_jax.shapes import Params, PRNGKey

_BATCHES_AT_ONCE = 4  # of each process, between two points at which the job may stop


class SharedTranslator(Translator):
    """A translator that every process of the job calls alike.

    A process searches by itself, on its first device: searches of different lines end at different steps, so programs
    that need all processes would wait for one another. `pause` is called before each part of the lines; the other
    arguments are those of a translator.
    """

    def __init__(
        self, hosts: Hosts, mesh: jax.sharding.Mesh, pause: Callable[[], None], *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._hosts, self._pause = hosts, pause
        self._gather = jax.jit(lambda params: params, out_shardings=replicated(mesh))

    def translate(
        self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None, rng: PRNGKey | None = None
    ) -> list[str]:
        hosts, everywhere, translate = self._hosts, self.params, super().translate
        part = hosts.count * self.config.batch_size * _BATCHES_AT_ONCE
        translations: list[str] = []
        # A thread of its own stands outside the mesh that the caller may have set.
        with ThreadPoolExecutor(1) as outside:
            self.params = outside.submit(jax.device_put, self._take_here(everywhere)).result()
            for start in range(0, len(texts), part):
                self._pause()
                stop = min(start + part, len(texts))
                mine = slice(start + hosts.index, stop, hosts.count)
                own_prefixes = None if prefixes is None else prefixes[mine]
                own = outside.submit(translate, texts[mine], prefixes=own_prefixes, rng=rng).result()
                found = hosts.gather('translations', own)
                merged = [''] * (stop - start)
                for index, lines in enumerate(found):
                    merged[index :: hosts.count] = lines
                translations += merged
            self.params = everywhere
        return translations

    def _take_here(self, params: Params) -> Params:
        """The parameters whole, in this process's memory."""
        return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), self._gather(params))
