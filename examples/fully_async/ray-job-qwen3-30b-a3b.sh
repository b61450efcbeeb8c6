#!/usr/bin/env bash
# Submits the Qwen3-30B-A3B run to a Ray cluster of several nodes, as a Ray job, and follows its log.
#
#   RAY_JOBS=http://head:8265 MODEL=/shared/Qwen3-30B-A3B DATA=/shared/math OUT=/shared/runs \
#       bash examples/fully_async/ray-job-qwen3-30b-a3b.sh
#
#   RAY_JOBS          address of the cluster's dashboard, which takes jobs (default http://127.0.0.1:8265)
#   MODEL, DATA, OUT  as for the one-node script, but on a disk that every node sees under the same path
#   CHECKOUT          this checkout as the nodes see it; default: where the script lies
#   TRAIN_NODES       nodes of 8 GPUs that train (default 2); ROLLOUT_NODES nodes that generate (default 2)
#
# `ray job submit` is part of ray[default]. Further arguments go to train_async.py. Ctrl-C ends the log, not the job:
# `ray job stop` does, with the id that was printed, and the run then saves a checkpoint first.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${MODEL:?set MODEL to the directory of the Qwen3-30B-A3B checkpoint, on a disk that every node sees}"
: "${DATA:?set DATA to the directory that holds dapo-math-17k.jsonl, on a disk that every node sees}"
: "${OUT:?set OUT to a directory on a disk that every node sees}"
CHECKOUT=${CHECKOUT:-$root}
TRAIN_NODES=${TRAIN_NODES:-2}
ROLLOUT_NODES=${ROLLOUT_NODES:-2}

# What every process of the run has in its environment, the driver and Ray's workers on all nodes alike. Without the
# first one --fully-async is refused. RAY_JOB_STOP_WAIT_TIME_S is how long `ray job stop` waits before it kills the driver;
# Ray's own 3 seconds are too few for the step under way and a checkpoint. MILES_HOST_IP is not among them: it differs by node, see docs/user-guide/cluster.md.
runtime_env=$(cat <<JSON
{
  "env_vars": {
    "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
    "PYTHONPATH": "$CHECKOUT",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_JOB_STOP_WAIT_TIME_S": "20"
  }
}
JSON
)

auth=$(python -P "$root/miles/ray/token_auth.py") # a token, where the user has one, as `ray start --head` wants it
[ -z "$auth" ] || export RAY_AUTH_MODE="$auth"

exec ray job submit --address="${RAY_JOBS:-http://127.0.0.1:8265}" --runtime-env-json="$runtime_env" -- \
    python "$CHECKOUT/examples/fully_async/run_qwen3_30b_a3b_fully_async.py" \
    --model "$MODEL" --data "$DATA" --out "$OUT" \
    --train-nodes "$TRAIN_NODES" --train-gpus-per-node 8 --rollout-gpus "$((8 * ROLLOUT_NODES))" \
    --context-parallel 2 --pipeline-parallel 2 --expert-parallel 4 \
    --rollout-batch-size 128 -- "$@"
