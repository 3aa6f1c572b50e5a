"""Pictures of a sweep: scores with their intervals, and score against step time and memory. Needs the extra `viz`."""

from collections.abc import Sequence
from pathlib import Path

from transformer_jax.sweeps.results import Row

SCORES, COSTS = 'scores.png', 'costs.png'


def draw(folder: Path, rows: Sequence[Row], baseline: str) -> list[Path]:
    """Draws what the rows allow; returns the files, each of which appears whole. Raises ImportError without `viz`."""
    from matplotlib.figure import Figure  # drawn without a window, whatever the machine has

    known = [row for row in rows if row.score is not None]
    if not known:
        return []
    names = {row.score_name for row in known}
    label = str(names.pop()) if len(names) == 1 else 'score'
    figures = {SCORES: Figure(figsize=(8, 1.2 + 0.35 * len(known)), layout='constrained')}
    _draw_scores(figures[SCORES], known, label, baseline)
    costed = [row for row in known if row.cost is not None and row.cost.step_seconds is not None]
    if costed:
        figures[COSTS] = Figure(figsize=(11, 4.5), layout='constrained')
        _draw_costs(figures[COSTS], costed, label)
    paths = []
    for name, figure in figures.items():
        path = folder / name
        unfinished = folder / f'{name}.writing'
        figure.savefig(unfinished, format='png', dpi=150)
        unfinished.replace(path)
        paths.append(path)
    return paths


def _draw_scores(figure, rows: Sequence[Row], label: str, baseline: str) -> None:
    axes = figure.add_subplot()
    for height, row in enumerate(reversed(rows)):
        assert row.score is not None
        interval = row.interval or (row.score, row.score)
        axes.errorbar(
            row.score,
            height,
            xerr=[[max(row.score - interval[0], 0)], [max(interval[1] - row.score, 0)]],
            fmt='o',
            capsize=3,
            color='tab:orange' if row.point == baseline else 'tab:blue',
        )
        if row.point == baseline:
            axes.axvline(row.score, color='tab:orange', linewidth=0.8, linestyle=':')
    axes.set_yticks(range(len(rows)), [row.point for row in reversed(rows)])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel(f'{label} (bars: 95 % of bootstrap resamples; orange: the baseline, {baseline})')


def _draw_costs(figure, rows: Sequence[Row], label: str) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for row in rows:
        cost = row.cost
        assert cost is not None
        _mark(left, cost.step_seconds, row)
        memory = cost.device_bytes if cost.device_bytes is not None else cost.host_bytes
        _mark(right, None if memory is None else memory / 2**20, row)
    left.set_xlabel('step time, s')
    right.set_xlabel('peak memory of training, MiB')
    left.set_ylabel(label)


def _mark(axes, position: float | None, row: Row) -> None:
    if position is None:
        return
    axes.plot(position, row.score, 'o', color='tab:blue')
    axes.annotate(row.point, (position, row.score), textcoords='offset points', xytext=(4, 4), fontsize=8)
