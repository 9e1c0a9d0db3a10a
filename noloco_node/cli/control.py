"""The verbs that make the node on this machine do something, or wait for it: `pause`, `resume`, `leave`, `wait`."""

import argparse
import asyncio
import math
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from noloco_node.base.states import NodeState
from noloco_node.checkpoints import listing
from noloco_node.cli.options import home_of, print_json, seconds
from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import Incompatible, NolocoError, NoNodeRunning, NotReached, UsageError
from noloco_node.host.home import Home
from noloco_node.views.status import StatusView

_LEAVE_S = 15.0
"""A node leaves within 10 s unless it reports that it still saves; the rest is for its process to end."""
_POLL_LEAVE_S = 0.1
POLL_S = 0.5
COMES_S = 10.0
"""With a timeout: how long to wait for a node to appear. One that has just been started holds its lock at once."""
SILENT_S = 30.0
"""A node that loads torch on a busy machine does not answer for a while."""
ANSWER_S = 2.0
"""A healthy node answers within it, also where --timeout is shorter."""


# ---- pause, resume, leave ----
def pause(args: argparse.Namespace) -> int:
    home = home_of(args)
    view = asyncio.run(_change(home, ControlClient.pause))
    print(f"{view.name} is {view.state}: `noloco-node resume{home.flag}` continues")
    return 0


def resume(args: argparse.Namespace) -> int:
    view = asyncio.run(_change(home_of(args), ControlClient.resume))
    print(f"{view.name} is {view.state}" + (f", waiting for {view.waiting_for}" if view.waiting_for else ""))
    return 0


def leave(args: argparse.Namespace) -> int:
    home = home_of(args)
    view = asyncio.run(_leave(home))
    name, deadline = view.name, time.monotonic() + _LEAVE_S
    while (pid := home.holder()) is not None:
        if time.monotonic() > deadline:
            awaited = asyncio.run(_awaited(home))
            if awaited is None:
                raise NolocoError(f"{name} (pid {pid}) is still leaving after {_LEAVE_S:.0f} s: see {home.log}")
            print(f"{name} is leaving, and waits for {awaited}")
            deadline = time.monotonic() + _LEAVE_S
        time.sleep(_POLL_LEAVE_S)
    print(listing.after_leaving(view, home))
    return 0


async def _change(home: Home, change: Callable[[ControlClient], Awaitable[StatusView]]) -> StatusView:
    view = await socket_client.ask(home, change)
    if view.state == NodeState.RENDEZVOUS:
        raise UsageError(f"{view.name} is a rendezvous and does not train: `noloco-node leave{home.flag}` ends it")
    return view


async def _awaited(home: Home) -> str | None:
    """What a leaving node waits for, if it reports that."""
    try:
        return (await socket_client.ask(home, ControlClient.status)).waiting_for
    except NolocoError:
        return None


async def _leave(home: Home) -> StatusView:
    """Its status before."""
    async with socket_client.connected(home) as node:
        view = await node.status()
        await node.leave()
        return view


# ---- wait ----
@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    """`training`, `round` or `finished`."""
    round: int = 0

    @classmethod
    def parse(cls, text: str) -> "Goal":
        form = re.fullmatch(r"(training|finished)|round=([0-9]{1,12})", text)
        if form is None:
            raise UsageError(f"--for must be training, round=<number> or finished, not {text!r}")
        return cls(form[1]) if form[1] else cls("round", int(form[2]))

    def __str__(self) -> str:
        return f"round {self.round}" if self.what == "round" else self.what

    def reached(self, view: StatusView) -> bool:
        """For a node that has ended, by its last status."""
        match self.what:
            case "training":
                return view.state == NodeState.TRAINING
            case "round":
                return view.round >= self.round
            case _:
                return view.state == NodeState.FINISHED or (view.state == NodeState.LEAVING and _done(view))

    def why_never(self, view: StatusView) -> str | None:
        """Why this node will never reach it; None if it may."""
        if view.state == NodeState.RENDEZVOUS:
            return f"{view.name} is a rendezvous and does not train: name the home of a node that trains with --home"
        ends_at = view.rounds_target
        if self.what == "round" and ends_at is not None and self.round > ends_at:
            return f"{view.name} stops at round {ends_at} and never reaches round {self.round}: wait for an earlier one"
        if view.state == NodeState.FINISHED and not self.reached(view):
            return f"{view.name} has finished, at round {view.round}: it will not train any more"
        return None


def wait(args: argparse.Namespace) -> int:
    goal, timeout_s = Goal.parse(args.goal), None
    if args.timeout is not None:
        timeout_s = seconds(args.timeout, "--timeout", 0.001, 999_999_999)
    view = asyncio.run(_Wait(home_of(args), goal, timeout_s).until_reached())
    if args.json:
        print_json(view)
    return 0


class _Wait:
    def __init__(self, home: Home, goal: Goal, timeout_s: float | None) -> None:
        self._home = home
        self._goal = goal
        self._timeout_s = timeout_s
        self._started_at = time.monotonic()
        self._answered_at = self._started_at
        self._last: StatusView | None = None
        self._printed = ""

    async def until_reached(self) -> StatusView:
        while (view := await self._reached()) is None:
            if self._timeout_s is not None and self._passed() >= self._timeout_s:
                if self._last is None and self._home.holder() is None:
                    raise socket_client.nobody(self._home)
                raise NotReached(
                    f"{self._goal} was not reached within {self._timeout_s:g} s ({_progress(self._last)}): "
                    f"wait longer with --timeout, or see `noloco-node status{self._home.flag}`"
                )
            await asyncio.sleep(min(POLL_S, self._left()))
        return view

    async def _reached(self) -> StatusView | None:
        try:
            async with asyncio.timeout(max(ANSWER_S, self._left())):
                view = await socket_client.ask(self._home, ControlClient.status)
        except TimeoutError:
            return None
        except NoNodeRunning:
            return self._without_node()
        except (UsageError, Incompatible):
            raise
        except NolocoError:
            if time.monotonic() - self._answered_at > SILENT_S:
                raise
            return None
        self._answered_at, self._last = time.monotonic(), view
        if self._goal.reached(view):
            return view
        if sentence := self._goal.why_never(view):
            raise NolocoError(sentence)
        self._say(f"waiting for {self._goal}: {_progress(view)}")
        return None

    def _without_node(self) -> StatusView | None:
        """No node answers: none runs, or it has not started yet, or it has ended. Raises NolocoError."""
        if self._last is None:
            starting = self._home.holder() is not None
            if not starting and (self._timeout_s is None or self._passed() >= COMES_S):
                raise socket_client.nobody(self._home)
            self._say(f"waiting for {self._goal}: {'the node is starting' if starting else 'no node is running yet'}")
            return None
        if self._goal.what == "finished" and _done(self._last):
            return self._last
        if self._home.holder() is not None:  # it moves to another stage, or is just ending
            return None
        raise NolocoError(
            f"{self._last.name} ended before {self._goal} was reached ({_progress(self._last)}): see {self._home.log}"
        )

    def _passed(self) -> float:
        return time.monotonic() - self._started_at

    def _left(self) -> float:
        return math.inf if self._timeout_s is None else max(0.0, self._timeout_s - self._passed())

    def _say(self, line: str) -> None:
        if line != self._printed:
            self._printed = line
            print(line, file=sys.stderr, flush=True)


def _done(view: StatusView) -> bool:
    return view.rounds_target is not None and view.round >= view.rounds_target


def _progress(view: StatusView | None) -> str:
    if view is None:
        return "no node answered"
    for_what = f", waiting for {view.waiting_for}" if view.waiting_for else ""
    return f"{view.name} is {view.state} at round {view.round}{for_what}"
