"""Axis letters and array types, said once.

B batch; T query or target length; S key or source length; D model width `d_model`; N query heads; K key-value heads;
H query and key head width d_k; U value head width d_v; F feed-forward width `d_ff`; V vocabulary; W beam width.
Heads are axis -2: `B T N H`.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Key

Params = Any  # a pytree of parameters
Cache = Any  # a pytree of keys, values and their positions, or another decode state
PRNGKey = Key[Array, '']

__all__ = ['Array', 'Bool', 'Cache', 'Float', 'Int', 'Key', 'PRNGKey', 'Params']
