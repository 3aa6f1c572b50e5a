"""The rows of a sweep as text: CSV with whole figures, Markdown and plain lines with readable ones."""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformer_jax.sweeps.results import Cost, Row

_LONGEST = 40  # of the description of a point on a terminal


@dataclass(frozen=True)
class Column:
    """A column of the readable tables."""

    title: str
    show: Callable[[Row], str]


def to_csv(rows: Sequence[Row]) -> str:
    """One line a point, with a header; empty where a figure is not known. Bytes, seconds and scores unrounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(_figures(rows[0]))
    writer.writerows([*_figures(row).values()] for row in rows)
    return text.getvalue()


def to_markdown(name: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table with its columns that hold something, and what the figures mean."""
    table = [['' if cell is None else cell for cell in line] for line in _cells(rows, _columns(rows))]
    width = [max(len(_escape(line[index])) for line in table) for index in range(len(table[0]))]
    lines = [
        '| ' + ' | '.join(_escape(cell).ljust(size) for cell, size in zip(line, width, strict=True)) + ' |'
        for line in table
    ]
    lines.insert(1, '|' + '|'.join('-' * (size + 2) for size in width) + '|')
    return '\n'.join([f'# Sweep {name}', '', *lines, '', *(f'- {note}' for note in notes), ''])


def to_lines(rows: Sequence[Row]) -> list[str]:
    """The table for a terminal, a line a point under a header; long descriptions of points are cut."""
    table = _cells([dataclasses.replace(row, differs=_shorten(row.differs)) for row in rows], _columns(rows))
    width = [max(len(line[index]) for line in table) for index in range(len(table[0]))]
    return [
        '  '.join(cell.ljust(size) for cell, size in zip(line, width, strict=True)).rstrip().replace('\n', ' ')
        for line in table
    ]


def describe(row: Row) -> str:
    """One point in one line, without its name."""
    columns = [column for column in _columns([row])[2:] if column.title != 'differs']
    shown = [f'{column.title} {text}' for column in columns if (text := column.show(row))]
    return row.status + ''.join(f'; {text}' for text in shown)


def explain(baseline: str, rows: Sequence[Row]) -> list[str]:
    """What a reader of the table needs to know of its figures."""
    notes = [
        'In brackets: 95 % of 1,000 bootstrap resamples of the test lines.',
        f'Difference: from {baseline}, on the same resamples (paired bootstrap).',
        'p: as sacreBLEU computes it, of about one side alone; the interval of the difference is of both.',
        'Step time: median, without compiling, evaluating and saving. Memory: peak of the training.',
    ]
    if any(row.num_seeds > 1 for row in rows):
        notes.append('Score and its interval: mean over seeds; spread: standard deviation over seeds.')
    return notes


def _cells(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    return [[column.title for column in columns], *([column.show(row) for column in columns] for row in rows)]


def _columns(rows: Sequence[Row]) -> list[Column]:
    names = list(dict.fromkeys(row.score_name for row in rows if row.score_name))
    score = names[0] if len(names) == 1 else 'score'
    several = any(row.num_seeds > 1 for row in rows)
    columns = [
        Column('point', lambda row: row.point),
        Column('status', lambda row: row.status),
        Column('differs', lambda row: row.differs),
        Column(score, lambda row: _show_score(row, with_name=len(names) > 1)),
        Column('difference', _show_difference),
        Column('p', _show_p_value),
        Column('seeds', lambda row: f'{row.seeds_finished}/{row.num_seeds}' if several else ''),
        Column('spread', lambda row: '' if row.spread is None else f'{row.spread:.2f}'),
        Column('parameters', lambda row: _of_cost(row, lambda cost: cost.parameters, '{:,}')),
        Column('step', lambda row: _of_cost(row, lambda cost: cost.step_seconds, '{:.3g} s')),
        Column('memory', _show_memory),
        Column('training', lambda row: _of_cost(row, lambda cost: cost.seconds, '{:,.0f} s')),
        Column('reason', lambda row: row.reason),
    ]
    return [column for number, column in enumerate(columns) if number < 2 or any(column.show(row) for row in rows)]


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'


def _show_score(row: Row, *, with_name: bool) -> str:
    if row.score is None:
        return ''
    text = f'{row.score_name} ' if with_name else ''
    text += f'{row.score:.2f}'
    return text if row.interval is None else f'{text} [{row.interval.low:.2f}, {row.interval.high:.2f}]'


def _show_difference(row: Row) -> str:
    if row.difference is None:
        return ''
    low, high = row.difference.interval
    return f'{row.difference.value:+.2f} [{low:+.2f}, {high:+.2f}]'


def _show_p_value(row: Row) -> str:
    return '' if row.difference is None or row.difference.p_value is None else f'{row.difference.p_value:.3f}'


def _show_memory(row: Row) -> str:
    device = _of_cost(row, lambda cost: cost.device_bytes and cost.device_bytes / 2**20, '{:,.0f} MiB device')
    return device or _of_cost(row, lambda cost: cost.host_bytes and cost.host_bytes / 2**20, '{:,.0f} MiB host')


def _of_cost(row: Row, get: Callable[[Cost], float | None], form: str) -> str:
    value = None if row.cost is None else get(row.cost)
    return '' if value is None else form.format(value)


def _figures(row: Row) -> dict[str, Any]:
    """The columns of the CSV file."""
    interval, difference, cost = row.interval, row.difference, row.cost
    return {
        'point': row.point,
        'status': row.status,
        'differs': row.differs,
        'score_name': row.score_name,
        'score': row.score,
        'score_low': interval and interval.low,
        'score_high': interval and interval.high,
        'difference': difference and difference.value,
        'difference_low': difference and difference.interval.low,
        'difference_high': difference and difference.interval.high,
        'p_value': difference and difference.p_value,
        'seeds': row.num_seeds,
        'seeds_finished': row.seeds_finished,
        'score_standard_deviation': row.spread,
        'parameters': cost and cost.parameters,
        'steps': cost and cost.steps,
        'step_seconds': cost and cost.step_seconds,
        'peak_host_bytes': cost and cost.host_bytes,
        'peak_device_bytes': cost and cost.device_bytes,
        'training_seconds': cost and cost.seconds,
        'reason': row.reason,
    }


def _escape(text: str) -> str:
    return text.replace('\\', '\\\\').replace('|', '\\|').replace('\n', ' ')
