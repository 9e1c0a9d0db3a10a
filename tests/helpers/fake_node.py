"""A NodeView without a node: canned answers, and a note of what was asked. As a program, it lives in a home."""

import asyncio
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from noloco_node.control import socket_server
from noloco_node.host.home import Home
from noloco_node.views.history import HistoryView, Piece, Point
from noloco_node.views.peers import PeerRow, PeersView, PingView
from noloco_node.views.status import BytesView, Checkpoints, Health, LastRound, Rounds, StatusView

ME = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
OTHER = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"
SAVED = "saved"
"""In its home: its last checkpoint is written. With SAVES in its environment it leaves no sooner; with TRAINED it has
rounds to save."""

STATUS = StatusView(
    peer_id=ME,
    name="brisk-heron",
    version="0.1.0",
    state="training",
    run_id="3f9a2c81d0e4" + "0" * 52,
    run="tiny-3f9a2c81d0e4",
    round=41,
    rounds_target=100,
    step=2063,
    tokens=2_112_512,
    tokens_per_s=18_400.0,
    loss=1.87,
    loss_first=5.6,
    eval_loss=1.92,
    eval_loss_first=5.61,
    device="cpu",
    parameters=1_000_000,
    partner=OTHER,
    busy_fraction=0.987,
    rounds=Rounds(committed=39, solo=2, by_reason={"no_partner": 2}),
    bytes=BytesView(sent=512_000_000, received=515_000_000, per_param_round=0.52),
    resent_block_fraction=0.004,
    last_round=LastRound(OTHER, 3.1, 12_600_000, 12_600_000, 0.004),
    partners={OTHER: 39},
    calls=45,
    peers_seen=17,
    reachable="directly",
    uptime_s=11_520.0,
    addresses=(f"/ip4/203.0.113.7/tcp/4001/p2p/{ME}",),
    health=(Health("warning", "disk: 3.1 GB left, a checkpoint needs 1.2 GB", "free some, or move NOLOCO_HOME"),),
)
PEERS = PeersView(
    (
        PeerRow(
            peer_id=OTHER,
            name="calm-otter",
            state="training",
            round=40,
            lag=1,
            via="direct",
            tokens_per_s=9_900.0,
            loss=1.9,
            last_seen_s=4.2,
            sent=491_000_000,
            received=491_000_000,
            exchanges=39,
        ),
    )
)
HISTORY = HistoryView(
    points=(Point(1_760_000_000.0, 40, 2013, 1.9), Point(1_760_000_020.0, 41, 2063, 1.87, 1.92)),
    pieces=(Piece("swap", 41, 1_760_000_020.0, 1_760_000_023.1, OTHER, None, 12_600_000, 12_600_000),),
    names={OTHER: "calm-otter"},
)


class FakeNode:
    def __init__(self, status=STATUS, peers=PEERS, history=HISTORY, saved=None):
        """`saved`: a file; until it is there, the node saves when it leaves."""
        self.now, self.others, self.past = status, peers, history
        self.asked, self.done = [], []
        """Which views, and which acts."""
        self.saved = saved
        self.gone = asyncio.Event()

    def status(self):
        self.asked.append("status")
        return self.now

    def peers(self):
        self.asked.append("peers")
        return self.others

    def history(self):
        self.asked.append("history")
        return self.past

    async def pause(self):
        self.done.append("pause")
        self.now = replace(self.now, state="paused", waiting_for="`noloco-node resume`")

    async def resume(self):
        self.done.append("resume")
        self.now = replace(self.now, state="training", waiting_for=None)

    def round_events(self):
        return ["   -0.500 s  Tick()"]

    def log_level(self, level):
        logging.getLogger("noloco_node").setLevel(level.upper())

    async def ping(self, peer, payload_bytes):
        """OTHER answers, 1 MB/s away; nobody else does."""
        if peer != OTHER:
            return PingView(peer, failure="unavailable")
        return PingView(peer, 0.002 + payload_bytes / 1e6, "direct")

    def leave(self):
        self.done.append("leave")
        self.now = replace(self.now, state="leaving", waiting_for="its last checkpoint" if self.saved else None)
        asyncio.get_running_loop().call_soon(self._save)

    def _save(self):
        if self.saved is None or self.saved.exists():
            self.gone.set()
        else:
            asyncio.get_running_loop().call_later(0.05, self._save)


async def live(home: Home, saved: Path | None) -> None:
    shown = replace(STATUS, checkpoint=Checkpoints(1) if "TRAINED" in os.environ else None)
    node = FakeNode(replace(shown, rounds_target=shown.round) if "DONE" in os.environ else shown, saved=saved)
    socket_server._GRACE_S = 60.0  # it leaves at once, and its answer must still come on a busy machine
    with home.create().lock():
        async with socket_server.serving(home, node):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await node.gone.wait()


def begun(root: Path) -> "subprocess.Popen[str]":
    """A fake node in this home: a process of its own, because gRPC's asyncio needs one event loop per process."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, __file__, str(root)], stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


if __name__ == "__main__":
    root = Path(sys.argv[1])
    asyncio.run(live(Home(root), root / SAVED if "SAVES" in os.environ else None))
