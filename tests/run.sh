#!/usr/bin/env bash
# Makes .venv with the test extras and runs what needs no GPU: fast tests, contract tests, the CPU end-to-end test.
#
#   bash tests/run.sh                      everything
#   bash tests/run.sh -k staleness -x      further arguments go to pytest
#   bash tests/run.sh tests/fast/utils     paths among them replace the default ones
#   bash tests/run.sh -n 0 --pdb           one after the other in this process, not file by file in two
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/venv.sh"
cd "$root"

make_venv "$root" "${MILES_VENV_EXTRA:-test}"

paths=(tests/fast tests/contracts tests/e2e/cpu)
for argument in "$@"; do
    # A file, a directory or a file::test: the caller chose.
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then
        paths=()
        break
    fi
done
# A file stays in one process, with what its tests share. pytest takes the last -n.
exec "$VENV_PYTHON" -m pytest --numprocesses 2 --dist loadfile "${paths[@]}" "$@"
