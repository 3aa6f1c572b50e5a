"""How many hypotheses of a sentence a search may hold, and what they would take."""

import jax
import jax.numpy as jnp

from transformer_jax.config import ConfigError, DecodingConfig
from transformer_jax.models.interface import Model

MOST_HYPOTHESES = 1000  # of one sentence; beyond about 10 wider beams find no better translations, they only cost


def check_width(model: Model, config: DecodingConfig) -> None:
    """Raises `ConfigError`, with the memory it would take, for a beam above `MOST_HYPOTHESES`."""
    if config.method == 'beam' and config.beam_size > MOST_HYPOTHESES:
        gib = count_bytes(model, config.batch_size * config.beam_size) / 2**30
        raise ConfigError(
            f'config.decoding.beam_size is {config.beam_size:,}; it must be at most {MOST_HYPOTHESES:,}. '
            f'config.decoding.batch_size {config.batch_size:,} sentences of that many hypotheses may take '
            f'{gib:,.1f} GiB for their logits and caches alone'
        )


def count_bytes(model: Model, num_hypotheses: int) -> int:
    """Bytes of the logits of one step and of the caches of as many hypotheses at the model's greatest length."""

    def decode(rng: jax.Array) -> tuple:
        params = model.init(rng)
        ones = jnp.ones((1, 1), jnp.int32)
        cache = model.init_decode(params, model.encode(params, ones, ones, jnp.zeros_like(ones)), model.max_length)
        return model.decode_step(params, ones, cache)

    leaves = jax.tree.leaves(jax.eval_shape(decode, jax.random.key(0)))
    return num_hypotheses * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def check_count(n: int, config: DecodingConfig) -> None:
    """Raises `ValueError` for a number of translations of one line that the method can't give."""
    if n < 1:
        raise ValueError(f'n is {n}; it must be at least 1')
    if config.method == 'greedy' and n > 1:
        raise ValueError(f"n is {n}; greedy gives one translation of a line; use config.decoding.method='beam'")
    if config.method == 'beam' and n > config.beam_size:
        raise ValueError(
            f'n is {n}; beam gives at most config.decoding.beam_size ({config.beam_size}) translations of a line; '
            'raise it'
        )
