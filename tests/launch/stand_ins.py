"""Stand-ins for cluster programs: small executables, first on the PATH, that record their calls and answer as told."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
# Takes the first rule whose words all occur in the call, and of its answers the next one; the last one stays.
_PROGRAM = """\
#!{python} -IS
import fcntl, json, pathlib, sys
folder = pathlib.Path({folder!r})
name = pathlib.Path(sys.argv[0]).name
piped = sys.stdin.read() if {reads_input} else None
lock = open(folder / 'lock', 'w')
fcntl.flock(lock, fcntl.LOCK_EX)  # until it ends: calls come from several processes at once
with open(folder / 'calls.jsonl', 'a') as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
if piped is not None:
    (folder / f'{{name}}.stdin').write_text(piped)
rules = json.loads((folder / 'rules.json').read_text())
call = ' '.join([name, *sys.argv[1:]])
for rule in rules:
    if all(word in call for word in rule['words']):
        answer = rule['answers'].pop(0) if len(rule['answers']) > 1 else rule['answers'][0]
        (folder / 'rules.json').write_text(json.dumps(rules))
        sys.stdout.write(answer.get('stdout', ''))
        sys.stderr.write(answer.get('stderr', ''))
        sys.exit(answer.get('code', 0))
"""


class StandIns:
    """A folder of stand-ins, what they were called with, and what they answer."""

    def __init__(self, folder: Path, names: Sequence[str], *, reading_input: Sequence[str] = ()) -> None:
        self.folder = folder
        self.environment = os.environ | {'PATH': f'{folder / "bin"}{os.pathsep}{os.environ["PATH"]}'}
        (folder / 'bin').mkdir(parents=True)
        for name in names:
            program = folder / 'bin' / name
            text = _PROGRAM.format(python=sys.executable, folder=str(folder), reads_input=name in reading_input)
            program.write_text(text)
            program.chmod(0o755)
        self._rules: list[dict[str, Any]] = []
        self._write()

    def answer(self, words: str, *answers: str | dict[str, Any]) -> None:
        """What a call holding all these words answers, call after call: standard output, or a dict with more."""
        given = [{'stdout': f'{one}\n'} if isinstance(one, str) else one for one in answers]
        self._rules.append({'words': words.split(), 'answers': given})
        self._write()

    def run(
        self, script: str, *arguments: str, code: int = 0, stdin: str = '', **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script of the checkout, which must exit with `code`."""
        result = subprocess.run(
            ['bash', str(ROOT / script), *arguments],
            env=self.environment | environment,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == code, f'exit code {result.returncode}\n{result.stdout}\n{result.stderr}'
        return result

    def calls(self) -> list[list[str]]:
        """Every call so far: the program's name and its arguments."""
        file = self.folder / 'calls.jsonl'
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _write(self) -> None:
        (self.folder / 'rules.json').write_text(json.dumps(self._rules))
