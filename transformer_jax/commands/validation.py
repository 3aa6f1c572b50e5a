"""What every verb checks of a config before it does anything."""

import os
from collections.abc import Mapping
from typing import Any

from transformer_jax import models
from transformer_jax.config import Config
from transformer_jax.decoding.opened_run import OpenedRun, open_run
from transformer_jax.decoding.text_search import check_decoding
from transformer_jax.training.optimizer import check_optimizer
from transformer_jax.training.schedule import check_schedule


def check_config(config: Config) -> None:
    """Checks a whole config on the host, all sections of it. Raises `ConfigError`."""
    models.validate(config)
    check_schedule(config.optimizer.schedule, config.train.steps)
    check_optimizer(config.optimizer)
    check_decoding(config.decoding)


def open_checked_run(
    path: str | os.PathLike[str], changes: Mapping[str, Any], *, may_swap_attention: bool = False
) -> OpenedRun:
    """`open_run`, with the whole config checked."""
    run = open_run(path, changes, may_swap_attention=may_swap_attention)
    check_config(run.config)
    return run
