"""Run folders that are closed again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.toy_runs import MakeRun, Run


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    runs: list[Run] = []

    def make(name: str = 'run', **config: Any) -> Run:
        runs.append(Run(tmp_path / name, **config))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
