import asyncio
import errno
from contextlib import suppress
from types import SimpleNamespace

import pytest
from virtual_clock import run_virtual

from noloco_node.node.follow_author import ANNOUNCE_S, FollowAuthor
from noloco_node.peers import run_registry


def test_a_machine_out_of_descriptors_announces_the_run_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all that call and are called come back at once, after a machine's sleep."""
    announced, calls = list[object](), iter(range(100))

    def channel(peer: str) -> str:
        if next(calls) == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return f"to {peer}"

    async def announce(channels: list[str], *_: object) -> None:
        announced.append(channels)

    async def main() -> None:
        transport = SimpleNamespace(peer_id="us", channel=channel)
        rules = SimpleNamespace(signed=None, amended=None)
        first, *others = FollowAuthor(rules, b"", transport, None, ["first"], None, None).duties()
        for other in others:
            other.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(2.5 * ANNOUNCE_S):
                await first

    monkeypatch.setattr(run_registry, "announce", announce)
    run_virtual(main())
    assert announced == [["to first"]]
