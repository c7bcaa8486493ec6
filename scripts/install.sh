#!/usr/bin/env bash
# Install the project with one of its extras, under the tested versions, quietly unless that fails.
# Usage: scripts/install.sh PYTHON EXTRA editable|wheel
set -euo pipefail
python=$1 extra=$2 mode=$3
log=$(mktemp -t install-XXXXXX.log)

if [[ $mode == wheel ]]; then
    wheels=(dist/*.whl)
    what=("${wheels[0]}[$extra]")
else
    what=(--editable ".[$extra]")
fi

install() { "$python" -m pip install --disable-pip-version-check --no-input -c constraints-dev.txt "$@" >>"$log" 2>&1; }

echo "Installing into $(dirname "$(dirname "$python")") (extra: $extra). Once, 1 to 10 minutes: torch is large."
started=$SECONDS
# A wheel of the same version is taken for installed already, hence the second line.
if install "${what[@]}" && { [[ $mode != wheel ]] || install --force-reinstall --no-deps "${wheels[0]}"; }; then
    echo "Installed in $((SECONDS - started)) s."
    rm -f "$log"
else
    echo "The installation failed. The end of pip's output, all of it in $log:" >&2
    tail -n 25 "$log" >&2
    exit 1
fi
