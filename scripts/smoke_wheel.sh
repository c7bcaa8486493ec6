#!/usr/bin/env bash
# Run a cell on two ranks in an environment that holds the wheel and its core dependencies, nothing else.
# Usage: scripts/smoke_wheel.sh PYTHON WHEEL
set -euo pipefail
python=$(realpath -s "$1") wheel=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
scratch=$(mktemp -d -t smoke-XXXXXX)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input -c "$root/constraints-dev.txt" "$wheel"
cp "$here/smoke_cell.py" "$scratch"
cd "$scratch" # away from the sources
[[ $(venv/bin/taas --version) == *"$(venv/bin/python -c 'import taas_magic; print(taas_magic.__version__)')"* ]]
PATH=$scratch/venv/bin:$PATH venv/bin/python smoke_cell.py
