"""What a check found, and how findings are shown."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class Finding(NamedTuple):
    """The worst error of one check. `error` None = not applicable here, and `note` says why."""

    subject: str  # which attention and its implementation, or 'decoder' of the recurrent family, or 'model'
    check: str
    error: float | None
    limit: float
    note: str = ''

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; a NaN is not."""
        return self.error is None or self.error <= self.limit


def format_table(findings: Iterable[Finding]) -> str:
    """One line a finding: subject, check, worst error, limit, verdict."""
    rows = [('attention', 'check', 'worst error', 'limit', '')]
    for one in findings:
        error = '-' if one.error is None else f'{one.error:.1e}'
        verdict = 'ok' if one.passed else 'FAILED'
        if one.error is None:
            verdict = 'not run'
        rows.append(
            (one.subject, one.check, error, f'{one.limit:.0e}', f'{verdict}{": " if one.note else ""}{one.note}')
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return '\n'.join(
        '  '.join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows
    )


def relative_error(ours: Any, exact: Any) -> float:
    """max|ours - exact| / max|exact|; NaN counts as infinite."""
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(exact, np.float64))
    if not np.isfinite(difference).all():
        return np.inf
    return float(difference.max() / max(np.abs(exact).max(), 1e-30))
