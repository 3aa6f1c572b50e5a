"""The verb `plan`: compiles a run's own programs for devices that need not be here, and says what they take."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.commands.evaluator import say
from transformer_jax.commands.planned_program import Question, answer, describe
from transformer_jax.commands.programs import Shape
from transformer_jax.commands.show import find_batches, require_same_run
from transformer_jax.commands.validation import check_config
from transformer_jax.config import Config, ConfigError, MeshConfig
from transformer_jax.data import bucketing
from transformer_jax.parallel.mesh import AXES, SEQUENCE, num_data_shards
from transformer_jax.parallel.platform import compiling_for
from transformer_jax.parallel.targets import open_devices, open_topology

Report = Callable[[str], None]


def print_plan(config: Config, *, search: bool, as_json: bool, **asked: Any) -> None:
    """Prints the plan of each batch shape, and with `search` the table of alternatives to the first.

    Progress and how the shape was chosen go to standard error.
    """
    from transformer_jax.commands.alternatives import Search, table

    questions = ask(config, report=say, **asked)
    if search:
        found = Search(questions[0], say)
        found.run()
        if not found.answers:
            raise ConfigError('; '.join(f'{name}: {reason}' for name, reason in found.pruned))
        answers = found.answers[:1]
    else:
        found, answers = None, []
        for question in questions:
            say(f'compiling for {question.shape.rows} rows ...')
            answers.append(answer(question))
    if as_json:
        values = answers[0].to_dict()
        if len(answers) > 1:
            values['buckets'] = [one.to_dict() for one in answers]
        if found is not None:
            values['alternatives'] = [one.to_dict() for one in found.ordered()]
            values['not_compiled'] = [{'alternative': name, 'reason': reason} for name, reason in found.pruned]
        print(json.dumps(values, indent=2))
        return
    for one in answers:
        for line in describe(one):
            print(line)
    for line in () if found is None else table(found):
        print(line)


def ask(
    config: Config,
    *,
    topology: str | None,
    devices: str | None,
    mesh: str | None,
    batch: int | None,
    length: int | None,
    decode: bool,
    run: str | None,
    report: Report,
) -> list[Question]:
    """The questions that the command line asks: one for each batch shape.

    Raises `ConfigError` for a mesh larger than the target, and for a batch that the mesh can't split.
    """
    target = open_devices(str(devices)) if topology is None else open_topology(topology)
    if mesh is not None:
        execution = dataclasses.replace(config.execution, mesh=parse_mesh(mesh))
        config = dataclasses.replace(config, execution=execution)
    with compiling_for(target.platform):
        check_config(config)
    if run is not None:
        require_same_run(config, RunFolder.open(run))
    first = Question(config, target, Shape(1, 1, 1), decode, run)
    shapes = _choose_shapes(
        config, first.make_mesh(), batch=batch, length=length, decode=decode, run=run, report=report
    )
    return [dataclasses.replace(first, shape=shape) for shape in shapes]


def parse_mesh(text: str) -> MeshConfig:
    """'data=8,model=2' as a mesh; axes that are not named split nothing."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    named = set()
    for part in text.split(','):
        axis, _, ways = part.partition('=')
        if axis not in AXES or axis in named or not ways.isdigit() or not int(ways):
            raise ConfigError(
                f'--mesh is {text!r}; it must be AXIS=WAYS with commas between, as data=8,model=2: each axis once, of '
                f'{", ".join(AXES)}, with ways from 1'
            )
        named.add(axis)
        sizes[axis] = int(ways)
    return MeshConfig(**sizes)


def _choose_shapes(
    config: Config,
    mesh: jax.sharding.Mesh,
    *,
    batch: int | None,
    length: int | None,
    decode: bool,
    run: str | None,
    report: Report,
) -> list[Shape]:
    """What is planned: the shape of the command line, the buckets of a run, or the longest bucket it may have."""
    if length is not None and length > config.model.max_length:
        raise ConfigError(f'--length is {length}, above config.model.max_length {config.model.max_length}')
    shards, pieces = num_data_shards(mesh), 1 if decode else mesh.shape[SEQUENCE]
    if batch is not None:
        _require_even('--batch', batch, 'rows', shards, 'data x fsdp')
    if length is not None:
        _require_even('--length', length, 'subwords', pieces, SEQUENCE)
    if batch is None and length is None and not decode:
        batches = find_batches(config, run, mesh, report)
        if batches is not None:
            ordered = sorted(batches.buckets, key=lambda one: one.rows * one.row_slots, reverse=True)
            return [Shape(one.rows, one.source_length, one.target_length) for one in ordered]
    slots = -(-config.data.max_length // pieces) * pieces if length is None else length
    if batch is None and decode:
        batch = max(config.decoding.batch_size // shards, 1) * shards
    elif batch is None:
        batch = config.data.batch_tokens // slots // shards * shards
        if not batch:
            raise bucketing.budget_error(config.data.batch_tokens, shards, slots)
    if length is None:
        known = 'what config.data.max_length allows' if decode else 'the longest bucket that the config may choose'
        report(f'planned for {batch} rows of {slots} subwords, {known}; --batch, --length or --run DIR say otherwise')
    return [Shape(batch, slots, slots)]


def _require_even(flag: str, size: int, what: str, ways: int, axes: str) -> None:
    if size % ways == 0:
        return
    lower = size - size % ways
    raise ConfigError(
        f'{flag} is {size} {what}, which the {ways} shards of the mesh axis {axes} can not split evenly; '
        f'{f"{lower} or " if lower else ""}{lower + ways} would fit'
    )
