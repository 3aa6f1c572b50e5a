"""The verb `show`: what a config means, before anything is trained."""

import os
from collections.abc import Callable, Iterator

import jax
import numpy as np
from etils import epath

from transformer_jax import models
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.commands.validation import check_config
from transformer_jax.config import Config, ConfigError, walk
from transformer_jax.data import make_source
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.data.prepared import prepare
from transformer_jax.data.vocabulary import holds_vocabulary, load_vocabulary
from transformer_jax.models.interface import Model, abstract_params
from transformer_jax.overlay import config_to_dict, fixed_differences
from transformer_jax.parallel.mesh import SEQUENCE, make_mesh, num_data_shards
from transformer_jax.parameters import shapes_by_name
from transformer_jax.training.parameter_count import count_parameters


def describe(config: Config, run_dir: str | os.PathLike[str] | None) -> Iterator[str]:
    """Lines about the config, the model, the mesh and, where the run's data are prepared, the batches."""
    check_config(config)
    if run_dir is not None:
        require_same_run(config, RunFolder.open(run_dir))
    default = {path: value for path, _, value in walk(Config())}
    yield 'config (* differs from the default, which is the paper where it has a say; + may change in a resume)'
    for path, field, value in walk(config):
        marks = f'{"*" if value != default[path] else " "}{"+" if field.metadata.get("free") else " "}'
        yield f'{marks} config.{path} = {value!r}'
    yield ''
    model = build_model(config, run_dir)
    yield from _describe_parameters(model)
    yield f'parameters: {count_parameters(config.model, vocab_size=model.vocab_size):,}'
    mesh = make_mesh(config.execution.mesh)
    yield ''
    sizes = ', '.join(f'{name} {size}' for name, size in mesh.shape.items())
    yield f'mesh: {sizes} ({mesh.devices.flat[0].device_kind})'
    yield ''
    yield from _describe_batches(config, run_dir, mesh)


def build_model(config: Config, run_dir: str | os.PathLike[str] | None) -> Model:
    """The model with the run's own vocabulary, or with the size that the config asks for before there is one."""
    folder = None if run_dir is None else RunFolder(run_dir)
    if folder is not None and holds_vocabulary(folder.vocabulary):
        vocabulary = load_vocabulary(folder.vocabulary)
        size, start_id = vocabulary.size, vocabulary.start_id
    else:
        size, start_id = config.vocabulary.size, 0  # which start id makes no difference to shapes
    return models.build(config.model, vocab_size=size, start_id=start_id, execution=config.execution)


def require_same_run(config: Config, folder: RunFolder) -> None:
    """Refuses a config that the run in the folder could not go on with."""
    for field, old, new in fixed_differences(folder.read_config(), config_to_dict(config)):
        raise ConfigError(f'{field} is {new!r}, but {old!r} in {folder.path}; leave --config out')


def _describe_parameters(model: Model) -> Iterator[str]:
    """The tree of parameters by path, with shapes and counts."""
    shapes = shapes_by_name(abstract_params(model))
    width = max(map(len, shapes))
    yield 'model'
    for name, shape in shapes.items():
        yield f'   {name:<{width}}  {" x ".join(map(str, shape)):<20} {int(np.prod(shape)):>13,}'


def _describe_batches(config: Config, run_dir: str | os.PathLike[str] | None, mesh: jax.sharding.Mesh) -> Iterator[str]:
    notes: list[str] = []
    batches = find_batches(config, run_dir, mesh, notes.append)
    if batches is None:
        yield 'batches: chosen when a run has prepared its data; then show --run DIR prints them'
        return
    yield from notes
    yield 'buckets'
    for bucket in batches.buckets:
        yield f'   {bucket.rows:>5} rows of {bucket.source_length} + {bucket.target_length} subwords'
    per_epoch = batches.batches_in_epoch(0) // config.train.accumulation
    yield f'padding: {batches.padding:.1%}'
    yield f'steps an epoch: {per_epoch:,} ({config.train.steps / max(per_epoch, 1):,.1f} epochs in all)'


def find_batches(
    config: Config, run_dir: str | os.PathLike[str] | None, mesh: jax.sharding.Mesh, report: Callable[[str], None]
) -> TrainingBatches | None:
    """The batches of a run whose data are prepared; None for any other. Writes nothing."""
    folder = None if run_dir is None else RunFolder(run_dir)
    cache = None if folder is None else epath.Path(config.data.cache_dir or folder.data)
    if folder is None or cache is None or not holds_vocabulary(folder.vocabulary) or not list(cache.glob('train-*')):
        return None
    vocabulary = load_vocabulary(folder.vocabulary)
    prepared = prepare(make_source(config, report), 'train', vocabulary, cache, progress=False, report=report)
    return TrainingBatches(
        prepared,
        config.data,
        vocabulary=vocabulary,
        seed=config.seed,
        rows_multiple=num_data_shards(mesh),
        length_multiple=mesh.shape[SEQUENCE],
        group=config.train.accumulation,
        report=report,
    )
