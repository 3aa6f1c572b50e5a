"""Runs a search over one batch: a few compiled programs, and a loop on the host that drops sentences which are done.

`begin` reads source and prefix and chooses the first subword; `advance` loops on the device until the cache is full or
half of the sentences are done; between two calls of it the host takes out what is done, halves the rows and lengthens
the cache. The cost of a step follows the sentences still searched and the subwords read so far.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding import hypotheses, sizes
from transformer_jax.decoding.candidates import Specials
from transformer_jax.decoding.hypotheses import Method, Search, StopRule, Traced
from transformer_jax.decoding.length_penalty import LengthPenalty
from transformer_jax.decoding.requests import Request
from transformer_jax.models.interface import Model
from transformer_jax.parallel.rules import replicate
from transformer_jax.shapes import Array, Float, Int, Params, PRNGKey


class Searcher:
    """The compiled programs of one model and one way of choosing, and the loop that calls them."""

    def __init__(
        self,
        model: Model,
        method: Method,
        specials: Specials,
        penalty: LengthPenalty,
        stop: StopRule,
        *,
        num_best: int,
    ):
        """`num_best`: how many finished hypotheses are kept, and so when a search may stop; at most W."""
        self._model = model
        self._method = method
        self._specials = specials
        self._penalty = penalty
        self._stop = stop
        self._num_best = num_best
        self._begin = jax.jit(self._begin_program, static_argnames='slots')
        self._advance = jax.jit(self._advance_program, donate_argnames='search')
        self._shrink = jax.jit(self._shrink_program)
        self._grow = jax.jit(self._grow_program, static_argnames='slots')

    def num_programs(self) -> int:
        """How many programs were compiled so far."""
        programs = (self._begin, self._advance, self._shrink, self._grow)
        sizes_of: list[Any] = list(programs)  # whose stub lacks the count
        return sum(program._cache_size() for program in sizes_of)  # noqa: SLF001

    def run(self, params: Params, requests: Sequence[Request], rows: int, rng: PRNGKey) -> list[list[Traced]]:
        """The hypotheses of each request, best first: at least `num_best` where the model leaves that many.

        All requests have a prefix or none has. The batch is padded to `rows`.
        """
        arrays, first_step_slots = self._pad(requests, rows)
        needed = max(request.limit for request in requests) - 1 + first_step_slots
        slots = sizes.round_length(min(needed, first_step_slots + arrays['inputs'].shape[1]))
        search = self._begin(params, **arrays, rng=rng, slots=slots)
        places = np.arange(rows)
        found: dict[int, list[Traced]] = {}
        while True:
            fewer = sizes.fewer_rows(len(places))
            last_step = slots - first_step_slots + 1  # a cache that is full then has been read into to the last slot
            search = self._advance(params, search, np.int32(fewer or 0), np.int32(last_step))
            is_done = np.array(search.is_done)
            self._take_out(search, is_done, places, found, len(requests))
            active = np.flatnonzero(~is_done)
            if not active.size:
                return [found[index] for index in range(len(requests))]
            if fewer is not None and active.size <= fewer:
                kept = np.concatenate([active, np.flatnonzero(is_done)])[:fewer]
                search, places = self._shrink(search, kept), places[kept]
            else:
                slots = sizes.round_length(slots + 1)
                search = self._grow(search, slots=slots)

    def _pad(self, requests: Sequence[Request], rows: int) -> tuple[dict[str, Any], int]:
        """The arrays of `_begin_program`, and how many cache slots it takes."""
        source_length = sizes.round_length(max(len(request.source) for request in requests))
        has_prefix = bool(requests[0].prefix)
        prefix_length = sizes.round_length(max(len(request.prefix) for request in requests)) if has_prefix else 1
        arrays = {
            'inputs': np.full((rows, source_length), self._specials.eos_id, np.int32),
            'segment_ids': np.zeros((rows, source_length), np.int32),
            'prefix': np.full((rows, prefix_length), self._model.start_id, np.int32),
            'prefix_lengths': np.ones(rows, np.int32),
            'prefix_ends': np.full(rows, self._specials.eos_id, np.int32) if has_prefix else None,
            'limits': np.zeros(rows, np.int32),
            'min_lengths': np.zeros(rows, np.int32),
            'seeds': np.zeros(rows, np.uint32),
        }
        arrays['segment_ids'][:, 0] = 1  # a row that only fills the batch has a source of one eos
        for row, request in enumerate(requests):
            arrays['inputs'][row, : len(request.source)] = request.source
            arrays['segment_ids'][row, : len(request.source)] = 1
            if has_prefix:
                arrays['prefix'][row, 1 : len(request.prefix)] = request.prefix[:-1]
                arrays['prefix_lengths'][row] = len(request.prefix)
                arrays['prefix_ends'][row] = request.prefix[-1]
            arrays['limits'][row] = request.limit
            arrays['min_lengths'][row] = request.min_length
            arrays['seeds'][row] = request.seed
        return arrays, prefix_length + has_prefix

    @staticmethod
    def _take_out(
        search: Search, is_done: np.ndarray, places: np.ndarray, found: dict[int, list[Traced]], num_requests: int
    ) -> None:
        """Traces the sentences that are done and not yet in `found`."""
        new = [row for row in np.flatnonzero(is_done) if places[row] < num_requests and int(places[row]) not in found]
        if not new:
            return
        # Copies: the next step may write into the buffers themselves.
        on_host = jax.tree.map(np.array, search._replace(cache=None, keys=None))
        for row in new:
            found[int(places[row])] = hypotheses.trace(on_host, int(row))

    def _begin_program(
        self,
        params: Params,
        *,
        inputs: Int[Array, 'B S'],
        segment_ids: Int[Array, 'B S'],
        prefix: Int[Array, 'B P'],
        prefix_lengths: Int[Array, 'B'],
        prefix_ends: Int[Array, 'B'] | None,
        limits: Int[Array, 'B'],
        min_lengths: Int[Array, 'B'],
        seeds: Array,
        rng: PRNGKey,
        slots: int,
    ) -> Search:
        """Encodes, reads start id and prefix at once, and chooses the first subword.

        The last subword of a prefix is read by a step of its own, so that only its logits are computed.
        """
        model, width = self._model, self._method.num_hypotheses
        positions = jnp.where(segment_ids > 0, jnp.cumsum(segment_ids, axis=1) - 1, 0)
        cache = model.init_decode(params, model.encode(params, inputs, segment_ids, positions), slots)
        logits, cache = model.prefill(params, prefix, prefix_lengths, cache)
        if prefix_ends is not None:
            logits, cache = model.decode_step(params, prefix_ends[:, None], cache)
        keys = jax.vmap(functools.partial(jax.random.fold_in, rng))(seeds)
        search = hypotheses.start(
            limits, min_lengths, keys, model.broadcast(cache, width),
            width=width, num_finished=self._num_best, history=slots + 1,
        )  # fmt: skip
        return self._choose(logits, search, search.log_probabilities[:, :1])

    def _advance_program(
        self, params: Params, search: Search, leave_at: Int[Array, ''], last_step: Int[Array, '']
    ) -> Search:
        """Steps until `last_step` subwords are chosen or at most `leave_at` sentences are still searched."""
        search = jax.lax.while_loop(
            lambda search: (search.step < last_step) & ((~search.is_done).sum() > leave_at),
            lambda search: self.step(params, search),
            search,
        )
        return _lay_out(search)

    def step(self, params: Params, search: Search) -> Search:
        """Reads the subwords chosen last and chooses the next ones: what a search does over and over."""
        tokens = jax.lax.dynamic_index_in_dim(search.tokens, search.step - 1, axis=1, keepdims=False)
        logits, cache = self._model.decode_step(params, tokens, search.cache)
        return self._choose(logits, search._replace(cache=cache), search.log_probabilities)

    def abstract_search(self, params: Params, rows: int, source_length: int, slots: int) -> Search:
        """Shapes and dtypes of a search without prefixes, computing nothing."""

        def ids(length: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, length), jnp.int32)

        numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return jax.eval_shape(
            functools.partial(self._begin_program, prefix_ends=None, slots=slots),
            params,
            inputs=ids(source_length),
            segment_ids=ids(source_length),
            prefix=ids(1),
            prefix_lengths=numbers,
            limits=numbers,
            min_lengths=numbers,
            seeds=jax.ShapeDtypeStruct((rows,), jnp.uint32),
            rng=jax.eval_shape(jax.random.key, 0),
        )

    def _choose(self, logits: Float[Array, 'B P V'], search: Search, live: Float[Array, 'B P']) -> Search:
        choice = self._method.choose(logits, search, live, self._specials)
        search = hypotheses.take(search, choice, self._specials.eos_id, self._penalty, self._stop)
        if self._method.num_hypotheses > 1:
            search = search._replace(cache=self._model.reorder(search.cache, choice.parents))
        return _lay_out(search)

    def _shrink_program(self, search: Search, kept: Int[Array, 'C']) -> Search:
        """Only these sentences."""
        cache = self._model.select(search.cache, kept)
        rest = jax.tree.map(lambda leaf: leaf[kept] if leaf.ndim else leaf, search._replace(cache=None))
        return _lay_out(rest._replace(cache=cache))

    def _grow_program(self, search: Search, *, slots: int) -> Search:
        """Room for `slots` subwords in the cache and one more in the histories."""
        padding = ((0, 0), (0, slots + 1 - search.tokens.shape[1]), (0, 0))
        return _lay_out(
            search._replace(
                tokens=jnp.pad(search.tokens, padding),
                parents=jnp.pad(search.parents, padding),
                cache=self._model.grow(search.cache, slots),
            )
        )


def _lay_out(search: Search) -> Search:
    """On a mesh each process reads whole what a search has found; its cache stays where the compiler lays it."""
    return replicate(search._replace(cache=None))._replace(cache=search.cache)
