"""What a sweep is: a base config, named points that change some of its fields, and the seeds of each point.

A sweep file holds `BASE`, a config file with its arguments, and `points()`, which yields `(name, {field: value})`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import import_file, load_config_file, overlay, split_reference


@dataclass(frozen=True)
class Point:
    """One setting of a sweep."""

    name: str
    folder: str  # of its own under the sweep's folder; the name, with `_` for what a path should not hold
    changes: Mapping[str, Any]  # dotted fields of the base config


@dataclass(frozen=True)
class Trial:
    """One training of a point."""

    point: Point
    seed: int

    @property
    def name(self) -> str:
        """What `--points` calls it."""
        return f'{self.point.folder}/seed-{self.seed}'


@dataclass(frozen=True)
class Sweep:
    """All points and seeds, and what they have in common."""

    name: str
    file: Path
    base: str  # the config file with its arguments, from the root
    shared: Mapping[str, str]  # changes that every point gets, as the command line wrote them
    points: tuple[Point, ...]
    seeds: tuple[int, ...] | None = None  # None = the one seed that the config of each point has
    config: Config = field(default_factory=Config)  # the base config with the shared changes
    _resolved: dict[str, Config] = field(default_factory=dict, repr=False, compare=False)  # by the name of the trial

    def trials(self) -> list[Trial]:
        """Every training of the sweep, point by point."""
        return [Trial(point, seed) for point in self.points for seed in self.seeds_of(point)]

    def seeds_of(self, point: Point) -> tuple[int, ...]:
        """The seeds that a point is trained with."""
        return self.seeds if self.seeds is not None else (point.changes.get('seed', self.config.seed),)

    def resolve(self, trial: Trial) -> Config:
        """The whole config of one training. Raises `ConfigError` for a point whose changes make none."""
        if trial.name in self._resolved:
            return self._resolved[trial.name]
        config = overlay(self.config, {**trial.point.changes, 'seed': trial.seed})
        self._resolved[trial.name] = config
        return config

    def arguments(self, trial: Trial) -> list[str]:
        """What the command line needs to make the config of one training."""
        changes = {**self.shared, **trial.point.changes, 'seed': trial.seed}
        return [f'--config={self.base}', *(f'--config.{path}={spell(value)}' for path, value in changes.items())]

    def select(self, names: Iterable[str] | None) -> list[Trial]:
        """The trainings of the points so named, by name or folder, `/seed-N` taking one of them; None = all."""
        trials = self.trials()
        if names is None:
            return trials
        chosen: dict[str, Trial] = {}
        for name in names:
            found = [one for one in trials if name in (one.point.name, one.point.folder, one.name)]
            if not found:
                known = ', '.join(point.folder for point in self.points)
                raise ConfigError(
                    f'there is no point {name!r} in {self.file}; it must be one of {known}, as NAME or NAME/seed-N'
                )
            chosen |= {one.name: one for one in found}
        return [one for one in trials if one.name in chosen]


def load_sweep(file: str, shared: Mapping[str, str], seeds: Sequence[int] | None = None) -> Sweep:
    """The sweep that a file describes, each point with the `shared` changes too.

    Raises `ConfigError` for a file that is no sweep, for points that would share a folder, for a field that both
    `shared` and a point set, and for a base config that is none. A point whose own changes are bad is not looked at:
    it fails alone, when its turn comes.
    """
    path = Path(file).absolute()
    module = import_file(path, 'sweep')
    base, make_points = getattr(module, 'BASE', None), getattr(module, 'points', None)
    if not isinstance(base, str) or not callable(make_points):
        raise ConfigError(
            f'{file} is no sweep; it must have BASE, a config file, and points(), which yields (name, {{field: value}})'
        )
    base = _find_base(path, base)
    config = overlay(load_config_file(base), shared)
    points: Any = make_points()
    points = tuple(_make_points(file, points))
    _refuse_clashes(file, points, {*shared, *(['seed'] if seeds is not None else [])})
    if seeds is not None and 'seed' in shared:
        raise ConfigError('config.seed is set for all points, and --seeds too; give one of them')
    if seeds is not None and (not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0):
        raise ConfigError(f'the seeds are {list(seeds)}; they must be different whole numbers from 0, at least one')
    return Sweep(path.stem, path, base, dict(shared), points, None if seeds is None else tuple(seeds), config)


def spell(value: Any) -> str:
    """A field's value as the command line takes it."""
    if value is None:
        return 'none'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _find_base(sweep: Path, base: str) -> str:
    """The base config from the root: beside the sweep, or in a folder above it, or else in the working folder."""
    name, arguments = split_reference(base)
    for folder in (*sweep.parents, Path.cwd()):
        if (folder / name).is_file():
            return str(folder / name) + ('' if arguments is None else f':{arguments}')
    raise ConfigError(f'{sweep}: BASE is {base!r}, which lies neither in a folder above the sweep nor here')


def _make_points(file: str, pairs: Iterable[Any]) -> Iterable[Point]:
    for pair in pairs:
        match pair:
            case (str() as name, Mapping() as changes) if all(isinstance(path, str) for path in changes):
                folder = re.sub(r'[^\w.+=-]+', '_', name, flags=re.ASCII).strip('_.')
                if not folder:
                    raise ConfigError(f'{file} has a point named {name!r}; a name needs a letter or a digit')
                yield Point(name, folder, dict(changes))
            case _:
                raise ConfigError(f'{file} yields {pair!r}; a point is (name, {{"model.d_model": 256, ...}})')


def _refuse_clashes(file: str, points: Sequence[Point], taken: set[str]) -> None:
    if not points:
        raise ConfigError(f'{file} yields no points')
    seen: dict[str, str] = {}
    for point in points:
        folder = point.folder.casefold()  # some disks do not tell large letters from small ones
        if folder in seen:
            raise ConfigError(
                f'{file} has points {seen[folder]!r} and {point.name!r}, which would share the folder {point.folder}; '
                'give each a name of its own'
            )
        seen[folder] = point.name
        for path in sorted(taken & point.changes.keys()):
            raise ConfigError(
                f'config.{path} is set for all points, but point {point.name!r} of {file} sets it too; '
                'leave it to the points, or take it out of them'
            )
