"""The verbs about this machine and the node's files on it: `doctor`, `config`, `runs`, `paths`, `bugreport`; and
`completion`, for its shell."""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_node.base.units import NOTHING, size, span
from noloco_node.base.validation import did_you_mean
from noloco_node.cli.options import home_of, print_json, show
from noloco_node.control import socket_client
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host import config
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home, whole_path
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.views.documents import SCHEMA, document

if TYPE_CHECKING:
    from noloco_node.checkpoints.kept_runs import KeptRun
    from noloco_node.doctor.verdicts import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_LIBRARIES = ("torch", "hivemind", "grpcio", "protobuf", "transformers", "numba", "numpy", "uvloop", "safetensors")


# ---- doctor ----
def doctor(args: argparse.Namespace) -> int:
    from noloco_node.doctor.verdicts import exit_code

    settings = config.load(config.among(vars(args)), os.environ)
    findings = _run_doctor(settings, show=not args.json)
    code = exit_code(findings)
    if args.json:
        print_json({"findings": findings, "exit_code": code})
    return code


def _run_doctor(settings: NodeConfig, *, show: bool) -> "list[Finding]":
    """`show`: print each finding as it is made, since some take seconds."""
    import uvloop

    from noloco_node.doctor.run_checks import examine

    async def examine_all() -> "list[Finding]":
        findings = []
        async for finding in examine(settings):
            findings.append(finding)
            if show:
                _print_finding(finding)
        return findings

    found: list[Finding] = uvloop.run(examine_all())
    return found


def _print_finding(finding: "Finding") -> None:
    from rich.text import Text

    from noloco_node.terminal.text import console

    what = f"{finding.subject:<10} {finding.text}" + (f": {finding.remedy}" if finding.remedy else "")
    console().print(Text.assemble((f"{finding.level:<8}", _STYLES[finding.level]), what), soft_wrap=True)


# ---- files ----
def _show_of(home: Home, args: argparse.Namespace, document: dict[str, Any], *lines: str) -> int:
    """And that the home does not exist: the user may have mistyped it."""
    code = show(args, document, *lines)
    if not home.root.exists():
        print(f"{home.root} does not exist: this is what a new home there has", file=sys.stderr)
    return code


def paths(args: argparse.Namespace) -> int:
    from noloco_node.host.paths import inventory

    home, lines = home_of(args), list[str]()
    items = list(inventory(home))
    for run_id, of_run in groupby(items, lambda item: item.run_id):
        lines += [f"run {run_id}"] if run_id else []
        lines += [f"{item.what:<14}  {size(item.bytes):>8}  {item.path}" for item in of_run]
    return _show_of(home, args, {"paths": [{**asdict(item), "path": str(item.path)} for item in items]}, *lines)


def runs(args: argparse.Namespace) -> int:
    from noloco_node.checkpoints import kept_runs

    home = home_of(args)
    held = asyncio.run(_held(home))
    there = kept_runs.kept(home, held)
    removed = kept_runs.remove(home, there, args.remove) if args.remove else []
    lines = [f"removed {run.label}, {size(run.bytes)}" for run in removed]
    if not args.remove:
        none = "its node has not begun one" if held is not None else "join one with its invitation"
        lines = [*map(_run_line, there)] or [f"no run in {home.root} yet: {none}"]
    left = [run for run in there if run not in removed]
    return _show_of(home, args, {"runs": left, "removed": [run.run_id for run in removed]}, *lines)


async def _held(home: Home) -> str | None:
    """The run that a node trains here at this moment; "" where a node does not say."""
    if home.holder() is None:
        return None
    try:
        return (await socket_client.ask(home, socket_client.ControlClient.status)).run_id or ""
    except NolocoError:
        return ""


def _run_line(run: "KeptRun") -> str:
    if run.finished:
        state = "finished, its node still runs" if run.running else "finished"
    else:
        state = "running" if run.running else "not finished"
    saved = f"saved {span(time.time() - run.saved_at)} ago" if run.saved_at else "not saved yet"
    done = f"round {run.round} of {run.rounds or NOTHING}"
    return f"{run.run_id[:12]}  {run.label:<24}  {done:<22}  {saved:<22}  {size(run.bytes):>8}  {state}" + (
        f", {run.amended}" if run.amended else ""
    )


def bugreport(args: argparse.Namespace) -> int:
    from noloco_node.doctor import bug_report as report

    home = home_of(args)
    to = Path(args.to or time.strftime("noloco-bugreport-%Y%m%d-%H%M%S.zip"))
    contents = {"versions.txt": _versions(), **asyncio.run(_views(home)), "doctor.json": _doctor(home)}
    report.write(to, {**contents, **report.files(home)}, report.mask(home, os.environ))
    wrote = f"wrote {to}: keys and tokens are left out, addresses masked. Read it before you send it"
    return _show_of(home, args, {"file": str(whole_path(str(to))), "bytes": to.stat().st_size}, wrote)


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
        findings = _run_doctor(replace(settings, bootstrap=()), show=False)
    except NolocoError as error:
        return json.dumps({"schema": SCHEMA, "error": str(error)})
    return json.dumps({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]}, indent=2)


# ---- settings, completion ----
def settings(args: argparse.Namespace) -> int:
    home = home_of(args)
    found = config.explained(home, os.environ)
    lines = (f"{setting.name:<22}  {setting.origin:<11}  {_written(setting.value)}" for setting in found)
    return _show_of(home, args, {"settings": found}, *lines)


def _written(value: object) -> str:
    """As in node.toml."""
    match value:
        case None | []:
            return "-"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list():
            return ", ".join(map(str, value))
        case _:
            return str(value)


def completion(args: argparse.Namespace) -> int:
    from noloco_node.cli.parser import verbs
    from noloco_node.terminal.completion import SHELLS, script

    if args.shell not in SHELLS:
        raise UsageError(f"there is no completion for {args.shell!r}, {did_you_mean(args.shell, SHELLS)}")
    print(script(args.shell, verbs()), end="")
    return 0
