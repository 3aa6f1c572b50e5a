#!/usr/bin/env bash
# Trains a Transformer on the built-in English-German task, scores it and shows translations; needs Python 3.11+ and git.
#
#   launch/quickstart.sh [--fresh]
#
# The same command again resumes a run that was cut, or only scores one that has ended. --fresh trains a new one in a
# new folder; nothing is ever deleted. PYTHON and VENV choose the interpreter and the folder of the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

run=runs/quickstart
case "${1:-}" in
  '') ;;
  --fresh)
    number=2
    while [[ -e "$run" ]]; do
      run="runs/quickstart-$number"
      number=$((number + 1))
    done
    ;;
  -h | --help)
    sed -n '2,7s/^# \{0,1\}//p' launch/quickstart.sh
    exit 0
    ;;
  *) fail "unknown argument $1; the only one is --fresh" ;;
esac

venv="${VENV:-.venv}"
python="$(choose_python)"
prepare_environment "$venv" "$python" ''
export JAX_PLATFORMS=cpu
# XLA asks for the scratch memory of each step anew; these let glibc keep it instead of returning it to the system.
export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TRIM_THRESHOLD_=2147483647

if [[ -e "$run" ]]; then
  say "$run exists: going on with it, or only scoring it if its training has ended (--fresh starts anew elsewhere)"
else
  say "training in $run"
fi
"$venv/bin/python" -m transformer_jax train --config=configs/quickstart.py --run "$run"
say "scoring the held-out split"
"$venv/bin/python" -m transformer_jax evaluate --run "$run" --split test --examples 10

say ''
say "everything is in $run: config, vocabulary, checkpoints, figures (JSON lines, TensorBoard)"
say "translate your own:  echo 'The dog bites the man.' | $venv/bin/transformer-jax translate --run $run"
say "next:                README.md, 'Train on your own text'"
