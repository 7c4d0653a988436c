#!/bin/bash
# The tests of the sdist on the wheel, far from the checkout: make test-wheel. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/../.."
dist=$PWD/dist
python=$PWD/.venv/bin/python

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
tar -xzf "$dist"/*.tar.gz --strip-components=1
# Or the current folder would have it before the wheel does.
rm -r rdmafork
"$python" -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check "$(echo "$dist"/*.whl)[dev,test,wheel]"
PATH="$folder/venv/bin:$PATH" TESTED_DIST=$dist venv/bin/python -m pytest "$@"
