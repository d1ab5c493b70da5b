#!/usr/bin/env bash
# docs.sh PYTHON: build/docs/index.html; a warning is an error.
set -euo pipefail
rm -rf docs/api
"$1" -m sphinx --fail-on-warning --keep-going -q -b html -d build/doctrees docs build/docs
echo "build/docs/index.html"
