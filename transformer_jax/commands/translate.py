"""The verb `translate`: lines of text in, as many out, whole or not at all."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from etils import epath

from transformer_jax.commands.evaluator import say
from transformer_jax.config import ConfigError
from transformer_jax.data.text_files import read_lines
from transformer_jax.decoding.opened_run import OpenedRun
from transformer_jax.decoding.translator import Counts, Translation, Translator
from transformer_jax.files import is_local

STANDARD = '-'  # the name of standard input and of standard output


def read_input(name: str) -> list[str]:
    """All lines of a file, plain or gzip, or of standard input, read as the training text is: a line ends at LF."""
    if name != STANDARD:
        return list(read_lines(name))
    with tempfile.NamedTemporaryFile(prefix='standard_input_') as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        try:
            return list(read_lines(copy.name))
        except ValueError as error:
            raise ValueError(str(error).replace(copy.name, 'standard input')) from error


def read_prefixes(name: str, *, input_name: str, num_lines: int) -> list[str]:
    """The prefix of each of the `num_lines` lines of the input. Raises `ValueError` for another number of them."""
    if name == input_name == STANDARD:
        raise ConfigError('--prefix-file and --input are both standard input; at least one must be a file')
    prefixes = read_input(name)
    if len(prefixes) != num_lines:
        one, other = ('standard input' if name == STANDARD else name for name in (name, input_name))
        raise ValueError(f'{one} has {len(prefixes):,} lines, but {other} has {num_lines:,}; each line needs its own')
    return prefixes


def check_output(name: str, *, force: bool) -> None:
    """Raises `ValueError` before any work when the output can't be written or would replace a file."""
    if name == STANDARD:
        return
    path = epath.Path(name)
    if path.is_dir():
        raise ValueError(f'the output {name} is a folder')
    if path.suffix == '.gz':
        raise ValueError(f'the output {name} would be plain text under a name that says gzip; leave .gz out')
    if path.exists() and not force:
        raise ValueError(f'the output {name} exists; --force replaces it')
    if not path.parent.is_dir():
        raise ValueError(f'the output {name} is to lie in {path.parent}, which is no folder')
    if is_local(path) and not os.access(path.parent, os.W_OK):
        raise ValueError(f'the output {name} is to lie in {path.parent}, which may not be written')


@contextlib.contextmanager
def open_output(name: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears under its name only when all of it is written."""
    if name == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = epath.Path(name)
    unfinished = path.parent / f'.{path.name}.{os.getpid()}.writing'
    try:
        with unfinished.open('wb') as file:
            yield file
        check_output(name, force=force)  # what has come to lie there meanwhile
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def make_formatter(
    kind: str, *, n_best: int, scores: bool, names: tuple[str, str] = ('source', 'translations')
) -> Callable[[int, str, Sequence[Translation]], str]:
    """From `(line number from 1, source, translations)` to what is written for that line, without the last LF.

    'text' is the best translation alone. `scores` puts `SCORE TAB` before it, and `n_best` above 1 writes `n_best`
    lines with `NUMBER TAB` first: a blank line of input has that many blank translations without a score, and so are
    those that the model has too few of. 'jsonl' is one object a line of input with the translations there are; `names`
    are its keys for them and for the line. Raises `ConfigError` for 'jsonl' with `scores`, which it always holds.
    """
    if kind == 'jsonl' and scores:
        raise ConfigError('--scores is of --format text; --format jsonl writes every score without it')

    def as_text(number: int, source: str, translations: Sequence[Translation]) -> str:
        lines = []
        for one in itertools.islice(itertools.chain(translations, itertools.repeat(None)), n_best):
            columns = [str(number)] if n_best > 1 else []
            columns += ['' if one is None else f'{one.score:.6f}'] if scores else []
            lines.append('\t'.join([*columns, '' if one is None else one.text]))
        return '\n'.join(lines)

    def as_json(number: int, source: str, translations: Sequence[Translation]) -> str:
        found = [
            {
                'text': one.text,
                'score': one.score,
                'log_probability': one.log_probability,
                'length': one.length,
                'finished': one.finished,
            }
            for one in translations
        ]
        return json.dumps({'line': number, names[0]: source, names[1]: found}, ensure_ascii=False)

    return {'text': as_text, 'jsonl': as_json}[kind]


def load_translator(run: OpenedRun, checkpoint: str | None) -> Translator:
    """The translator of a run that was opened with the changes of the command line."""
    params, _ = run.load_params(checkpoint, report=say)
    return Translator(run.model, params, run.vocabulary, run.config.decoding, report=say)


def translate_lines(
    translator: Translator, lines: Sequence[str], prefixes: Sequence[str] | None, *, n_best: int
) -> list[list[Translation]]:
    """The translations of each line; tells standard error what was done and what was cut."""
    start = time.monotonic()
    translations = translator.translate_n_best(lines, n_best, prefixes=prefixes)
    say(_summarise(translator.counts, time.monotonic() - start))
    return translations


def _summarise(counts: Counts, seconds: float) -> str:
    speed = f'{counts.lines / seconds:,.1f} lines/s' if seconds else 'no time'
    return (
        f'{counts.lines:,} lines: {counts.blank:,} blank, {counts.cut:,} sources cut, '
        f'{counts.unfinished:,} translations cut; {seconds:,.1f} s, {speed}'
    )
