#!/usr/bin/env bash
# Submits a run: scripts/slurm/submit.sh [options] CONFIG… [-- Megatron's flags]; see --help, and README.md here.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/slurm/submit.sh [options] CONFIG… [-- Megatron's flags]

  scripts/slurm/submit.sh configs/train/llama3.1-8b-128k.yaml data.yaml
  scripts/slurm/submit.sh --dry-run --nodes 4 configs/train/qwen3-8b-128k.yaml data.yaml -- --train-iters 500

CONFIG: layers as of python -m megatron_basp.launch --config, a later one wins. Checkpoints and logs go to the run's
folder; the same command again goes on from the last checkpoint there.

  --dry-run            print the command, and do nothing else; needs no SLURM
  --nodes N            default: `nodes` of the last CONFIG that has it, else 1
  --gpus-per-node G    default 8, as the files of configs/train were made for
  --run FOLDER         of the run (default: runs/ and the first CONFIG's name)
  --script FILE        Megatron's pretrain_gpt.py (default: the one that comes with megatron_basp)
  --sbatch=OPTION      for sbatch, such as --sbatch=--partition=gpu; may be repeated
  --cpu                ranks on CPUs, over gloo; with --ranks-per-node R
  --help
  and those of pretrain.sbatch: --launcher --ranks-per-node --python --container --mounts --rank-logs --check-fabric
  --max-connections
USAGE
}
fail() { printf 'submit.sh: error: %s\n' "$*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dry_run='' nodes='' gpus=8 run='' cpu='' python='' container=''
script=(-m megatron_basp.megatron.pretrain_gpt)
configs=() for_sbatch=() for_job=() flags=()
while (($#)); do
    case $1 in
        --help) usage; exit ;;
        --) shift; flags=("$@"); break ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --cpu) cpu=yes; shift; continue ;;
        --sbatch=*) for_sbatch+=("${1#--sbatch=}"); shift; continue ;;
        --nodes | --gpus-per-node | --run | --script | --launcher | --ranks-per-node | --python | --container | --mounts | --rank-logs | --check-fabric | --max-connections)
            (($# > 1)) || fail "$1 takes a value" ;;&
        --nodes) nodes=$2; shift 2 ;;
        --gpus-per-node) gpus=$2; shift 2 ;;
        --run) run=$2; shift 2 ;;
        --script) [[ -f $2 ]] || fail "there is no script $2"; script=("$(realpath "$2")"); shift 2 ;;
        --python) python=$2; shift 2 ;;
        --container) container=$2; for_job+=("$1" "$2"); shift 2 ;;
        --rank-logs) for_job+=("$1" "$(realpath -m "$2")"); shift 2 ;;
        --launcher | --ranks-per-node | --mounts | --check-fabric | --max-connections) for_job+=("$1" "$2"); shift 2 ;;
        -*) fail "$1 is no option of it: Megatron's flags stand behind --, and SLURM's in --sbatch=…" ;;
        *) [[ -f $1 ]] || fail "there is no configuration $1"; configs+=("$(realpath "$1")"); shift ;;
    esac
done
((${#configs[@]})) || fail 'no CONFIG given: see --help'
[[ -n $nodes ]] || nodes=$(cat "${configs[@]}" | sed -n 's/^nodes: *\([0-9]*\).*/\1/p' | tail -n 1)
[[ ${nodes:=1} =~ ^[1-9][0-9]*$ ]] || fail "--nodes must be a whole number, 1 or more, got $nodes"
name=$(basename "${configs[0]}" .yaml)
run=$(realpath -m "${run:-runs/$name}")
# In a container it is the container's Python.
if [[ -z $python ]]; then
    python=python3
    if [[ -z $container && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi

words=(-m megatron_basp.launch)
[[ -z $cpu ]] || words+=(--cpu)
for config in "${configs[@]}"; do words+=(--config "$config"); done
words+=("${script[@]}" --save "$run/checkpoints" --load "$run/checkpoints" "${flags[@]}")

command=(sbatch --job-name "$name" --nodes "$nodes" --output "$run/%j.log")
[[ -n $cpu ]] || command+=(--gpus-per-node "$gpus")
command+=("${for_sbatch[@]}" "$root/scripts/slurm/pretrain.sbatch" --root "$root" --python "$python" "${for_job[@]}" --)
command+=("${words[@]}")
if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
command -v sbatch >/dev/null || fail 'there is no sbatch on this machine: --dry-run shows what it would be given'
mkdir -p "$run"
exec "${command[@]}"
