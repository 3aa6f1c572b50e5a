#!/usr/bin/env bash
# Trains on a TPU slice of a Kubernetes cluster (GKE) as a JobSet: fills in launch/gke.yaml and submits it by kubectl.
#
#   launch/gke.sh COMMAND --name NAME [--namespace default] [FLAG...] [-- TRAIN ARGUMENT...]
#
#   submit   --image IMAGE --accelerator TYPE --topology AxB[xC] --config FILE[:ARGS] --run gs://...
#            [--config.GROUP.FIELD=VALUE...] [--chips-per-host 4] [--spot] [--max-restarts 20]
#            [--service-account default]
#            TYPE is the cluster's name of the accelerator, as tpu-v5-lite-podslice
#   status   the JobSet and its pods
#   logs     follows the log of the first host
#   delete   ends the training, which saves first; its run stays
#
# --dry-run prints the exact commands, the filled-in manifest included, and runs none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
source launch/flags.sh

value_flags=' --name --namespace --image --accelerator --topology --chips-per-host --max-restarts --service-account'
value_flags+=' --config --run '
switches=' --spot --dry-run '
name='' namespace=default image='' accelerator='' topology='' chips_per_host=4 max_restarts=20 service_account=default
config='' run='' spot='' dry_run=''

# Prints the words as a JSON list, which is YAML too.
json_list() {
  local word text=''
  for word in "$@"; do
    [[ "$word" != *[[:cntrl:]]* ]] || fail "an argument of the training holds a line break or another control character"
    word="${word//\\/\\\\}"
    word="${word//"\$("/"\$\$("}" # Kubernetes puts variables in the place of $(...)
    text+=", \"${word//\"/\\\"}\""
  done
  printf '[%s]\n' "${text#, }"
}

check_form() {
  [[ "$2" =~ ^$3$ ]] || fail "$1 is '$2'; it must be $4"
}

count_hosts() {
  local chips=1 side
  for side in ${topology//x/ }; do chips=$((chips * side)); done
  if ((chips < chips_per_host)); then
    fail "--topology $topology has $chips chips, fewer than --chips-per-host $chips_per_host"
  fi
  ((chips % chips_per_host == 0)) ||
    fail "--topology $topology has $chips chips, which hosts of $chips_per_host (--chips-per-host) do not make up"
  printf '%s\n' "$((chips / chips_per_host))"
}

# Prints launch/gke.yaml with every ${...} filled in.
render() {
  local text pair command hosts
  hosts="$(count_hosts)" || exit
  command="$(json_list python -m transformer_jax train --config="$config" --run="$run" \
    ${train_arguments[@]+"${train_arguments[@]}"})" || exit
  text="$(<launch/gke.yaml)"
  [[ -n "$spot" ]] || text="$(grep -v '# with --spot$' <<<"$text")"
  text="$(grep -v '^#' <<<"$text")"
  for pair in NAME="$name" NAMESPACE="$namespace" IMAGE="$image" ACCELERATOR="$accelerator" TOPOLOGY="$topology" \
    CHIPS_PER_HOST="$chips_per_host" MAX_RESTARTS="$max_restarts" SERVICE_ACCOUNT="$service_account" HOSTS="$hosts" \
    COMMAND="$command"; do
    text="${text//"\${${pair%%=*}}"/"${pair#*=}"}"
  done
  printf '%s\n' "$text"
}

submit() {
  local manifest
  manifest="$(render)"
  if [[ -n "$dry_run" ]]; then
    printf "kubectl create -f - <<'MANIFEST'\n%s\nMANIFEST\n" "$manifest"
  else
    kubectl create -f - <<<"$manifest"
  fi
}

command="${1:-}"
case "$command" in
  -h | --help)
    print_help launch/gke.sh
    exit 0 ;;
  '')
    print_help launch/gke.sh >&2
    fail 'no command was given' ;;
  submit | status | logs | delete) shift ;;
  *) fail "unknown command '$command'; there are submit, status, logs and delete" ;;
esac
parse_flags "$value_flags" "$switches" "$@"
require "$command" --name
check_form --name "$name" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'at most 40 small letters, digits and -'
check_form --namespace "$namespace" '[a-z0-9]([-a-z0-9]*[a-z0-9])?' 'small letters, digits and -'
if [[ "$command" == submit ]]; then
  require submit --image --accelerator --topology --config --run
  require_config_of_checkout "$config"
  [[ "$run" == gs://* ]] || fail "--run is '$run'; pods keep nothing, so it must be in a bucket, as gs://..."
  check_form --topology "$topology" '[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?' 'of the form 4x4 or 4x4x4'
  check_form --chips-per-host "$chips_per_host" '[1-9][0-9]*' 'a number from 1 on'
  check_form --max-restarts "$max_restarts" '[0-9]+' 'a number from 0 on'
  check_form --image "$image" '[-A-Za-z0-9._/:@]+' 'the name of an image'
  check_form --accelerator "$accelerator" '[-A-Za-z0-9._]+' 'a name, as tpu-v5-lite-podslice'
  check_form --service-account "$service_account" '[-a-z0-9.]+' 'the name of a service account'
fi
[[ -n "$dry_run" ]] || command -v kubectl >/dev/null || fail 'kubectl is not on the PATH'

of_set="jobset.sigs.k8s.io/jobset-name=$name"
case "$command" in
  submit) submit ;;
  status)
    act kubectl get jobset "$name" --namespace="$namespace"
    act kubectl get pods --namespace="$namespace" --selector="$of_set" --output=wide ;;
  logs)
    act kubectl logs --namespace="$namespace" --selector="$of_set,batch.kubernetes.io/job-completion-index=0" \
      --follow --tail=100 ;;
  delete) act kubectl delete jobset "$name" --namespace="$namespace" ;;
esac
