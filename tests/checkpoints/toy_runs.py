"""A run folder to save into, and state made of every kind of node that training state is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import CheckpointConfig


class State(NamedTuple):
    step: jax.Array
    params: Any
    optimizer: Any
    average: Any
    rng: jax.Array


def make_params(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        'encoder': {'kernel': jnp.asarray(draw.normal(size=(7, 11)), jnp.float32), 'empty': jnp.zeros((0, 3))},
        'scale': jnp.asarray(draw.normal(size=13), jnp.bfloat16),
        'bias.of/odd name': jnp.asarray(draw.normal(size=()), jnp.float32),
    }


def make_state(seed: int = 0, *, generator: str = 'rbg') -> State:
    params = make_params(seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.identity())
    draw = np.random.default_rng(seed + 1)
    state = jax.tree.map(lambda x: jnp.asarray(draw.integers(1, 99, x.shape), x.dtype), optimizer.init(params))
    return State(jnp.int32(seed), params, state, None, jax.random.key(seed, impl=generator))


def describe(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(leaf: jax.Array) -> tuple[Any, ...]:
    raw = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return str(leaf.dtype), leaf.shape, np.asarray(raw).tobytes()


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, expected)


class Run:
    """A run folder open for writing, its store, and what was reported."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.reports: list[str] = []
        self.folder = RunFolder.start(path, {'seed': 0}, lambda old, new: [])
        self.config = CheckpointConfig(**config)
        self.store = Store(self.folder, self.config, report=self.reports.append)

    def reopen(self) -> None:
        """As if another process went on with the run."""
        self.close()
        self.__init__(Path(self.folder.path), **vars(self.config))

    def reader(self) -> Store:
        return Store(RunFolder.open(self.folder.path), self.config, report=self.reports.append)

    def close(self) -> None:
        self.store.close()
        self.folder.close()


MakeRun = Callable[..., Run]
