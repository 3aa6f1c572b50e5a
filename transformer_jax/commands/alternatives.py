"""`plan --search`: other splits of the mesh, batches and remat policies, each compiled, and the table of them all.

One thing is changed at a time, from the best that was found so far: a grid of everything would take hours of compiling.
What can be told without compiling is not compiled.
"""

import dataclasses
from collections.abc import Callable, Iterator

from transformer_jax.commands import programs
from transformer_jax.commands.planned_program import Answer, Question, answer, say_bytes
from transformer_jax.commands.show import build_model
from transformer_jax.config import ConfigError, ExecutionConfig, MeshConfig
from transformer_jax.parallel.mesh import AXES, num_data_shards

Report = Callable[[str], None]


class Search:
    """The alternatives tried so far, compiled ones and others."""

    def __init__(self, question: Question, report: Report) -> None:
        self._report = report
        self._tried: set[tuple] = set()
        self._state: dict[MeshConfig, int] = {}  # least bytes a device
        self._first = question
        self.answers: list[Answer] = []
        self.pruned: list[tuple[str, str]] = []  # what was not compiled, and why

    def run(self) -> None:
        """Tries mesh splits, then batches, then remat policies."""
        self._try(self._first)
        for mesh in _splits(self._first):
            self._try(_with(self._first, mesh=mesh))
        best = self._best()
        start = self._first if best is None else best.question
        if best is None:
            self._shrink(start)
        else:
            self._grow(start)
        if not self._first.decode:
            self._rematerialise()

    def ordered(self) -> list[Answer]:
        """The fastest first, what does not fit last."""
        return sorted(self.answers, key=_order)

    def _shrink(self, start: Question) -> None:
        """Smaller batches until one fits."""
        rows = start.shape.rows
        while self._best() is None and rows % 2 == 0:
            rows //= 2
            self._try(_with(start, rows=rows))

    def _grow(self, start: Question) -> None:
        """Twice and four times the batch, as long as it fits; then half of it."""
        for factor in (2, 4):
            found = self._try(_with(start, rows=start.shape.rows * factor))
            if found is None or found.does_not_fit is not None:
                if factor == 2:
                    self._prune(_with(start, rows=start.shape.rows * 4), 'half of it does not fit')
                break
        if start.shape.rows % 2 == 0:
            self._try(_with(start, rows=start.shape.rows // 2))

    def _rematerialise(self) -> None:
        """Recomputing buys room with time: only where more rows do not fit without it."""
        refused = [one for one in self.answers if one.does_not_fit is not None]
        now = self._first.config.execution.remat
        policies = [policy for policy in _remat_policies() if policy != now]
        if not refused:
            for policy in policies:
                self._prune(_with(self._first, remat=policy), 'everything fits; this would only compute more')
            return
        best = self._best()
        same_mesh = [one for one in refused if best is None or one.mesh == best.mesh] or refused
        asked = min(same_mesh, key=lambda one: one.question.shape.rows).question
        for policy in policies:
            self._try(_with(asked, remat=policy))

    def _best(self) -> Answer | None:
        fitting = [one for one in self.answers if one.does_not_fit is None]
        return max(fitting, key=lambda one: one.tokens_per_second or 0.0, default=None)

    def _try(self, question: Question) -> Answer | None:
        key = (question.config.execution, question.shape)
        if key in self._tried:
            return None
        self._tried.add(key)
        try:
            if reason := self._why_not(question):
                self._prune(question, reason)
                return None
            self._report(f'compiling {describe_question(question)} ...')
            found = answer(question)
        except ConfigError as error:
            self._prune(question, str(error))
            return None
        self.answers.append(found)
        self._report(f'   {_describe_outcome(found)}')
        return found

    def _why_not(self, question: Question) -> str | None:
        """What can be told without compiling. Raises `ConfigError` where the mesh can't split a parameter."""
        mesh = question.make_mesh()
        shards, memory = num_data_shards(mesh), question.target.memory
        if question.shape.rows % shards:
            return f'{question.shape.rows} rows can not be split {shards} ways'
        if question.decode or memory is None:
            return None
        key, config = question.config.execution.mesh, question.config
        if key not in self._state:
            model = build_model(config, question.run)
            state = programs.training_bytes(config, model, question.target, mesh)
            self._state[key] = sum(state) + state.parameters  # the gradients
        if self._state[key] <= memory:
            return None
        return f'parameters, gradients and optimizer state alone take {say_bytes(self._state[key])}'

    def _prune(self, question: Question, reason: str) -> None:
        self._tried.add((question.config.execution, question.shape))
        self.pruned.append((describe_question(question), reason))


def table(search: Search) -> Iterator[str]:
    """All that was compiled, the fastest first and what does not fit last; then what was not compiled."""
    head = ('tokens/s', 'step ms', 'MFU', 'peak memory', 'rows', 'a device', 'remat', 'mesh', 'compile s', '')
    rows = [head, *(_row(one) for one in search.ordered())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        cells = (f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True))
        yield '  '.join(cells).rstrip()
    for name, reason in search.pruned:
        yield f'not compiled: {name}: {reason}'


def describe_question(question: Question) -> str:
    """One alternative in words."""
    mesh = question.config.execution.mesh
    sizes = ((axis, getattr(mesh, axis)) for axis in AXES)
    split = ', '.join(f'{axis} {"rest" if ways is None else ways}' for axis, ways in sizes if ways != 1) or 'no split'
    remat = '' if question.decode else f', remat {question.config.execution.remat}'
    return f'{question.shape.rows} rows, {split}{remat}'


def _describe_outcome(one: Answer) -> str:
    if one.does_not_fit is not None:
        return f'does not fit: {one.does_not_fit}'
    speed = one.tokens_per_second
    seconds = 0.0 if one.plan is None else one.plan.compile_seconds
    known = 'unknown speed' if speed is None else f'{speed:,.0f} tokens/s'
    return f'{known}, {say_bytes(one.needed_bytes)}, compiled in {seconds:,.0f} s'


def _order(one: Answer) -> tuple[bool, float]:
    return one.does_not_fit is not None, -(one.tokens_per_second or 0.0)


def _row(one: Answer) -> tuple[str, ...]:
    def show(value: float | None, form: str) -> str:
        return '-' if value is None else format(value, form)

    plan = one.plan
    seconds = None if plan is None or plan.step_seconds is None else plan.step_seconds * 1e3
    shape = one.question.shape
    return (
        show(one.tokens_per_second, ',.0f'),
        show(seconds, ',.2f'),
        show(one.model_flop_utilisation, '.1%'),
        say_bytes(one.needed_bytes),
        str(shape.rows),
        f'{shape.rows / one.num_devices:g}',
        '-' if one.question.decode else one.question.config.execution.remat,
        ' '.join(f'{axis}={ways}' for axis, ways in one.mesh.items() if ways > 1) or '1',
        show(None if plan is None else plan.compile_seconds, ',.0f'),
        '' if one.does_not_fit is None else 'does not fit',
    )


def _splits(question: Question) -> Iterator[MeshConfig]:
    """Other ways to split as many devices: rows alone, parameters with them, and heads and layers 2 and 4 ways."""
    count = question.make_mesh().size
    yield MeshConfig(data=count)
    if count > 1:
        yield MeshConfig(data=1, fsdp=count)
    for ways in (2, 4):
        if count % ways == 0 and count > ways:
            yield MeshConfig(data=1, fsdp=count // ways, model=ways)


def _remat_policies() -> tuple[str, ...]:
    fields = {field.name: field for field in dataclasses.fields(ExecutionConfig)}
    return fields['remat'].metadata['choices']


def _with(
    question: Question, *, mesh: MeshConfig | None = None, rows: int | None = None, remat: str | None = None
) -> Question:
    execution = question.config.execution
    if mesh is not None:
        execution = dataclasses.replace(execution, mesh=mesh)
    if remat is not None:
        execution = dataclasses.replace(execution, remat=remat)
    shape = question.shape if rows is None else question.shape._replace(rows=rows)
    return dataclasses.replace(question, config=dataclasses.replace(question.config, execution=execution), shape=shape)
