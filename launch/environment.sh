# shellcheck shell=bash
# Functions that the scripts of this folder share; sourced, not run. Variables a user may set:
#   PYTHON  the interpreter to use; otherwise the newest one found
#   VENV    where the environment goes; otherwise .venv in the checkout

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 2
}

# Prints words as one line that a shell reads back as these words.
quote_words() {
  local word line=''
  for word in "$@"; do
    if [[ "$word" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      line+=" $word"
    else
      line+=" '${word//\'/\'\\\'\'}'"
    fi
  done
  printf '%s\n' "${line# }"
}

# Runs a command, or only prints it where `dry_run` is not empty.
act() {
  if [[ -n "${dry_run:-}" ]]; then
    quote_words "$@"
  else
    "$@"
  fi
}

# Says whether an interpreter really runs, is of a version from $2 to $3 (as 3.11), and can make environments.
python_suits() {
  "$1" - "$2" "$3" >/dev/null 2>&1 <<'PY'
import sys
import ensurepip, venv
low, high = (tuple(map(int, text.split('.'))) for text in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] <= high)
PY
}

# Prints the newest interpreter of a version from $1 to $2; fails quietly when there is none.
find_python() {
  local name candidate
  local candidates=()
  for name in python3.14 python3.13 python3.12 python3.11; do
    candidates+=("$name")
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${name#python}"*/bin/"$name"; do
      candidates+=("$candidate")
    done
  done
  candidates+=(python3 python)
  for candidate in "${candidates[@]}"; do
    if python_suits "$candidate" "$1" "$2"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# Prints the interpreter that the user asked for, or else the newest one.
choose_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    python_suits "$PYTHON" 3.11 3.14 ||
      fail "PYTHON=$PYTHON does not run, is not Python 3.11 to 3.14, or lacks venv (on Debian: apt-get install python3-venv)"
    command -v "$PYTHON"
    return
  fi
  find_python 3.11 3.14 ||
    fail "found no Python 3.11 to 3.14 that can make environments (on Debian: apt-get install python3 python3-venv); or set PYTHON"
}

# Makes environment $1 with interpreter $2 and installs this checkout with extras $3 ('' or one), unless that is done.
prepare_environment() {
  local folder="$1" python="$2" extras="$3" stamp now
  if [[ ! -e "$folder" ]]; then
    say "making the environment $folder with $("$python" --version)"
    "$python" -m venv "$folder"
  fi
  "$folder/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 ||
    fail "the environment $folder does not run or is older than Python 3.11; move it away, or set VENV to another folder"
  stamp="$folder/transformer_jax${extras:+-$extras}.stamp"
  now="$("$folder/bin/python" -c '
import hashlib, pathlib, sys
files = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"".join(files) + str(pathlib.Path.cwd()).encode()).hexdigest())')"
  if [[ -e "$stamp" && "$(<"$stamp")" == "$now" ]]; then
    say "using the environment $folder"
    return
  fi
  say "installing into $folder (the first time takes a while)"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check \
    -c constraints.txt -e ".${extras:+[$extras]}" >&2
  printf '%s\n' "$now" >"$stamp"
}
