"""Sampling: the next subword drawn at random from the model's own distribution, cut and tempered as asked."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer_jax.decoding.candidates import Specials, forbid, log_normalizer
from transformer_jax.decoding.hypotheses import Choice, Search
from transformer_jax.shapes import Array, Float


@dataclass(frozen=True)
class Sampling:
    """W independent draws a sentence (they may repeat). Reported log probabilities are the model's: untempered, uncut.

    `temperature` divides the logits. Then `top_k` keeps the k most probable subwords, and `top_p` the fewest most
    probable ones whose probabilities reach p together; ties with the last one kept stay in.
    """

    num_hypotheses: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def choose(
        self, logits: Float[Array, 'B P V'], search: Search, live: Float[Array, 'B P'], specials: Specials
    ) -> Choice:
        """Every sentence draws from its own key, so what stands beside it in the batch changes nothing."""
        B, P, V = logits.shape
        shape = (B, self.num_hypotheses, V)
        allowed = forbid(logits, specials, search.step >= search.min_lengths)
        tempered = jnp.broadcast_to(self._cut(allowed / self.temperature), shape)
        keys = jax.vmap(jax.random.fold_in, (0, None))(search.keys, search.step)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, shape[1:]))(keys)
        tokens = (tempered + noise).argmax(axis=-1)
        totals = jnp.broadcast_to(allowed + (live - log_normalizer(logits))[..., None], shape)
        # At the first step all draws come from the one empty hypothesis.
        parents = jnp.broadcast_to(jnp.minimum(jnp.arange(self.num_hypotheses), P - 1), shape[:2])
        return Choice(jnp.take_along_axis(totals, tokens[..., None], axis=-1)[..., 0], parents, tokens)

    def _cut(self, logits: Float[Array, 'B P V']) -> Float[Array, 'B P V']:
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits >= smallest, logits, -jnp.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            probabilities = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the subwords more probable than this one
            smallest = jnp.where(before < self.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
            logits = jnp.where(logits >= smallest, logits, -jnp.inf)
        return logits
