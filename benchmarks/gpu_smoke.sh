#!/usr/bin/env bash
# Ten fully asynchronous steps of a random 0.6B Qwen3 in bf16 on one CUDA device: trainer and embedded engine share it.
#
#   bash benchmarks/gpu_smoke.sh                       minutes; exit code 2 where there is no CUDA device
#   bash benchmarks/gpu_smoke.sh --device cpu --tiny   the same chain with a tiny model, to try the script itself
#
# Prints step time, tokens a second, log-probability difference and pause per weight update. Needs nothing but the
# checkout and installed packages: the model is made here. Uses .venv where it exists, else `python`; PYTHON chooses.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m benchmarks.gpu_smoke "$@"
