"""A program with the command line of noloco-node and none of its weight: it serves canned, moving views.

What it does is steered by PRETEND in its environment: `die` makes the second trainer die in its third round,
`alone` gives nobody a partner, `hang` makes a node ignore that it is told to leave, `none` has no rendezvous.
"""

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from noloco_node.base.identity import Identity
from noloco_node.base.peer_names import name_of
from noloco_node.control import socket_server
from noloco_node.host.home import Home
from noloco_node.views.status import BytesView, Rounds, StatusView

STEPS, STEP_S = 50, float(os.environ.get("PRETEND_STEP_S", "0.1"))
PARTNER = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"


class Pretended:
    def __init__(self, home: Home, rounds: int):
        peer_id = Identity.load_or_create(home.identity).peer_id
        address = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"
        self.rounds, self.left, self.resumed = rounds, asyncio.Event(), asyncio.Event()
        if not home.pause_mark.exists():
            self.resumed.set()
        self.view = StatusView(
            peer_id=peer_id, name=name_of(peer_id), version="0", state="starting", addresses=(address,)
        )

    def status(self):
        return self.view

    def peers(self):
        raise NotImplementedError

    async def resume(self):
        self.resumed.set()

    def leave(self):
        if os.environ.get("PRETEND") != "hang":
            self.left.set()

    async def train(self, args: argparse.Namespace) -> str | None:
        """What it died of."""
        if args.verb == "bootstrap":
            return None
        dies = os.environ.get("PRETEND") == "die" and args.home.endswith("node-2")
        alone = os.environ.get("PRETEND") == "alone"
        self.view = replace(self.view, state="joining", waiting_for="state from brisk-heron, 62%, 3 s left")
        await asyncio.sleep(STEP_S)
        self.view = replace(self.view, state="paused", waiting_for="`noloco-node resume`")
        await self.resumed.wait()
        for done in range(1, self.rounds + 1):
            await asyncio.sleep(STEP_S)
            if dies and done == 3:
                return "disk full: free some space"
            self.view = replace(
                self.view,
                state="training",
                waiting_for=None,
                round=done,
                step=done * STEPS,
                tokens=done * 4900,
                loss=5.0 / done,
                loss_first=5.0,
                eval_loss=5.5 / done,
                eval_loss_first=5.5,
                tokens_per_s=9800.0,
                busy_fraction=0.98,
                partner=None if alone else PARTNER,
                partners={} if alone else {PARTNER: done},
                rounds=Rounds(0, done, {"no_partner": done}) if alone else Rounds(done, 0, {}),
                bytes=BytesView(done * 400_000, done * 400_000, None if alone else 0.52),
            )
        self.view = replace(self.view, state="finished")
        return None


async def main(args: argparse.Namespace) -> None:
    home = Home(Path(args.home)).create()
    if os.environ.get("PRETEND") == "none":
        sys.exit("no network here")
    node = Pretended(home, int(args.rounds or 2))
    node.view = replace(node.view, web=args.web)
    socket_server._GRACE_S = 60.0  # it leaves at once, and its answer must still come on a busy machine
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, node.leave)
    sys.stdout.write("I am here\n")
    sys.stdout.flush()
    with home.lock():
        async with socket_server.serving(home, node):
            training = asyncio.ensure_future(node.train(args))
            left = asyncio.ensure_future(node.left.wait())
            await asyncio.wait([left, training], return_when=asyncio.FIRST_COMPLETED)
            if training.done() and training.result():
                sys.exit(training.result())
            await left
            training.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["bootstrap", "start", "join"])
    parser.add_argument("manifest", nargs="?")
    for flag in ("home", "listen", "bootstrap", "threads", "linger", "rounds", "stage", "web"):
        parser.add_argument(f"--{flag}")
    asyncio.run(main(parser.parse_args()))
