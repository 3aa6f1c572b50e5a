# shellcheck shell=bash
# How tpu_vm.sh and gke.sh read their flags; sourced, not run. Needs environment.sh.

train_arguments=() # what goes to `transformer-jax train` as it is

# Reads `"$@"`: for each --a-b in the list $1 (' --a-b --c ') its value, as `--a-b VALUE` or `--a-b=VALUE`, into a_b;
# for each in the list $2 "yes". --config.GROUP.FIELD=VALUE and all that follows `--` is kept for the training.
parse_flags() {
  local with_value="$1" switches="$2" flag value
  shift 2
  while (($#)); do
    flag="${1%%=*}"
    if [[ "$1" == -- ]]; then
      shift
      train_arguments+=("$@")
      return
    elif [[ "$1" == --config.*=* ]]; then
      train_arguments+=("$1")
    elif [[ "$switches" == *" $1 "* ]]; then
      _set_flag "$1" yes
    elif [[ "$with_value" == *" $flag "* ]]; then
      if [[ "$1" == *=* ]]; then
        value="${1#*=}"
      else
        [[ $# -gt 1 ]] || fail "$flag needs a value"
        value="$2"
        shift
      fi
      [[ -n "$value" ]] || fail "$flag needs a value"
      _set_flag "$flag" "$value"
    elif [[ "$1" == -* ]]; then
      fail "unknown flag $1; there are$with_value${switches# }"
    else
      fail "unexpected argument '$1'; --help tells more"
    fi
    shift
  done
}

# Fails unless each of the flags was given; $1 is what needs them.
require() {
  local what="$1" flag variable missing=''
  shift
  for flag in "$@"; do
    variable="${flag#--}"
    variable="${variable//-/_}"
    [[ -n "${!variable}" ]] || missing+=" $flag"
  done
  [[ -z "$missing" ]] || fail "$what needs$missing; --help tells more"
}

# Fails unless the config $1 (FILE[:ARGS]) lies in the checkout, which is what the machines that train have.
require_config_of_checkout() {
  [[ "$1" != /* && -e "${1%%:*}" ]] ||
    fail "--config is '$1'; the file must lie in the checkout and be named from there, as configs/NAME.py"
}

# Prints the comment at the head of a script.
print_help() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$1"; }

_set_flag() {
  local variable="${1#--}"
  printf -v "${variable//-/_}" '%s' "$2"
}
