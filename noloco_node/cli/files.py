"""The verbs about a node's files: `paths` tells where they lie, `bugreport` packs what helps to find a fault."""

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from noloco_node.cli.show import home_of, print_json
from noloco_node.control import socket_client
from noloco_node.errors import NolocoError
from noloco_node.host import config
from noloco_node.host.home import Home
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.views.documents import SCHEMA, document

_LIBRARIES = ("torch", "hivemind", "grpcio", "protobuf", "transformers", "numba", "numpy", "uvloop", "safetensors")


def paths(args: argparse.Namespace) -> int:
    from noloco_node.host.paths import inventory

    items = list(inventory(home_of(args)))
    if args.json:
        rows = [{**asdict(item), "path": str(item.path)} for item in items]
        print_json({"schema": SCHEMA, "paths": rows})
        return 0
    from noloco_node.base.units import size

    for run_id in dict.fromkeys(item.run_id for item in items):
        if run_id:
            print(f"run {run_id}")
        for item in (item for item in items if item.run_id == run_id):
            print(f"{item.what:<14}  {size(item.bytes):>8}  {item.path}")
    return 0


def bugreport(args: argparse.Namespace) -> int:
    from noloco_node.doctor import bug_report as report

    home = home_of(args)
    to = Path(args.to or time.strftime("noloco-bugreport-%Y%m%d-%H%M%S.zip"))
    contents = {"versions.txt": _versions(), **asyncio.run(_views(home)), "doctor.json": _doctor(home)}
    report.write(to, {**contents, **report.files(home)}, report.mask(home, os.environ))
    if args.json:
        print_json({"schema": SCHEMA, "file": str(to.absolute()), "bytes": to.stat().st_size})
    else:
        print(f"wrote {to}: keys and tokens are left out, addresses masked. Look through it before you send it")
    return 0


def _versions() -> str:
    lines = [f"noloco-node {VERSION} (protocol {PROTOCOL})", f"Python {platform.python_version()}", platform.platform()]
    for library in _LIBRARIES:
        try:
            lines.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            lines.append(f"{library} is not installed")
    return "\n".join(lines) + "\n"


async def _views(home: Home) -> dict[str, str]:
    """Of the node that runs here; or why there are none."""
    try:
        async with socket_client.connected(home) as node:
            status, peers = await node.status(), await node.peers()
    except NolocoError as error:
        return {"status.txt": f"{error}\n"}
    return {
        f"{name}.json": json.dumps(document(view), indent=2) for name, view in (("status", status), ("peers", peers))
    }


def _doctor(home: Home) -> str:
    """Of this machine only: a report sends nothing anywhere."""
    from noloco_node.cli.doctor import look_round

    try:
        settings = config.load({"home": str(home.root)}, os.environ)
        findings = look_round(replace(settings, bootstrap=()), tell=False)
    except NolocoError as error:
        return json.dumps({"schema": SCHEMA, "error": str(error)})
    return json.dumps({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]}, indent=2)
