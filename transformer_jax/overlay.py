"""Changes on top of a `Config`: dotted overrides, config files, and what differs between two runs.

One set of typing rules for the command line, saved configs and config files:

| field | takes | refuses |
|---|---|---|
| int | 12, '12', '12_000' | 12.0, '12.0', '1e4', True |
| float | 1e-4, '1e-4', 3, '3' (as 3.0) | 'fast', True, nan, inf |
| bool | True, False, 'true', 'False' | 1, 0, 'yes' |
| str | any text | numbers, True |
| optional | as above; None, 'none', 'None', 'null' and '' turn it off | |

An unknown name is refused with the nearest ones. Nothing here changes a config in place.
"""

import dataclasses
import difflib
import importlib.util
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from transformer_jax.config import Config, ConfigError, allowed_types, check, walk

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_OFF = ('none', 'null', '')
_BOOLEANS = {'true': True, 'false': False}
_PREFIX = '--config.'
# Fields in the configs of earlier versions' runs, and what they are called now.
_RENAMED = {'data.tfds.source_language': 'source_language', 'data.tfds.target_language': 'target_language'}


def config_to_dict(config: Config) -> dict[str, Any]:
    """The whole config as nested dicts of plain values, fit for JSON."""
    return dataclasses.asdict(config)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dicts. What is not named keeps its default; unknown names raise `ConfigError`."""
    return overlay(Config(), _read(values))


def overlay(config: Config, changes: Mapping[str, Any]) -> Config:
    """A checked copy of `config` with each `{'model.d_model': value}` applied, by the typing rules of this module."""
    fields = {path: field for path, field, _ in walk(config)}
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        if path not in fields:
            raise ConfigError(_unknown(path, list(fields)))
        *groups, name = path.split('.')
        section = nested
        for group in groups:
            section = section.setdefault(group, {})
        section[name] = _convert(path, fields[path], value)
    changed = _replace(config, nested)
    check(changed)
    return changed


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """`['--config.model.d_model=256']` as `{'model.d_model': '256'}`; of a repeated name the last one counts."""
    changes = {}
    for argument in arguments:
        if not argument.startswith(_PREFIX):
            raise ConfigError(f'unknown argument {argument!r}; changes of the config read {_PREFIX}model.d_model=256')
        path, equals, text = argument.removeprefix(_PREFIX).partition('=')
        if not equals:
            raise ConfigError(f'{argument!r} has no value; write {argument}=VALUE')
        changes[path] = text
    return changes


def fixed_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """`(field, old, new)` for each field that two configs (nested dicts) differ in and that a resume may not change.

    A field that only one side has, since another version wrote it, counts with its default; one that this version does
    not know at all counts as a difference.
    """
    before, after = _read(old), _read(new)
    known = {path: (field, default) for path, field, default in walk(Config())}
    differences = []
    for path in sorted({*before, *after}):
        field, default = known.get(path, (None, None))
        if field is not None and field.metadata.get('free'):
            continue
        was, now = before.get(path, default), after.get(path, default)
        if was != now:
            differences.append((f'config.{path}', was, now))
    return differences


def to_config_dict(config: Config) -> Any:
    """The config as a locked `ml_collections.ConfigDict`, so that a config file may write `config.model.d_model = 256`.

    Fields that may be off are typed placeholders, so that they take a value of their type and no other.
    """
    from ml_collections import config_dict

    def convert(section: Any) -> Any:
        converted: Any = config_dict.ConfigDict()
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                converted[field.name] = convert(value)
                continue
            types = allowed_types(field)
            if type(None) in types:
                converted[field.name] = config_dict.placeholder(next(t for t in types if t is not type(None)))
            if value is not None:
                converted[field.name] = value
        return converted

    return convert(config).lock()


def from_config_dict(values: 'ConfigDict') -> Config:
    """The checked `Config` that a `ConfigDict` describes."""
    return config_from_dict(values.to_dict())


def parse_arguments(text: str | None, *, required: tuple[str, ...] = (), **defaults: str | None) -> SimpleNamespace:
    """The `name=value,name=value` after a config file's colon, as attributes; values stay text.

    Raises `ConfigError` for a name that is neither in `required` nor in `defaults`, or for one of `required` missing.
    """
    choices = [*required, *defaults]
    given = {}
    for part in filter(None, (text or '').split(',')):
        name, equals, value = part.partition('=')
        if name not in choices:
            known = ', '.join(f'{choice}=' for choice in choices) or 'none at all'
            raise ConfigError(f'unknown config argument {part!r}; this config takes {known}{_nearest(name, choices)}')
        if not equals:
            raise ConfigError(f'config argument {name!r} has no value; write {name}=VALUE')
        given[name] = value
    missing = [name for name in required if not given.get(name)]
    if missing:
        raise ConfigError(f'this config needs {", ".join(f"{name}=..." for name in missing)} after its colon')
    return SimpleNamespace(**{**defaults, **given})


def load_config_file(reference: str) -> Config:
    """The checked config that `configs/<run>.py` or `configs/<run>.py:size=big,recipe=t2t` describes."""
    name, text = split_reference(reference)
    module = import_file(Path(name), 'config file')
    if not callable(getattr(module, 'get_config', None)):
        raise ConfigError(f'{name} has no function get_config')
    try:
        return from_config_dict(module.get_config(text))
    except ConfigError as error:
        raise ConfigError(f'{name}: {error}') from error
    except (AttributeError, TypeError) as error:
        message = _explain(error)
        if message is None:
            raise
        raise ConfigError(f'{name}: {message}') from error


def split_reference(reference: str) -> tuple[str, str | None]:
    """The file of `configs/<run>.py:size=big` and its arguments, None if it has no colon."""
    match = re.fullmatch(r'(.*?\.py)(?::(.*))?', reference, flags=re.DOTALL)
    if match is None:
        raise ConfigError(f'{reference!r} is no config file; it must read FILE.py or FILE.py:name=value,name=value')
    return match.group(1), match.group(2)


def import_file(path: Path, kind: str) -> ModuleType:
    """A Python file as a module. `kind` is what it should be, in the words of the `ConfigError` when there is none."""
    if not path.is_file():
        siblings = sorted(p.stem for p in path.parent.glob('*.py')) if path.parent.is_dir() else []
        raise ConfigError(f'there is no {kind} {path}{_nearest(path.stem, siblings)}')
    spec = importlib.util.spec_from_file_location(f'config_file_{path.stem}', path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _explain(error: Exception) -> str | None:
    """What went wrong in a config file's own words, for the errors of `ConfigDict`; None for any other error."""
    text = str(error)
    patterns = (r'Key "(\w+)" does not exist', r'instead of "(\w+)"\?', r'^["\']+(\w+)["\']+$')
    unknown = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
    if unknown:
        return _unknown(unknown.group(1), [path for path, _, _ in walk(Config())])
    pattern = r"Could not override field '(\w+)' \(reference\)\. (.*) is of original type .* to type <class '(\w+)'>"
    mistyped = re.match(pattern, text, flags=re.DOTALL)
    if mistyped:
        name, value, wanted = mistyped.groups()
        return f'{name} is set to {value}; it must be {wanted}'
    return None


def _replace(section: Any, changes: Mapping[str, Any]) -> Any:
    values = {
        name: _replace(getattr(section, name), value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(section, **values)


def _flatten(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f'{prefix}{name}.')
        else:
            flat[f'{prefix}{name}'] = value
    return flat


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config, flat, with what earlier versions wrote under today's names."""
    flat = _flatten(values)
    for old, new in _RENAMED.items():
        value = flat.pop(old, None)
        if value is not None and flat.get('data.source') == 'tfds':  # elsewhere it meant nothing
            flat[new] = value
    return flat


def _unknown(path: str, paths: list[str]) -> str:
    inside = dict.fromkeys(p.removeprefix(f'{path}.').partition('.')[0] for p in paths if p.startswith(f'{path}.'))
    if inside:
        return f'config.{path} is a group; name one of its fields: {", ".join(inside)}'
    return f'there is no field config.{path}{_nearest(path, paths)}'


def _nearest(name: str, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' with the choices most similar by their whole path or by their last part; '' if none is."""
    by_part: dict[str, list[str]] = {}
    choices = list(choices)
    for choice in choices:
        by_part.setdefault(choice.rpartition('.')[2], []).append(choice)
    nearest = difflib.get_close_matches(name, choices, n=3, cutoff=0.75)
    for part in difflib.get_close_matches(name.rpartition('.')[2], by_part, n=2, cutoff=0.75):
        nearest += by_part[part]
    unique = list(dict.fromkeys(nearest))[:4]
    return f' (did you mean {" or ".join(unique)}?)' if unique else ''


def _convert(path: str, field: dataclasses.Field, value: Any) -> Any:
    """The value as the field's type. Only texts are read; a number is never made of a bool, nor an int of a float."""
    types = allowed_types(field)
    if isinstance(value, Mapping):
        raise ConfigError(f'config.{path} is a field, not a group; it can not be {value!r}')
    if type(None) in types and (value is None or (isinstance(value, str) and value.lower() in _OFF)):
        return None
    if float in types:
        return _as_float(path, value)
    if not isinstance(value, str) or str in types:
        return value  # its type is checked with all others by `config.check`
    if bool in types:
        if value.lower() not in _BOOLEANS:
            raise ConfigError(f'config.{path} is {value!r}; it must be true or false')
        return _BOOLEANS[value.lower()]
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f'config.{path} is {value!r}; it must be a whole number, written without point or e'
        ) from None


def _as_float(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f'config.{path} is {value!r}, a {type(value).__name__}; it must be a number')
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f'config.{path} is {value!r}; it must be a number') from None
    if not math.isfinite(number):
        raise ConfigError(f'config.{path} is {value!r}; it must be finite')
    return number
