#!/usr/bin/env bash
# Makes the environment in which Helm runs, in the directory that is given, with the first Python from 3.12 on that it finds:
# HELM_PYTHON, one on the PATH, or one of pyenv's.
set -euo pipefail
target=$1
requirements="$(dirname "$0")/requirements.txt"

pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
for python in ${HELM_PYTHON:+"$HELM_PYTHON"} python3.12 python3.13 python3 "$pyenv_root"/versions/3.1[2-9]*/bin/python; do
    if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' > /dev/null 2>&1; then
        "$python" -m venv --clear "$target"
        "$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"
        exit 0
    fi
done
echo "Helm's library needs Python 3.12 or newer, and there is none here; name one: HELM_PYTHON=/path/to/python3.12" >&2
exit 1
