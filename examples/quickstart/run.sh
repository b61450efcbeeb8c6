#!/usr/bin/env bash
# Trains a small model fully asynchronously on the CPU: 150 steps in under two minutes on two cores.
#
#   bash examples/quickstart/run.sh                    from any directory
#   bash examples/quickstart/run.sh --num-rollout 3    further arguments go to train_async.py and win over the ones below
#   bash examples/quickstart/run.sh --lr 0             the control run: the reward stays where it is
#
# Makes .venv, the base model and the prompts on the first run and reuses them afterwards.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/venv.sh"
cd "$root" # so that examples.quickstart.reward can be imported, and runs/ lies in the repository

make_venv "$root"

data=examples/quickstart/data
"$VENV_PYTHON" -m examples.quickstart.prepare --out "$data"

model=(
    --hf-checkpoint "$data/base_model" # Qwen3, 80 thousand parameters; a real checkpoint directory works the same way
    --rollout-engine embedded          # miles' own small inference server; `sglang` on GPUs
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1 # one trainer and
    --rollout-num-gpus 1        # one engine: processes where there is no GPU
)

task=(
    --prompt-data "$data/train.jsonl" # {"input": "52914>", "label": "12459"}
    --input-key input
    --label-key label
    --rollout-shuffle
    --custom-rm-path examples.quickstart.reward.reward
    --eval-prompt-data sort "$data/eval.jsonl" # 256 prompts that training never sees
    --eval-interval 150                        # with the one before the first step: before and after
    --eval-temperature 0                       # greedy
)

rollout=(
    --num-rollout 150
    --rollout-batch-size 16
    --n-samples-per-prompt 16
    --rollout-temperature 1
    --rollout-max-response-len 12
    --rollout-skip-special-tokens
    --async-max-concurrent-samples 384      # 24 groups in flight, more than one batch: the engine never runs dry
    --async-data-buffer-capacity-factor 1   # and about one batch finished and waiting: more would only grow older
    --max-weight-staleness 2                # groups that began more than 2 weight versions ago start over
)

training=(
    --global-batch-size 256
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --advantage-estimator grpo
    --use-tis # corrects for the older weights that wrote the samples
    --tis-clip 2
    --optimizer adam
    --lr 3e-4
    --lr-decay-style constant
    --lr-warmup-iters 10
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0
    --clip-grad 1
)

output=(
    --runs-dir runs/quickstart # each run makes its own directory in it
)

export MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1 # the class-based rollout interface, which --fully-async builds on
exec "$VENV_PYTHON" train_async.py --fully-async \
    "${model[@]}" "${task[@]}" "${rollout[@]}" "${training[@]}" "${output[@]}" "$@"
