#!/usr/bin/env bash
# Makes the environment of quickstart.sh with the development tools, then checks format, lint, types and the fast tests.
#
#   launch/test.sh [PYTEST ARGUMENT...]      e.g. launch/test.sh -m '' for the slow tests too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

venv="${VENV:-.venv}"
python="$(choose_python)"
prepare_environment "$venv" "$python" dev

say 'format'
"$venv/bin/ruff" format --check .
say 'lint'
"$venv/bin/ruff" check .
say 'types'
"$venv/bin/pyright" --pythonpath "$venv/bin/python"
say 'tests'
"$venv/bin/python" -m pytest -n 2 "$@"
