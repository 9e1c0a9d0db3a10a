"""A fake node with canned views, empty or busy: for the web server and its page."""

import math
import random
import time
from dataclasses import replace

from fake_node import FakeNode

from noloco_node.base.peer_names import name_of
from noloco_node.views.history import HistoryView, MeetingView, Piece, Point, Rate, Said
from noloco_node.views.peers import PeerRow, PeersView
from noloco_node.views.status import BytesView, Checkpoints, LastRound, MemoryView, Rounds, SampleView, StatusView

ME = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"
BARE = StatusView(peer_id=ME, name=name_of(ME), version="0.1.0", state="training")


def bare() -> FakeNode:
    """A node that has just begun, and sees nobody."""
    return FakeNode(BARE, PeersView(), HistoryView())


def busy(rounds: int = 40, peers: int = 7) -> FakeNode:
    """A node after some rounds with some peers."""
    chance, node = random.Random(0), bare()
    ids = [ME, *(f"12D3KooW{chance.getrandbits(200):050x}"[:52] for _ in range(peers))]
    ends = time.time()
    begins = [ends - 6.0 * (rounds - number) for number in range(rounds + 1)]
    losses = [1.4 + 4.2 * math.exp(-number / 7) + chance.gauss(0, 0.03) for number in range(rounds)]
    points, pieces, meetings = [], [], {}
    for number, loss in enumerate(losses, 1):
        began, ended = begins[number - 1], begins[number]
        evaluated = loss + 0.1 if number % 2 == 0 else None
        swarm = loss + 0.05 + chance.gauss(0, 0.02)
        swarm_evaluated = swarm + 0.1 if evaluated else None
        points.append(
            Point(ended, number, 50 * number, loss, evaluated, swarm, swarm_evaluated, 9800.0, 2.74e-3, 0.812)
        )
        pieces.append(Piece("phase", number, began, ended))
        if chance.random() < 0.15:
            reason = chance.choice(["no_partner", "peer_lost", "busy"])
            pieces.append(Piece("solo", number, ended + 1, ended + 1, None, reason))
        elif number < rounds:
            partner = chance.choice(ids[1:])
            pieces.append(
                Piece("swap", number, ended + 0.2, ended + 0.5 + chance.random(), partner, None, 220_000, 218_000)
            )
    for one in ids:
        for other in ids:
            if one < other and chance.random() < 0.85:
                meetings[one, other] = chance.randrange(1, 9)
    seconds = int(ends)
    node.past = HistoryView(
        points=tuple(points),
        pieces=tuple(pieces),
        rates=tuple(
            Rate(seconds - 120 + s, *(220_000 * chance.random() if s % 6 == 0 else 900.0 for _ in "sr"))
            for s in range(120)
        ),
        meetings=tuple(MeetingView(one, other, together) for (one, other), together in meetings.items()),
        said=tuple(
            Said(
                begins[number],
                "warning" if number % 9 == 8 else "info",
                f"round {number} of 200 with calm-otter: step {50 * number} of 10000, loss {loss:.3f}, lr 2.74e-3, "
                "grad norm 0.81, 9.8k tokens/s, memory 812 MB, 16 min left; swap 400 ms, sent 220 kB, received 218 kB",
            )
            for number, loss in enumerate(losses, 1)
        ),
        names={peer: name_of(peer) for peer in ids},
    )
    node.others = PeersView(
        tuple(
            PeerRow(
                peer_id=peer,
                name=name_of(peer),
                state=chance.choice(["training", "training", "training", "paused", "joining"]),
                round=rounds - chance.randrange(3),
                lag=chance.randrange(3),
                via=chance.choice(["direct", "relayed", None]),
                tokens_per_s=9000 + 1000 * chance.random(),
                loss=losses[-1] + chance.gauss(0, 0.1),
                eval_loss=losses[-1] + 0.1,
                last_seen_s=20 * chance.random(),
                sent=chance.randrange(10_000_000),
                received=chance.randrange(10_000_000),
                exchanges=chance.randrange(10),
            )
            for peer in ids[1:]
        )
    )
    node.now = replace(
        BARE,
        run_id="3f9a2c81d0e4" + 52 * "0",
        run="tiny-3f9a2c81d0e4",
        round=rounds,
        rounds_target=200,
        step=50 * rounds,
        steps_target=10_000,
        left_s=960.0,
        learning_rate=2.74e-3,
        gradient_norm=0.812,
        memory=MemoryView(host=812_000_000, host_limit=16_800_000_000),
        sample=SampleView(rounds, "def main(", 'self, name):\n    """The first one."""\n    return self.name'),
        tokens=12_300_000,
        tokens_per_s=9800.0,
        loss=losses[-1],
        loss_first=losses[0],
        eval_loss=losses[-1] + 0.1,
        eval_loss_first=losses[0],
        device="cpu",
        parameters=410_000,
        busy_fraction=0.973,
        busy_fraction_minute=0.981,
        time_s={"step": 233.0, "boundary": 0.6, "apply": 0.4, "evaluate": 4.2, "checkpoint": 0.5, "other": 0.8},
        stall_ms=7.0,
        rounds=Rounds(rounds - 6, 6, {"no_partner": 4, "peer_lost": 2}),
        bytes=BytesView(34_000_000, 33_800_000, 0.53),
        last_round=LastRound(ids[1], 0.4, 220_000, 218_000, 0.004, 0.2),
        checkpoint=Checkpoints(6_600_000, 41_000_000_000, 40),
        peers_seen=peers,
        reachable="directly",
        uptime_s=260.0,
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{ME}",),
        join="noloco-node join nn1SckV2vaSQLKpTgzwm6VmV4pFGuhnjq42WFUyY6kCUPgdqSJVRSkyW9NfQpWAhZGFJRbcxfbVm4LEMq",
    )
    return node
