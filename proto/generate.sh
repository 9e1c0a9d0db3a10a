#!/usr/bin/env bash
# Regenerates noloco_node/wire/*_pb2* from proto/, or makes them in another folder. Needs grpcio-tools of the version
# that pyproject.toml names.
set -eu
out=$(realpath "${1:-"$(dirname "$0")/.."}")
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -I proto --{python,pyi,grpc_python}_out="$out" proto/noloco_node/wire/*.proto
cd "$out/noloco_node/wire"
rm circuit_pb2_grpc.py # it has no services
# Nobody uses grpc's experimental API: for each service a class, from this line on
sed -i '/^ # This class is part of an EXPERIMENTAL API/,/^class .*Stub/{/^class .*Stub/!d}' ./*_pb2_grpc.py
