"""The verbs about this machine and the node's files on it: `doctor`, `paths`, `bugreport`."""

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from noloco_node.cli.options import home_of, print_json
from noloco_node.control import socket_client
from noloco_node.doctor.verdicts import Finding, exit_code
from noloco_node.errors import NolocoError
from noloco_node.host import config
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.views.documents import SCHEMA, document

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_DOCTOR_FLAGS = ("home", "bootstrap", "listen", "relay", "device", "threads")
_LIBRARIES = ("torch", "hivemind", "grpcio", "protobuf", "transformers", "numba", "numpy", "uvloop", "safetensors")


# ---- doctor ----
def doctor(args: argparse.Namespace) -> int:
    settings = config.load({name: getattr(args, name) for name in _DOCTOR_FLAGS}, os.environ)
    findings = run_doctor(settings, show=not args.json)
    code = exit_code(findings)
    if args.json:
        print_json({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings], "exit_code": code})
    return code


def run_doctor(settings: NodeConfig, *, show: bool) -> list[Finding]:
    """`show`: print each finding as it is made, since some take seconds."""
    import uvloop

    from noloco_node.doctor.run_checks import examine

    async def examine_all() -> list[Finding]:
        findings = []
        async for finding in examine(settings):
            findings.append(finding)
            if show:
                _print_finding(finding)
        return findings

    found: list[Finding] = uvloop.run(examine_all())
    return found


def _print_finding(finding: Finding) -> None:
    from rich.text import Text

    from noloco_node.terminal.text import console

    what = f"{finding.subject:<10} {finding.text}" + (f": {finding.remedy}" if finding.remedy else "")
    console().print(Text.assemble((f"{finding.level:<8}", _STYLES[finding.level]), what), soft_wrap=True)


# ---- paths, bugreport ----
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
        print_json({"schema": SCHEMA, "file": str(config.whole_path(str(to))), "bytes": to.stat().st_size})
    else:
        print(f"wrote {to}: keys and tokens are left out, addresses masked. Read it before you send it")
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
    """Of the node that runs here, or the reason why there are none."""
    try:
        async with socket_client.connected(home) as node:
            status, peers, events = await node.status(), await node.peers(), await node.round_events()
    except NolocoError as error:
        return {"status.txt": f"{error}\n"}
    return {
        "status.json": json.dumps(document(status), indent=2),
        "peers.json": json.dumps(document(peers), indent=2),
        "rounds.log": "\n".join(events),
    }


def _doctor(home: Home) -> str:
    """Without the bootstrap addresses: writing a report contacts nobody."""
    try:
        settings = config.load({"home": str(home.root)}, os.environ)
        findings = run_doctor(replace(settings, bootstrap=()), show=False)
    except NolocoError as error:
        return json.dumps({"schema": SCHEMA, "error": str(error)})
    return json.dumps({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]}, indent=2)
