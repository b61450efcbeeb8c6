#!/usr/bin/env bash
# Runs what needs real SGLang, on the CPU: the engines' contract tests against SGLang and the embedded engine alike
# (MILES_CONTRACT_ENGINES=sglang: against SGLang alone), and fully asynchronous runs with SGLang, sglang-router and gloo
# weight updates in every pause mode.
#
#   bash tests/run_sglang.sh            everything
#   bash tests/run_sglang.sh -k pause   further arguments go to pytest
#
# Tests that share one server run in one process of pytest, and those that start their own beside it in another, whose
# output comes at the end.
#
# miles runs from .venv (see tests/run.sh), the servers from an environment of their own: .venv-sglang, of about 3 GB,
# made in a few minutes and reused while tests/sglang/requirements.txt is unchanged. MILES_SGLANG_VENV puts it elsewhere,
# MILES_PYTHON chooses the Python it is made with (3.11 to 3.13), and MILES_SGLANG_TIMEOUT says how many seconds the
# tests may take.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/venv.sh"
cd "$root"

venv=${MILES_SGLANG_VENV:-$root/.venv-sglang}
requirements=tests/sglang/requirements.txt
stamp="$venv/miles-sglang.stamp"
make_venv "$root" "${MILES_VENV_EXTRA:-test}"

fingerprint() {
    { cat "$requirements" tests/sglang/cpu_platform/pyproject.toml tests/sglang/cpu_platform/*/*.py &&
        "$venv/bin/python" -VV && echo "$venv"; } | sha256sum | cut -d' ' -f1
}

install() {
    local python pip scratch
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python)
        echo "Making $venv with $("$python" -V) ($python)" >&2
        "$python" -m venv "$venv"
    fi
    # Most of SGLang's modules are never imported here: those that are, are compiled when they are.
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    rm -f "$stamp"
    # torch with its dependencies (on PyPI it is a CUDA build, which needs them even without a GPU), the rest without.
    "${pip[@]}" --constraint "$requirements" "$(grep '^torch==' "$requirements")"
    "${pip[@]}" --no-deps --requirement "$requirements"
    # A copy: building leaves files beside the sources.
    scratch=$(mktemp -d)
    cp -R tests/sglang/cpu_platform "$scratch"
    "${pip[@]}" --no-deps --no-build-isolation --force-reinstall "$scratch/cpu_platform"
    rm -rf "$scratch"
    fingerprint >"$stamp"
}

started=$SECONDS
mkdir -p "$(dirname "$venv")" .cache
(
    command -v flock >/dev/null 2>&1 && flock 9
    if [ ! -x "$venv/bin/python" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint)" ]; then
        install 9>&-
    fi
) 9>.cache/venv-sglang.lock
installed=$SECONDS

export MILES_CONTRACT_ENGINES="${MILES_CONTRACT_ENGINES:-embedded,sglang}" MILES_SGLANG_PYTHON="$venv/bin/python"
# Starting a server takes half a minute, most of it on one core: the tests that start their own run beside the others.
run_tests() { # marker expression, arguments of pytest
    exec timeout --kill-after=20 "$limit" "$VENV_PYTHON" -m pytest tests/contracts/test_engine_http.py tests/sglang \
        --durations=10 -m "$@"
}

limit=${MILES_SGLANG_TIMEOUT:-900}
output=$(mktemp)
own=0 shared=0
run_tests own_servers "$@" >"$output" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null || true; rm -f "$output"' EXIT
(run_tests "not own_servers" "$@") || shared=$?
wait "$pid" || own=$?
cat "$output"
for status in "$own" "$shared"; do
    [ "$status" != 124 ] || echo "the tests did not end within $limit s" >&2
done

nothing=5 # of all tests that were asked for
status=$shared
if [ "$status" = 0 ] || { [ "$status" = "$nothing" ] && [ "$own" = 0 ]; }; then
    status=$own
    [ "$own" != "$nothing" ] || [ "$shared" = "$nothing" ] || status=0
fi
echo "SGLang: installation $((installed - started)) s, tests $((SECONDS - installed)) s"
exit "$status"
