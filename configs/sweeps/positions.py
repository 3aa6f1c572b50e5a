"""Every position scheme on the built-in task.

Base:      configs/quickstart.py
Points:    one training each, about 2 minutes on 2 CPU cores
"""

from collections.abc import Iterator
from typing import Any

BASE = 'configs/quickstart.py'


def points() -> Iterator[tuple[str, dict[str, Any]]]:
    for scheme in ('none', 'sinusoidal', 'learned', 'shaw', 'rope', 't5', 'alibi'):
        yield scheme, {'model.positions': scheme}
