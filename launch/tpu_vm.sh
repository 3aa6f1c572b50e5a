#!/usr/bin/env bash
# Trains on a Cloud TPU VM, of one host or a slice of many: asks for it as a queued resource, sets all its workers up,
# and trains on them.
#
#   launch/tpu_vm.sh COMMAND --name NAME --zone ZONE [--project PROJECT] [FLAG...] [-- TRAIN ARGUMENT...]
#
#   create   asks for the TPU and waits until it is there: --accelerator-type TYPE --runtime-version VERSION [--spot]
#            [--create-flags "more FLAGS of gcloud's"]
#   setup    copies this checkout to all workers and makes the environment there
#   train    starts "transformer-jax train" on all workers, apart from this connection: --config FILE[:ARGS] --run DIR
#            [--config.GROUP.FIELD=VALUE...]; the same command again resumes, or finds it running
#   status   the state of the queued resource and of the training on each worker
#   tail     follows the log of one worker: [--worker 0]
#   fetch    copies the run folder back, where it is no gs:// one: --run DIR [--to FOLDER] [--worker 0]
#   delete   deletes the TPU and all that is on it: asks first, unless --yes
#   watch    create, setup and train in one, with the flags of all three; then looks every --poll-seconds (30), and
#            after a preemption asks for the TPU again and goes on, until the training has ended: --run gs://...
#            [--delete-when-done]
#
# --dry-run prints the exact commands and runs none. On a slice, --run must be a folder that all workers see (gs://...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
source launch/flags.sh

value_flags=' --name --zone --project --accelerator-type --runtime-version --create-flags --run --config --to --worker'
value_flags+=' --poll-seconds '
switches=' --spot --yes --dry-run --delete-when-done '
name='' zone='' project='' accelerator_type='' runtime_version='' create_flags='' spot='' run='' config='' to=''
worker=0 poll_seconds=30 dry_run='' yes='' delete_when_done=''
worker_script=transformer_jax/launch/tpu_worker.sh # where the copied checkout has it, from the home folder

note() { printf '# %s\n' "$*"; } # between the commands of a dry run

tpus() { act gcloud compute tpus "$@"; }
on_worker() { tpus tpu-vm ssh "$name" "${place[@]}" --worker="$1" --command="$2"; }
state_of() { gcloud compute tpus "$1" describe "$name" "${place[@]}" --format="value($2)"; }

# Prints the answer of `state_of`, or ABSENT when there is no such resource; what else goes wrong ends the script.
ask_state() {
  local answer complaint
  complaint="$(mktemp)"
  if answer="$(state_of "$@" 2>"$complaint")"; then
    rm -f "$complaint"
    printf '%s\n' "$answer"
    return
  fi
  answer="$(<"$complaint")"
  rm -f "$complaint"
  [[ "$answer" == *NOT_FOUND* ]] || fail "gcloud can not tell the state of $name: $answer"
  printf 'ABSENT\n'
}

# Prints the state of the queued resource or ABSENT; SUSPENDED also where it does not know yet that its TPU is gone.
find_state() {
  local state
  state="$(ask_state queued-resources state.state)" || exit
  if [[ "$state" == ACTIVE ]]; then
    state="$(ask_state tpu-vm state)" || exit
    case "$state" in
      READY) state=ACTIVE ;;
      PREEMPTED | TERMINATED | STOPPING | STOPPED | DELETING | ABSENT) state=SUSPENDED ;;
    esac
  fi
  printf '%s\n' "$state"
}

create() {
  local flags=(--node-id="$name" --accelerator-type="$accelerator_type" --runtime-version="$runtime_version")
  [[ -z "$spot" ]] || flags+=(--spot)
  # shellcheck disable=SC2206 # several flags in one text
  flags+=($create_flags)
  tpus queued-resources create "$name" "${place[@]}" "${flags[@]}"
}

wait_until_active() {
  local state last=''
  if [[ -n "$dry_run" ]]; then
    note "every $poll_seconds s, until ACTIVE and READY:"
    tpus queued-resources describe "$name" "${place[@]}" '--format=value(state.state)'
    tpus tpu-vm describe "$name" "${place[@]}" '--format=value(state)'
    return
  fi
  while true; do
    state="$(find_state)" || exit
    [[ "$state" == "$last" ]] || say "$name is $state"
    last="$state"
    case "$state" in
      ACTIVE) return ;;
      ABSENT | FAILED | SUSPENDING | SUSPENDED | DELETING)
        gcloud compute tpus queued-resources describe "$name" "${place[@]}" >&2 || true
        fail "$name is $state and will not become ACTIVE; launch/tpu_vm.sh delete removes what is left of it" ;;
    esac
    sleep "$poll_seconds"
  done
}

# Everything of the checkout but what git ignores by name: environments, runs, data, caches.
pack_checkout() {
  local excluded=(--exclude='./.git' --exclude='./.venv*' --exclude='./runs' --exclude='./data' --exclude='./build')
  excluded+=(--exclude='./dist' --exclude='__pycache__' --exclude='*.egg-info' --exclude='.*_cache')
  act tar -czf "$1" "${excluded[@]}" .
}

setup() {
  local archive=/tmp/transformer_jax.tar.gz replaced=''
  local remote=transformer_jax.tar.gz folder
  for folder in transformer_jax configs launch tests; do replaced+=" transformer_jax/$folder"; done
  [[ -n "$dry_run" ]] || archive="$(mktemp -d)/$remote"
  pack_checkout "$archive" || return
  [[ -n "$dry_run" ]] || say "copying $(($(wc -c <"$archive") / 1024)) KiB to all workers of $name"
  on_worker all "if [ -e $worker_script ]; then bash $worker_script require-idle; fi" &&
    tpus tpu-vm scp "$archive" "$name:$remote" "${place[@]}" --worker=all &&
    on_worker all "rm -rf$replaced && mkdir -p transformer_jax && tar -xzf $remote -C transformer_jax" &&
    on_worker all "bash $worker_script install" || return
  [[ -n "$dry_run" ]] || rm -r "$(dirname "$archive")"
}

train() {
  local words
  words="$(quote_words --config="$config" --run="$run" ${train_arguments[@]+"${train_arguments[@]}"})"
  on_worker all "bash $worker_script start $words"
}

show_status() {
  on_worker all "if [ -e $worker_script ]; then bash $worker_script status; else echo 'training: none'; fi"
}

fetch() {
  local target="${to:-$run}" source="$run"
  [[ "$run" != gs://* ]] || fail "the run is in $run, which needs no fetching (gcloud storage cp -r copies it)"
  [[ ! -e "$target" ]] || fail "$target exists; --to names another folder"
  [[ "$source" == /* ]] || source="transformer_jax/$run"
  act mkdir -p "$(dirname "$target")"
  tpus tpu-vm scp "$name:$source" "$target" "${place[@]}" --worker="$worker" --recurse
}

delete() { tpus queued-resources delete "$name" "${place[@]}" --force --quiet; }

replace() {
  say "$name is gone: asking for it again"
  delete
  create
}

confirm_deletion() {
  local answer
  [[ -z "$yes$dry_run" ]] || return 0
  printf 'delete the TPU %s in %s and everything on its disks? type its name: ' "$name" "$zone" >&2
  read -r answer || answer=''
  [[ "$answer" == "$name" ]] || fail 'nothing was deleted (--yes deletes without asking)'
}

# Starts the training on a TPU that is there, unless it runs; sets `ended` when it has ended on all workers.
go_on() {
  local answers
  answers="$(grep -o 'training: .*' <<<"$1")" || answers='training: unknown'
  if grep -q running <<<"$answers"; then
    return
  elif grep -qx 'training: ended 2' <<<"$answers"; then
    fail 'the training refused its config or its data; launch/tpu_vm.sh tail shows its words'
  elif ! grep -qvx 'training: ended 0' <<<"$answers"; then
    ended=yes
    return
  fi
  # Not begun on this machine, or stopped because it was to end (143); all else is a failure. The same command resumes.
  if grep -qvxE 'training: (none|ended 0|ended 143)' <<<"$answers"; then
    failures=$((failures + 1))
    ((failures < max_failures)) ||
      fail "the training failed $failures times (${answers//$'\n'/, }); launch/tpu_vm.sh tail shows its words"
  fi
  say "starting the training (${answers//$'\n'/, })"
  if grep -qx 'training: none' <<<"$answers"; then
    setup || return
  fi
  train
}

watch() {
  local state last='' answer ended='' failures=0 unanswered=0 max_failures=3 max_unanswered=10
  while [[ -z "$ended" ]]; do
    state="$(find_state)" || state=UNKNOWN
    [[ "$state" == "$last" ]] || say "$name is $state"
    last="$state"
    case "$state" in
      ABSENT) create ;;
      SUSPENDED) replace ;;
      FAILED)
        failures=$((failures + 1))
        ((failures < max_failures)) || fail "the TPU was refused or the training failed, $failures times in all"
        replace ;;
      ACTIVE)
        if ! { answer="$(show_status)" && go_on "$answer"; }; then state=UNKNOWN; fi ;;
    esac
    if [[ "$state" == UNKNOWN ]]; then # a broken connection here, or a TPU that is just being taken away
      unanswered=$((unanswered + 1))
      ((unanswered < max_unanswered)) || fail "$name did not answer $unanswered times in a row"
    else
      unanswered=0
    fi
    [[ -n "$ended" ]] || sleep "$poll_seconds"
  done
  say "the training has ended; its run is $run"
}

command="${1:-}"
case "$command" in
  -h | --help)
    print_help launch/tpu_vm.sh
    exit 0 ;;
  '')
    print_help launch/tpu_vm.sh >&2
    fail 'no command was given' ;;
  create | setup | train | status | tail | fetch | delete | watch) shift ;;
  *) fail "unknown command '$command'; there are create, setup, train, status, tail, fetch, delete and watch" ;;
esac
parse_flags "$value_flags" "$switches" "$@"
require "$command" --name --zone
[[ "$poll_seconds" =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "--poll-seconds is '$poll_seconds'; it must be a number"
case "$command" in
  create) require create --accelerator-type --runtime-version ;;
  train)
    require train --run --config
    require_config_of_checkout "$config" ;;
  fetch) require fetch --run ;;
  watch)
    require watch --accelerator-type --runtime-version --run --config
    require_config_of_checkout "$config"
    [[ "$run" == gs://* ]] || fail "--run is '$run'; what is to outlast a preemption must be in a bucket, as gs://..." ;;
esac
place=(--zone="$zone")
[[ -z "$project" ]] || place+=(--project="$project")
[[ -n "$dry_run" ]] || command -v gcloud >/dev/null || fail 'gcloud (of the Google Cloud CLI) is not on the PATH'

case "$command" in
  create) create && wait_until_active ;;
  setup | train | fetch) "$command" ;;
  status)
    if [[ -n "$dry_run" ]]; then
      tpus queued-resources describe "$name" "${place[@]}" '--format=value(state.state)'
      show_status
    else
      state="$(find_state)"
      printf '%s: %s\n' "$name" "$state"
      [[ "$state" != ACTIVE ]] || show_status
    fi ;;
  tail) on_worker "$worker" 'tail -n 100 -F transformer-jax-worker/train.log' ;;
  delete) confirm_deletion && delete ;;
  watch)
    if [[ -n "$dry_run" ]]; then
      create && wait_until_active && setup && train
      note "every $poll_seconds s, until the training has ended:"
      show_status
      note 'after a preemption, this, and then all of the above again:'
      delete
    else
      watch
      [[ -z "$delete_when_done" ]] || delete
    fi ;;
esac
