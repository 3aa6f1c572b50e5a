"""Which checkpoints are best, and which of them the keep rules ask for. Pure functions of what is there."""

from transformer_jax.checkpoints.entries import Entry
from transformer_jax.config import CheckpointConfig


def rank(entries: list[Entry]) -> list[Entry]:
    """Best first, earliest of equals first, of the entries whose score is of the same kind as the newest score."""
    scored = [entry for entry in entries if entry.score is not None]
    if not scored:
        return []
    kind = _score_kind(scored[-1])
    same = [entry for entry in scored if _score_kind(entry) == kind]
    sign = -1 if kind[1] else 1
    return sorted(same, key=lambda entry: (sign * entry.manifest['score'], entry.step))


def superfluous(entries: list[Entry], newest: int, config: CheckpointConfig) -> list[Entry]:
    """The entries that no keep rule asks for, `newest` being the step that was just saved."""
    kept = {newest}
    kept.update(entry.step for entry in entries[-config.keep_newest :])
    kept.update(entry.step for entry in rank(entries)[: config.keep_best])
    return [entry for entry in entries if entry.step not in kept]


def _score_kind(entry: Entry) -> tuple[str, bool]:
    return entry.manifest['score_name'], entry.manifest['higher_is_better']
