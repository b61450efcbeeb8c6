#!/usr/bin/env bash
# GRPO on DAPO-like mathematics with Qwen3-4B, fully asynchronously, on one node of 8 GPUs: 4 train, 4 generate.
#
#   MODEL=/data/Qwen3-4B DATA=/data/math OUT=/data/runs bash examples/fully_async/run-qwen3-4b-fully_async.sh
#
#   MODEL   Hugging Face checkpoint directory
#   DATA    directory with dapo-math-17k.jsonl ({"prompt": [messages], "label": "34"}) and aime-2024.jsonl (the same)
#   OUT     directory for checkpoints and for what each run leaves behind; default: runs/ in the checkout
#
# Further arguments go to train_async.py and win over the ones below; --check-config checks everything and starts nothing.
# PYTHON chooses the interpreter; the default is `python`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${MODEL:?set MODEL to the directory of the Qwen3-4B checkpoint}"
: "${DATA:?set DATA to the directory that holds dapo-math-17k.jsonl and aime-2024.jsonl}"
OUT=${OUT:-$root/runs}
cd "$root"

cluster=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4 # 4 GPUs train: 2-way tensor parallel, 2-way data parallel
    --rollout-num-gpus 4        # the other 4 generate,
    --rollout-num-gpus-per-engine 1 # one engine each: a 4B model fits one GPU, and engines that do not talk are fastest
)

model=(
    --hf-checkpoint "$MODEL"
    --load "$OUT/qwen3-4b-fully-async" # the same command resumes; nothing there yet: from the checkpoint above
    --save "$OUT/qwen3-4b-fully-async"
    --save-interval 20
    --runs-dir "$OUT"
)

data=(
    --prompt-data "$DATA/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type dapo # the last "Answer: ..." line against the label: 1 or -1
    --reward-key score
    --eval-prompt-data aime "$DATA/aime-2024.jsonl"
    --eval-interval 20
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 0.7
)

rollout=(
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    # In flight: two batches. The filter drops groups that are all right or all wrong, so more than one batch must run.
    --async-max-concurrent-samples 512
    # Finished and waiting: one batch. More would only grow older.
    --async-data-buffer-capacity-factor 1
    --max-weight-staleness 4
    --pause-generation-mode retract
    --no-progress-timeout 1800
    --max-empty-batches 8
)

engine=(
    --rollout-engine sglang
    --sglang-mem-fraction-static 0.85
    --sglang-max-running-requests 256
    --sglang-server-concurrency 256
)

parallelism=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216 # at least the longest sample: prompt and 8192 tokens of answer
)

algorithm=(
    --global-batch-size 256
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
    --calculate-per-token-loss
    --entropy-coef 0
    --use-tis # corrects for the older weights that wrote the samples
    --tis-clip 2
)

optimizer=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --clip-grad 1
    --bf16
    --accumulate-allreduce-grads-in-fp32
    --use-distributed-optimizer # each data-parallel rank keeps its share of the optimizer state
)

export MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1 # the class-based rollout interface, which --fully-async builds on
exec "${PYTHON:-python}" train_async.py --fully-async \
    "${cluster[@]}" "${model[@]}" "${data[@]}" "${rollout[@]}" "${engine[@]}" \
    "${parallelism[@]}" "${algorithm[@]}" "${optimizer[@]}" "$@"
