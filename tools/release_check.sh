#!/usr/bin/env bash
# release_check.sh PYTHON: what .github/workflows/wheels.yml does with a tag, as far as one machine
# can, after `make wheels` has filled dist/.  Nothing is uploaded.
set -euo pipefail
bin=$(dirname "$1")
"$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
for platform in linux macos; do
    count=$("$bin/cibuildwheel" --platform "$platform" --print-build-identifiers 2>/dev/null | wc -l)
    echo "cibuildwheel: $count wheels for each processor on $platform"
done
"$bin/twine" check --strict dist/*
version=$("$1" -c 'from mlstate import __version__; print(__version__)')
tag=$("$1" - <<END
import yaml
steps = yaml.safe_load(open(".github/workflows/wheels.yml"))["jobs"]["publish"]["steps"]
print(next(step["run"] for step in steps if "run" in step))
END
)
GITHUB_REF_NAME=v$version bash -c "$tag"
echo "a tag v$version would publish:"
ls dist
