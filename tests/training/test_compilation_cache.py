"""Programs come back from the cache, and are counted."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.config import ConfigError
from transformer_jax.training.compilation_cache import CompilationCache


@pytest.fixture(autouse=True)
def _keep_all():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    yield
    jax.config.update('jax_persistent_cache_min_compile_time_secs', before)


def compile_once() -> None:
    jax.clear_caches()
    jax.jit(lambda x: jnp.sin(x) * 7919).lower(jax.ShapeDtypeStruct((13,), jnp.float32)).compile()


def test_the_second_start_takes_what_the_first_made(tmp_path: Path) -> None:
    for hits, misses in ((0, 1), (1, 0)):
        with CompilationCache(str(tmp_path / 'new' / 'cache')) as cache:
            assert cache.describe() is None
            compile_once()
        assert cache.counts() == {'hits': hits, 'misses': misses}
        assert cache.describe() == f'compiled programs: {hits} taken from the cache, {misses} made'
        jax._src.compilation_cache.reset_cache()  # as a new process has it
    assert jax.config.jax_compilation_cache_dir != str(tmp_path / 'new' / 'cache')
    compile_once()
    assert cache.hits == 1


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    folder = str(tmp_path / 'file' / 'cache')
    with pytest.raises(ConfigError, match=re.escape(f"config.execution.compilation_cache is '{folder}'")):
        CompilationCache(folder).__enter__()
