#!/usr/bin/env bash
# What srun starts: the ranks of a node by torch.distributed.run, or one rank. Called by pretrain.sbatch:
#   task.sh torchrun|srun RANKS-PER-NODE PYTHON RANK-LOGS WORDS
set -euo pipefail
launcher=$1 ranks=$2 python=$3 rank_logs=$4
shift 4

# Kernels are compiled once a node, and not by all ranks of all nodes in the same home on a network file system. What is
# loaded from there runs, so that nobody else may have put it there.
TRITON_CACHE_DIR=${TMPDIR:-/tmp}/triton-$UID
(umask 077 && mkdir -p "$TRITON_CACHE_DIR")
[[ -O $TRITON_CACHE_DIR ]] || { echo "task.sh: $TRITON_CACHE_DIR belongs to somebody else: set TMPDIR" >&2; exit 2; }
chmod 700 "$TRITON_CACHE_DIR"
export TRITON_CACHE_DIR

if [[ $launcher == torchrun ]]; then
    logs=()
    [[ -z $rank_logs ]] || logs=(--log-dir "$rank_logs/$SLURM_JOB_ID.node$SLURM_NODEID" --tee 3)
    # Ranks in the order of the allocation's nodes, which the scheduler chose by the network's topology.
    "$python" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$ranks" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${logs[@]}" "$@" &
else
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$ranks
    "$python" "$@" &
fi
program=$!

# Ranks alone are told to save and exit. SLURM signals all processes of a step, those that load data and write
# checkpoints for a rank too, and torch.distributed.run kills what it started 30 s after its own SIGTERM. So the job
# sends SIGURG, which everyone else ignores.
# shellcheck disable=SC2317 # called by the trap
stop_ranks() {
    if [[ $launcher == torchrun ]]; then pkill -TERM -P "$program" || true; else kill -TERM "$program"; fi
}
trap stop_ranks URG
status=0
wait "$program" || status=$?
# A trap interrupts `wait`, with a status above 128.
while kill -0 "$program" 2>/dev/null; do
    status=0
    wait "$program" || status=$?
done
exit "$status"
