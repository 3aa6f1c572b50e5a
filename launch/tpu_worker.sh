#!/usr/bin/env bash
# What tpu_vm.sh has each worker of a TPU VM do; lies in the copied checkout and is not called by hand.
#
#   install            makes the environment, with the extra `tpu`
#   start ARGUMENT...  starts `transformer-jax train ARGUMENT...` apart from this connection, unless it runs already
#   run ARGUMENT...    what `start` leaves running: trains, and writes down the exit code
#   status             prints "training: none", "training: running" or "training: ended CODE"
#   require-idle       fails while a training runs here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

folder="$HOME/transformer-jax-worker" # outside the checkout, so that copying a new one leaves it alone

find_status() {
  local pid
  if [[ -e "$folder/exit" ]]; then
    printf 'ended %s\n' "$(<"$folder/exit")"
  elif [[ -e "$folder/pid" ]] && pid="$(<"$folder/pid")" &&
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q 'tpu_worker.sh run '; then
    printf 'running\n'
  else
    printf 'none\n' # never started, or the machine has started anew since
  fi
}

install() {
  local python
  if ! python="$(find_python 3.11 3.14)"; then
    say 'no Python from 3.11 on here: installing one'
    # A fresh machine may still be installing its own updates.
    sudo apt-get -o DPkg::Lock::Timeout=600 update -qq
    sudo apt-get -o DPkg::Lock::Timeout=600 install -y -qq python3.12-venv ||
      sudo apt-get -o DPkg::Lock::Timeout=600 install -y -qq python3.11-venv
    python="$(choose_python)"
  fi
  prepare_environment .venv "$python" tpu
}

start() {
  mkdir -p "$folder"
  local command
  command="$(quote_words "$@")"
  if [[ "$(find_status)" == running ]]; then
    [[ "$(<"$folder/command")" == "$command" ]] ||
      fail "another training runs here: transformer-jax train $(<"$folder/command")"
    say 'this training runs here already'
    return
  fi
  rm -f "$folder/exit"
  printf '%s\n' "$command" >"$folder/command"
  nohup setsid bash launch/tpu_worker.sh run "$@" >>"$folder/train.log" 2>&1 </dev/null &
  printf '%s\n' "$!" >"$folder/pid"
  # The new process is this script's until it has become the one that runs; ends at once only when that fails.
  while [[ "$(find_status)" == none ]] && kill -0 "$!" 2>/dev/null; do sleep 0.05; done
  say "started on $(hostname): transformer-jax train $command"
}

run() {
  local code=0
  trap : TERM # the training gets it too, saves, and ends; its exit code is still to be written down
  printf '=== %s: transformer-jax train %s\n' "$(date -u '+%Y-%m-%d %H:%M:%S UTC')" "$(quote_words "$@")"
  .venv/bin/python -m transformer_jax train "$@" || code=$?
  printf '%s\n' "$code" >"$folder/exit.writing"
  mv "$folder/exit.writing" "$folder/exit"
}

case "${1:-}" in
  install) install ;;
  start) shift && start "$@" ;;
  run) shift && run "$@" ;;
  status) printf 'training: %s\n' "$(find_status)" ;;
  require-idle) [[ "$(find_status)" != running ]] || fail 'a training runs here; its code must not change under it' ;;
  *) fail "unknown command '${1:-}'; tpu_vm.sh calls this script" ;;
esac
