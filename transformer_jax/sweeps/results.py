"""The figures of a sweep: what each finished training reached and cost, and a row for each point."""

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.data import HAVE_ONE_ANSWER
from transformer_jax.evaluation.significance import (
    Difference,
    Interval,
    LineStatistics,
    bleu_statistics,
    compare,
    estimate_interval,
    exact_match_statistics,
    resample_scores,
)
from transformer_jax.sweeps.folder import SweepFolder, TrialState
from transformer_jax.sweeps.points import Point, Sweep, Trial, spell
from transformer_jax.training.figure_files import read_figures

EXACT_MATCH, BLEU, ACCURACY = 'exact match, %', 'sacreBLEU', 'accuracy of subwords, %'


@dataclass(frozen=True)
class Cost:
    """What a training took. None where its figures do not say."""

    parameters: int | None
    steps: int | None
    step_seconds: float | None  # median over the stretches between two reports; compiling and evaluating are not in it
    host_bytes: int | None  # peak memory of the training's process
    device_bytes: int | None  # peak of the fullest device; None where devices share the host's memory
    seconds: float | None  # wall time of all starts, but for what a kill lost


@dataclass(frozen=True)
class Reached:
    """A score of one training, and how it spreads over resamples of the lines where there are lines."""

    name: str
    value: float
    lines: tuple[str, ...] = ()  # the references, so that only scores on the same lines are compared
    resampled: np.ndarray | None = None


@dataclass(frozen=True)
class Row:
    """One point of the table. What is not known yet is None."""

    point: str
    status: str
    differs: str  # what the point changes, but for what all points change alike
    num_seeds: int
    seeds_finished: int = 0
    score_name: str | None = None
    score: float | None = None  # mean over the seeds
    interval: Interval | None = None  # over lines, of that mean
    spread: float | None = None  # standard deviation over the seeds, of two at least
    difference: Difference | None = None  # from the baseline, on the same lines
    cost: Cost | None = None  # mean over the seeds, but the largest memory
    reason: str = ''


def make_rows(
    folder: SweepFolder, sweep: Sweep, states: Mapping[str, TrialState], baseline: str | None = None
) -> list[Row]:
    """A row for each point. `states` are of the trainings by name; `baseline` is a point, None = the first.

    Raises `ConfigError` for a baseline that is no point.
    """
    base = sweep.select([baseline])[0].point if baseline is not None else sweep.points[0]
    reached = {point.name: _reach(folder, sweep, point, states) for point in sweep.points}
    return [
        _make_row(folder, sweep, point, states, reached[point.name], reached[base.name], is_base=point is base)
        for point in sweep.points
    ]


def read_cost(run_dir: epath.PathLike) -> Cost:
    """What the figures and the record of a run say of its cost."""
    run = RunFolder(run_dir)
    records = read_figures(run.metrics) if run.metrics.exists() else []
    headers = [one for one in records if one['event'] == 'header']
    trained = [one for one in records if one['event'] == 'train']
    times = [1 / one['steps_per_second'] for one in trained if one.get('steps_per_second')]
    memory = run.read_record().get('peak_memory', {})
    return Cost(
        parameters=headers[-1]['parameters'] if headers else None,
        steps=max((one['step'] for one in trained), default=None),
        step_seconds=statistics.median(times) if times else None,
        host_bytes=memory.get('host_bytes'),
        device_bytes=memory.get('device_bytes'),
        seconds=_sum_of_starts(records),
    )


def describe_changes(point: Point, points: Sequence[Point]) -> str:
    """What a point changes, in the words of the command line, but for what all of several points change alike."""
    alike = set[tuple[str, str]]()
    if len(points) > 1:
        spelled = [{(path, spell(value)) for path, value in one.changes.items()} for one in points]
        alike = set.intersection(*spelled)
    changes = [(path, spell(value)) for path, value in point.changes.items()]
    return ', '.join(f'{path}={value}' for path, value in changes if (path, value) not in alike)


def _sum_of_starts(records: Sequence[Mapping[str, Any]]) -> float | None:
    seconds: list[float] = []
    for one in records:
        if one['event'] in ('start', 'resume'):
            seconds.append(0.0)
        elif seconds:
            seconds[-1] = (
                one.get('wall_seconds') or (one.get('seconds') if one['event'] == 'train' else 0) or seconds[-1]
            )
    return sum(seconds) if seconds else None


def _make_row(
    folder: SweepFolder,
    sweep: Sweep,
    point: Point,
    states: Mapping[str, TrialState],
    reached: Sequence[Reached],
    baseline: Sequence[Reached],
    *,
    is_base: bool,
) -> Row:
    trials = [Trial(point, seed) for seed in sweep.seeds_of(point)]
    of_point = [states[trial.name] for trial in trials]
    costs = [
        read_cost(folder.run_dir(trial))
        for trial, state in zip(trials, of_point, strict=True)
        if state.status == 'finished'
    ]
    row: dict[str, Any] = {
        'point': point.name,
        'status': _status_of(of_point),
        'differs': describe_changes(point, sweep.points),
        'num_seeds': len(trials),
        'seeds_finished': len(reached),
        'cost': _mean_cost(costs) if costs else None,
        'reason': '; '.join(dict.fromkeys(state.reason for state in of_point if state.reason)),
    }
    if not reached:
        return Row(**row)
    values = [one.value for one in reached]
    row |= {
        'score_name': reached[0].name,
        'score': statistics.fmean(values),
        'spread': statistics.stdev(values) if len(values) > 1 else None,
    }
    resampled = _mean_resampled(reached)
    if resampled is not None:
        row['interval'] = estimate_interval(resampled)
        against = _mean_resampled(baseline)
        comparable = baseline and (baseline[0].name, baseline[0].lines) == (reached[0].name, reached[0].lines)
        if against is not None and comparable and not is_base:
            base_score = statistics.fmean(one.value for one in baseline)
            row['difference'] = compare(row['score'], resampled, base_score, against)
    return Row(**row)


def _status_of(states: Sequence[TrialState]) -> str:
    """One word for all seeds of a point: the one that most needs to be seen."""
    found = {state.status for state in states}
    return next(one for one in ('failed', 'running', 'unfinished', 'waiting', 'finished') if one in found)


def _reach(folder: SweepFolder, sweep: Sweep, point: Point, states: Mapping[str, TrialState]) -> list[Reached]:
    found = []
    for seed in sweep.seeds_of(point):
        trial = Trial(point, seed)
        outcome = states[trial.name].outcome
        if states[trial.name].status == 'finished' and outcome is not None and outcome.evaluation is not None:
            config = outcome.config or {}
            exact = config['data']['source'] in HAVE_ONE_ANSWER
            evaluation = folder.run_dir(trial) / outcome.evaluation
            found.append(read_score(str(evaluation), outcome.split, exact, config['target_language']))
    return found


@functools.cache
def read_score(evaluation: str, split: str, exact: bool, language: str | None) -> Reached:
    """The score in the folder of an evaluation, which never changes: exact match if `exact`, else sacreBLEU.

    Of a model that translates nothing: the accuracy of what it predicts, which has no interval.
    """
    path = epath.Path(evaluation)
    result = json.loads((path / f'{split}.json').read_text())
    if not (path / f'{split}.hypotheses.txt').exists():
        return Reached(ACCURACY, 100 * result['accuracy'])
    hypotheses, references = (_read_lines(path / f'{split}.{name}.txt') for name in ('hypotheses', 'references'))
    lines: LineStatistics
    if exact:
        lines = exact_match_statistics(hypotheses, references)
    else:
        lines = bleu_statistics(hypotheses, references, language)
    name = EXACT_MATCH if exact else BLEU
    return Reached(name, lines.score, tuple(references), resample_scores(lines))


def _read_lines(path: epath.Path) -> list[str]:
    return path.read_bytes().decode().split('\n')[:-1]


def _mean_resampled(reached: Sequence[Reached]) -> np.ndarray | None:
    """Resample by resample the mean over the seeds; None where a score has no lines, or seeds have other lines."""
    resampled = [one.resampled for one in reached if one.resampled is not None]
    if not reached or len(resampled) < len(reached) or len({one.lines for one in reached}) > 1:
        return None
    return np.mean(resampled, axis=0)


def _mean_cost(costs: Sequence[Cost]) -> Cost:
    def mean(values: Sequence[Any]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    def largest(values: Sequence[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return Cost(
        parameters=largest([one.parameters for one in costs]),
        steps=largest([one.steps for one in costs]),
        step_seconds=mean([one.step_seconds for one in costs]),
        host_bytes=largest([one.host_bytes for one in costs]),
        device_bytes=largest([one.device_bytes for one in costs]),
        seconds=mean([one.seconds for one in costs]),
    )
