"""Two nodes on a slow way that dial each other at the same moment: of two dials from the ports at which both listen TCP
makes one connection, whose handshake fails at both ends, and p2pd then refuses to dial for 5 s."""

import time

import pytest
from delayed_link import delayed_link, why_not

from noloco_node.bench import rivals
from noloco_node.bench.workers import START_S, Workers

WAY_S = 0.05
FRAGMENT = 1 << 20


@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_they_swap_at_once() -> None:
    with delayed_link(50.0, WAY_S) as hosts, Workers(f"{rivals.__name__}.noloco_pair", hosts) as both:
        each = [{"host": host.address, "worker": number} for number, host in enumerate(hosts)]
        started = both.ask("start", START_S, each, params=FRAGMENT, variant="lattice:4")
        both.ask("connect", 60.0, addresses=[answer["address"] for answer in started])
        took_s = []
        for step in (1, 2):
            both.ask("prepare", 30.0, [{"partners": [1]}, {"partners": [0]}], step=step)
            began = time.monotonic()
            both.ask("step", 30.0)
            took_s.append(time.monotonic() - began)
        assert took_s[0] < took_s[1] + 5.0, "p2pd dialled no more for 5 s"
