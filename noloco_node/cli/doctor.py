"""`doctor`: is this machine fit for a swarm, and can it reach one? A line for each thing that was looked at."""

import argparse
import os
from dataclasses import asdict

from noloco_node.cli.show import print_json
from noloco_node.doctor.verdicts import Finding, exit_code
from noloco_node.host import config
from noloco_node.host.config import NodeConfig
from noloco_node.views.documents import SCHEMA

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_FLAGS = ("home", "bootstrap", "listen", "relay", "device", "threads")


def doctor(args: argparse.Namespace) -> int:
    settings = config.load({name: getattr(args, name) for name in _FLAGS}, os.environ)
    findings = look_round(settings, tell=not args.json)
    code = exit_code(findings)
    if args.json:
        print_json({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings], "exit_code": code})
    return code


def look_round(settings: NodeConfig, *, tell: bool) -> list[Finding]:
    """`tell`: each finding as it is made, since some take seconds."""
    import uvloop

    from noloco_node.doctor.run_checks import examine

    async def all_of_it() -> list[Finding]:
        findings = []
        async for finding in examine(settings):
            findings.append(finding)
            if tell:
                _tell(finding)
        return findings

    found: list[Finding] = uvloop.run(all_of_it())
    return found


def _tell(finding: Finding) -> None:
    from rich.text import Text

    from noloco_node.terminal.text import console

    what = f"{finding.subject:<10} {finding.text}" + (f": {finding.remedy}" if finding.remedy else "")
    console().print(Text.assemble((f"{finding.level:<8}", _STYLES[finding.level]), what), soft_wrap=True)
