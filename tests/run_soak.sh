#!/usr/bin/env bash
# Kills driver, RolloutManager, trainer and engine 20 times each at seeded random moments, resumes, and checks that each
# prompt of each epoch was trained exactly once. About half an hour on an idle machine with four cores. Start it again
# to go on where it was stopped.
#
#   bash tests/run_soak.sh                               20 epochs of four kills, results in runs/soak/results.jsonl
#   bash tests/run_soak.sh --rounds 3 --first-seed 100   other seeds
#   bash tests/run_soak.sh --minutes 30                  begin no epoch after half an hour
#   bash tests/run_soak.sh --faults                      faults of engines in runs with --use-fault-tolerance
#   bash tests/run_soak.sh --ends --rounds 1             each process that ends a run, killed and stopped: its message
#   bash tests/run_soak.sh --table                       print the results that are there (with --faults or --ends: of those)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/venv.sh"
cd "$root"

make_venv "$root" "${MILES_VENV_EXTRA:-test}"
exec "$VENV_PYTHON" -m tests.e2e.cpu.soak "$@"
