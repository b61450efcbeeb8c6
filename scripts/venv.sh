# Shell functions shared by examples/quickstart/run.sh, tests/run.sh and .ci/run. Source it; bash only.
#
#   make_venv ROOT [EXTRA]   makes ROOT/.venv with the pinned dependencies and miles itself (editable), with the extra
#                            (test or dev) when one is named, and sets VENV_PYTHON to its interpreter.
#
# MILES_SKIP_VENV=1 makes nothing and uses the `python` on PATH as it is: for images and environments that have it all.
#
# When nothing changed since the last time it costs a few milliseconds: a stamp in .venv holds a hash of everything that
# decides what is installed. pip runs with the user's own settings (index, certificates, proxies, caches).
# Several calls at once are safe: one installs, the others wait for it.

# Prints the first Python 3.11 to 3.13 that can make a virtual environment. MILES_PYTHON chooses one.
find_python() {
    local candidate why=""
    for candidate in ${MILES_PYTHON:-python3 python3.12 python3.11 python3.13 python}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        python_is_supported "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
        why="$candidate lacks the modules venv and ensurepip (on Debian and Ubuntu: apt-get install python3-venv)."
    done
    echo "miles needs Python 3.11, 3.12 or 3.13 with venv. ${why:-None was found on PATH;} set MILES_PYTHON to choose one." >&2
    return 1
}

python_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# What decides the content of the environment: declared dependencies, pins, interpreter, place.
venv_fingerprint() {
    { cat "$1/pyproject.toml" "$1/constraints.txt" && "$1/.venv/bin/python" -VV && echo "$1"; } | sha256sum | cut -d' ' -f1
}

# True when .venv holds what pyproject.toml and constraints.txt ask for now. dev contains test, test contains the rest.
venv_is_current() {
    local root=$1 extra=$2 fingerprint name
    [ -x "$root/.venv/bin/python" ] || return 1
    fingerprint=$(venv_fingerprint "$root" 2>/dev/null) || return 1
    for name in base test dev; do
        [ "$name" = "$extra" ] && extra=any
        if [ "$extra" = any ] && [ "$(cat "$root/.venv/miles-$name.stamp" 2>/dev/null)" = "$fingerprint" ]; then
            return 0
        fi
    done
    return 1
}

install_venv() {
    local root=$1 extra=$2 python target=$1 quiet=()
    if [ -e "$root/.venv/bin/python" ] || [ -L "$root/.venv/bin/python" ]; then
        python_is_supported "$root/.venv/bin/python" || {
            echo "$root/.venv has no Python 3.11 to 3.13: remove it, or move it away, and run this again." >&2
            return 1
        }
    fi
    if [ ! -e "$root/.venv/bin/pip" ]; then
        python=$(find_python) || return 1
        echo "Making $root/.venv with $("$python" -V) ($python)" >&2
        "$python" -m venv "$root/.venv" || return 1
    fi
    [ "$extra" = base ] || target="$root[$extra]"
    [ -t 2 ] || quiet=(--quiet)
    echo "Installing pinned dependencies into .venv (once; minutes, README.md says how large it is)" >&2
    "$root/.venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$target" >&2 || {
        echo "pip could not install the dependencies: its message is above; nothing else was changed." >&2
        return 1
    }
    venv_fingerprint "$root" >"$root/.venv/miles-$extra.stamp"
}

make_venv() {
    local root=$1 extra=${2:-base}
    if [ -n "${MILES_SKIP_VENV:-}" ]; then
        VENV_PYTHON=python
        return 0
    fi
    VENV_PYTHON="$root/.venv/bin/python"
    venv_is_current "$root" "$extra" && return 0
    mkdir -p "$root/.cache" || return 1
    (
        # Whoever waited here finds the work done.
        command -v flock >/dev/null 2>&1 && flock 9
        venv_is_current "$root" "$extra" || install_venv "$root" "$extra" 9>&-
    ) 9>"$root/.cache/venv.lock"
}
