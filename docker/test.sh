#!/usr/bin/env bash
# Build the image from what is committed, and run docker/compose.yml for real: tests/system/test_compose.py.
#
#     bash docker/test.sh                               # on the base that the Dockerfile names
#     BASE=local/python:3.11-slim bash docker/test.sh   # on another; where it is missing and debootstrap is there, it
#                                                       # is made, which needs no image registry
#
# Needs docker with compose, and the package's test environment in $PYTHON (default: .venv/bin/python). pip runs out
# here, with this machine's settings, so $PYTHON must be of the base's version. With BASE the build has no network: the
# base must have tini, as one made here has.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export NOLOCO_IMAGE=${NOLOCO_IMAGE:-noloco-node:test}
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} # where buildx is missing; the Dockerfile needs nothing of it
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT

base() { # NAME: a Debian with Python and tini, and little else
    local root="$context/base"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,tini bookworm "$root"
    tar -C "$root" -c . | docker import - "$1"
    rm -rf "$root"
}

arguments=(--build-arg PIP_OPTIONS=--no-index --build-arg REVISION="$(git rev-parse HEAD)")
arguments+=(--build-arg VERSION="$(sed -n 's/^VERSION = "\(.*\)"/\1/p' noloco_node/version.py)")
if [[ -n ${BASE:-} ]]; then
    docker image inspect "$BASE" >/dev/null 2>&1 || ! command -v debootstrap >/dev/null || base "$BASE"
    arguments+=(--build-arg BASE="$BASE" --network none)
fi
git archive HEAD | tar -x -C "$context"
"$python" -m pip wheel --quiet --wheel-dir "$context/docker/wheels" "$context" 'setuptools>=77'
docker build --tag "$NOLOCO_IMAGE" --file "$context/docker/Dockerfile" "${arguments[@]}" "$context"
docker image inspect --format "image $NOLOCO_IMAGE: {{.Size}} bytes" "$NOLOCO_IMAGE"
"$python" -m pytest -q -rs --slow tests/system/test_compose.py
