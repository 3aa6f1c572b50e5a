"""A finished or running run, opened to be read: its config, its vocabulary, its model and its parameters."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from transformer_jax import models
from transformer_jax.checkpoints.digests import MANIFEST, RequestError
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import ATTENTION_USES, Config, ConfigError, ModelConfig
from transformer_jax.data.vocabulary import Vocabulary, load_vocabulary
from transformer_jax.models.interface import Model, abstract_params
from transformer_jax.overlay import config_from_dict, config_to_dict, fixed_differences, overlay
from transformer_jax.parameters import shapes_by_name
from transformer_jax.positions import SCHEMES
from transformer_jax.shapes import Params

# What another config may say of a trained model: which text it is tried on. Its free fields may differ anyway.
_ABOUT_TEXT = ('config.data.', 'config.source_language', 'config.target_language')
# What of the model may be swapped where the caller looks at what that changes; see `evaluation.comparison`.
_ATTENTION = tuple(f'config.model.{use}.' for use in ('attention', *ATTENTION_USES))
_LONGEST = 'config.model.max_length'  # another one fits where no parameter has a row for each position


@dataclass(frozen=True)
class OpenedRun:
    folder: RunFolder
    config: Config  # with the caller's changes
    vocabulary: Vocabulary
    model: Model
    trained_config: Config
    trained_model: Model  # `model`, but where the caller's changes swap its attention

    def load_params(
        self, checkpoint: str | int | os.PathLike[str] | None = None, *, report: Callable[[str], None] = print
    ) -> tuple[Params, dict[str, Any]]:
        """Parameters and what is known of them.

        `checkpoint` is a step, 'best', 'latest', or a folder of averaged or exported parameters; None takes the best
        where the run has scores, else the latest. Where the run keeps a moving average of its parameters, that is what
        is meant, as in its own evaluations. Raises `RequestError` naming what there is when that is not there.
        """
        abstract = abstract_params(self.model)
        step = int(checkpoint) if isinstance(checkpoint, str) and checkpoint.isdecimal() else checkpoint
        part = 'params' if self.config.train.ema_decay is None else 'average'
        with Store(self.folder, self.config.checkpoint, report=report) as store:
            if step is not None and not isinstance(step, int) and step not in ('best', 'latest'):
                _require_parameters(step, store, self.folder)
            return store.restore_params(abstract, step, part=part)


def _require_parameters(path: str | os.PathLike[str], store: Store, folder: RunFolder) -> None:
    """Refuses what is no folder of parameters before a reader finds it damaged."""
    if not epath.Path(path).is_dir():
        steps = ', '.join(map(str, sorted({*store.steps(), *store.snapshots()}))) or 'none'
        raise RequestError(
            f'checkpoint {str(path)!r} is neither a step nor best nor latest nor a folder of parameters; '
            f'{folder.path} has the steps {steps}'
        )
    if not (epath.Path(path) / MANIFEST).exists():
        raise RequestError(f'{os.fspath(path)} holds no parameters: it has no {MANIFEST}')


def open_run(
    path: str | os.PathLike[str], changes: Mapping[str, Any], *, may_swap_attention: bool = False
) -> OpenedRun:
    """Opens a run folder. `changes` of fields that the trained model depends on raise `ConfigError`.

    The longest text may be another one than in training, unless a parameter has a row for each position.
    """
    folder = RunFolder.open(path)
    stored = config_from_dict(folder.read_config())
    config = overlay(stored, changes)
    free = _ABOUT_TEXT + (_ATTENTION if may_swap_attention else ())
    for field, old, new in fixed_differences(config_to_dict(stored), config_to_dict(config)):
        if field == _LONGEST:
            require_no_table(stored.model, config.model.max_length, path)
        elif not field.startswith(free):
            raise ConfigError(f'{field} is {new!r}, but the model in {folder.path} was trained with {old!r}')
    models.validate(config)
    vocabulary = load_vocabulary(folder.vocabulary)
    folder.check_vocabulary(vocabulary.fingerprint)
    model, trained = (
        models.build(one.model, vocab_size=vocabulary.size, start_id=vocabulary.start_id, execution=config.execution)
        for one in (config, stored)
    )
    return OpenedRun(folder, config, vocabulary, model, stored, trained)


def require_no_table(trained: ModelConfig, max_length: int, path: str | os.PathLike[str]) -> None:
    """Refuses another `max_length` where it changes the shape of parameters: learned positions, low-rank attention."""
    shapes = []
    for config in (trained, dataclasses.replace(trained, max_length=max_length)):
        model = models.build(config, vocab_size=8, start_id=1)  # any vocabulary: it does not count positions
        shapes.append(shapes_by_name(abstract_params(model)))
    if shapes[0] == shapes[1]:
        return
    without = ', '.join(repr(name) for name, scheme in SCHEMES.items() if scheme.max_length != 'table')
    raise ConfigError(
        f'{_LONGEST} is {max_length}, but the model in {os.fspath(path)} has learned rows for {trained.max_length} '
        f'positions and no more (positions={trained.positions!r}, attention.kind={trained.attention.kind!r}); longer '
        f'texts need a model trained for them, or with positions of {without}'
    )
