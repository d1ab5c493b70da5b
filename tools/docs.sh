#!/usr/bin/env bash
# docs.sh PYTHON: build build/docs/index.html; warnings are errors.
set -euo pipefail
rm -rf docs/api
"$1" -m sphinx --fail-on-warning --keep-going -q -j auto -b html -d build/doctrees docs build/docs
echo "build/docs/index.html"
