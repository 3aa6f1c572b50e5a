"""What every test runs under: eight simulated CPU devices, strict ranks, checked shapes, no network, no TensorFlow."""

import os

# Read by jax when it is first imported, so set before anything else.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ.setdefault('JAX_NUMPY_RANK_PROMOTION', 'raise')
# Most of a test's time is compiling, of programs that then run for milliseconds.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Of the TPU compiler: it shall not look for a TPU machine around it, nor lock out one of another process.
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import contextlib
import importlib.abc
import importlib.machinery
import ipaddress
import resource
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook


def _check_types(function: Any) -> Any:
    """Checks a function by beartype.

    Not checked: protocols, names that only a type checker knows, and what pytrees are made of, since jax rebuilds them
    with shapes, shardings and more in the place of arrays.
    """
    if function.__name__ == '__init__':
        return function
    notes = getattr(function, '__annotations__', {})
    for name, hint in notes.items():
        if isinstance(hint, str) or getattr(hint, '_is_protocol', False):
            notes[name] = Any
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


# Array shapes and types are checked at every call of the packages that pass arrays around.
_checker = types.ModuleType('transformer_jax_type_checker')
_checker.check = _check_types  # type: ignore[attr-defined]
sys.modules[_checker.__name__] = _checker
install_import_hook(
    [f'transformer_jax.{name}' for name in ('attention', 'positions', 'layers', 'models', 'training', 'decoding')],
    f'{_checker.__name__}.check',
)

# A busy machine is no failure. CI draws the same examples every time, so that it fails for the commit that breaks.
hypothesis.settings.register_profile(
    'project',
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize='CI' in os.environ,
)
hypothesis.settings.load_profile('project')

collect_ignore = ['benchmarks']  # they compare with packages that the tests do without


class _TensorFlowRefusal(importlib.abc.MetaPathFinder):
    """Makes `import tensorflow` fail where it is installed: nothing of a training process may load it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != 'tensorflow':
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Refusal()
        return spec


class _Refusal(importlib.abc.Loader):
    def exec_module(self, module: Any) -> None:
        raise ImportError('a test imported tensorflow; mark it @pytest.mark.tensorflow if it must', name='tensorflow')


_refusal = _TensorFlowRefusal()
sys.meta_path.insert(0, _refusal)  # while tests are collected, too
_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_getaddrinfo = socket.getaddrinfo


def _require_loopback(host: Any) -> None:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, '', 'localhost'):
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise RuntimeError(f'a test reached for the network: {host!r}')


def _require_local_address(opened: socket.socket, address: Any) -> None:
    if opened.family in (socket.AF_INET, socket.AF_INET6):
        _require_loopback(address[0])


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: Any) -> None:
        _require_local_address(self, address)
        return _connect(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        _require_local_address(self, address)
        return _connect_ex(self, address)

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _require_loopback(host)
        return _getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, 'connect', connect)
    monkeypatch.setattr(socket.socket, 'connect_ex', connect_ex)
    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)


@pytest.fixture
def files_no_longer_than() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A stretch in which writing beyond so many bytes of a file fails, as on a full disk."""

    @contextlib.contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(autouse=True)
def _no_tensorflow(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.get_closest_marker('tensorflow'):
        yield
        return
    sys.meta_path.remove(_refusal)
    try:
        yield
    finally:
        sys.meta_path.insert(0, _refusal)
