import asyncio
import errno
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from virtual_clock import run_virtual

from noloco_node.errors import NotAdmitted
from noloco_node.node.follow_author import ANNOUNCE_S, AWAY_S, EXPIRED_LOOKS, LOOK_S, FollowAuthor
from noloco_node.peers import run_registry
from noloco_node.run.admission import EXPIRED, REVOKED


def test_a_machine_out_of_descriptors_announces_the_run_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when all that call and are called come back at once, after a machine's sleep."""
    announced, calls = list[object](), iter(range(100))

    def channel(peer: str) -> str:
        if next(calls) == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return f"to {peer}"

    async def announce(channels: list[str], *_: object) -> list[bool]:
        announced.append(channels)
        return [True]

    async def main() -> None:
        transport = SimpleNamespace(peer_id="us", channel=channel)
        rules = SimpleNamespace(signed=None, amended=None)
        first, *others = FollowAuthor(rules, b"", transport, None, ["first"], None, None).duties()
        for other in others:
            other.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(4.5 * ANNOUNCE_S):
                await first

    monkeypatch.setattr(run_registry, "announce", announce)
    run_virtual(main())
    assert announced == 3 * [["to first"]]
    assert caplog.text.count("the rendezvous first does not keep this run") == 1


def test_rendezvous_nodes_that_are_gone_for_good_are_a_health_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that know one another train on; but the line that they hand out leads nowhere."""

    async def announce(channels: list[str], *_: object) -> list[bool | None]:
        return [no for no, _ in zip(answers, channels, strict=True)]

    monkeypatch.setattr(run_registry, "announce", announce)
    transport, rules = SimpleNamespace(peer_id="us", channel=str), SimpleNamespace(signed=None, amended=None)
    told: list[tuple[list[bool | None], int]] = [([None, False], 0), ([None, None], 1), ([], 0)]
    for answers, lines in told:
        author = FollowAuthor(rules, b"", transport, None, ["first", "second"][: len(answers)], None, None)
        for _ in range(2):
            asyncio.run(author.announce())
        assert not author.health(time.monotonic())
        assert len(author.health(time.monotonic() + AWAY_S + 1)) == lines
    answers = [True, None]
    author = FollowAuthor(rules, b"", transport, None, ["first", "second"], None, None)
    author._away_since = 1.0
    asyncio.run(author.announce())
    assert not author.health(time.monotonic() + 2 * AWAY_S), "it is back"


@pytest.mark.parametrize(("own", "says"), [("author", True), ("other", False)])
def test_an_author_hears_that_its_restored_home_is_behind(
    own: str, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    followed = list[object]()

    async def learn(*_: object) -> bool:
        rules.words = "amended (5): 200 rounds"
        return True

    async def amended(rules: object) -> None:
        followed.append(rules)

    async def look() -> None: ...

    signed = SimpleNamespace(author="author")
    rules = SimpleNamespace(
        words="amended (3): ended", learn=learn, require=lambda *_: None, signed=signed, amended=None
    )
    transport = SimpleNamespace(peer_id=own, channel=None, place_of=None)
    asyncio.run(
        FollowAuthor(rules, b"", transport, SimpleNamespace(look=look, seen={}), [], None, amended).learn_first()
    )
    assert followed == [rules]
    assert says == ("amended (3): ended here is replaced by a newer one" in caplog.text)


@pytest.mark.parametrize(
    ("why", "wrong_s", "ends_s"),
    [(EXPIRED, EXPIRED_LOOKS / 2, None), (EXPIRED, 1e9, EXPIRED_LOOKS * LOOK_S), (REVOKED, 1e9, 0.0)],
)
def test_a_clock_that_is_wrong_for_a_moment_does_not_end_a_node_that_is_invited(
    why: str, wrong_s: float, ends_s: float | None
) -> None:
    async def main() -> float | None:
        clock = asyncio.get_running_loop().time

        def refuses(*_: object) -> str | None:
            return why if clock() < wrong_s else None

        def require(*_: object) -> None:
            if refuses():
                raise NotAdmitted(why)

        rules, transport = SimpleNamespace(refuses=refuses, require=require), SimpleNamespace(peer_id="us")
        *others, stays = FollowAuthor(rules, b"", transport, None, [], None, None).duties()
        for other in others:
            other.close()
        try:
            async with asyncio.timeout(3 * EXPIRED_LOOKS * LOOK_S):
                await stays
        except NotAdmitted:
            return clock()
        except TimeoutError:
            return None

    assert run_virtual(main()) == ends_s
