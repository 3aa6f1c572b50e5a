"""The platform that programs are made for: this machine's, unless one is compiled for elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_ELSEWHERE: ContextVar[str | None] = ContextVar('elsewhere', default=None)


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced inside is meant for 'cpu', 'gpu' or 'tpu', wherever it is traced."""
    token = _ELSEWHERE.set(platform)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def target_platform() -> str:
    """'cpu', 'gpu' or 'tpu'."""
    return _ELSEWHERE.get() or jax.default_backend()
