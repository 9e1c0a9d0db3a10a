#!/usr/bin/env bash
# Regenerates noloco_node/wire/*_pb2* from proto/. Needs grpcio-tools of the version that pyproject.toml names.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/noloco_node/wire/*.proto
rm noloco_node/wire/circuit_pb2_grpc.py # it has no services
