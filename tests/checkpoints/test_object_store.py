"""A run folder on an object store: one in memory, reached by the calls that gs:// takes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # noqa: F401 - registers what epath finds
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from tests.commands.test_train import CONFIG, start
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ConfigError, LoggingConfig
from transformer_jax.overlay import overlay
from transformer_jax.training.figure_files import read_figures
from transformer_jax.training.reporting import Reporter


class Bucket(MemoryFileSystem):
    """Objects in memory. There are no folders but by the names of what lies in them, no locks and no renames."""

    protocol = 'gs'
    store: dict[str, Any] = {}
    pseudo_dirs = ['']

    def __init__(self, *arguments: Any, finalize_on_close: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace('gs://', 'memory://') if isinstance(path, str) else path)

    def mv(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError('an object store has no rename')


@pytest.fixture(autouse=True)
def _bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ('gs', 'gcs'):
        monkeypatch.setitem(sys.modules['fsspec.registry']._registry, name, Bucket)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    Bucket.store.clear()
    yield
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


def test_a_run_starts_there_and_goes_on_and_refuses_what_it_would_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    run = 'gs://bucket/some/run'
    assert len(start(CONFIG, run)) == 1
    names = {name.removeprefix('/bucket/some/run/') for name in Bucket.store}
    assert names == {'config.json', 'record.json', 'vocabulary/spm.model', 'vocabulary/vocabulary.json'}
    assert list(tmp_path.glob('transformer_jax/prepared/train-*/source_ids')), 'ids are mapped from a local disk'
    with pytest.raises(ConfigError, match='config.seed: 0 in the run, 3 now'):
        start(overlay(CONFIG, {'seed': 3}), run)
    assert len(start(overlay(CONFIG, {'train.steps': 99}), run)) == 1
    folder = RunFolder.open(run)
    assert folder.read_config()['train']['steps'] == 99
    assert [one['to_step'] for one in folder.read_record()['starts']] == [0, 0]
    assert json.loads(folder.earlier_configs.read_text())['config']['train']['steps'] == CONFIG.train.steps


def test_figures_are_written_and_taken_up_there() -> None:
    for start_step in (0, 10):
        run = 'gs://bucket/run'
        config = LoggingConfig(tensorboard=False)
        with Reporter(f'{run}/metrics.jsonl', f'{run}/tensorboard', config, total_steps=30) as reporter:
            reporter.begin(start_step)
            for step in (start_step + 5, start_step + 10, start_step + 15):
                reporter.evaluation(step, {'loss': 1.0 * step})
    steps = [one['step'] for one in read_figures(f'{run}/metrics.jsonl') if one['event'] == 'evaluation']
    assert steps == [5, 10, 15, 20, 25]


def test_a_store_whose_package_is_missing_is_said_with_what_to_install() -> None:
    for name in ('gs', 'gcs'):
        sys.modules['fsspec.registry']._registry.pop(name)
    with pytest.raises(ConfigError, match=r"gs://bucket/run.*gcsfs.*pip install 'transformer-jax\[gcs\]'"):
        start(CONFIG, 'gs://bucket/run')
