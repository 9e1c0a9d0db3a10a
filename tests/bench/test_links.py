"""Hosts behind links of a known rate: they reach each other, their bytes are counted, and nothing is left of them."""

import os
import subprocess

import pytest

from noloco_node.bench import links
from noloco_node.errors import NolocoError


def test_without_root_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NolocoError, match=r"needs root, to make network namespaces\. Run it as root on Linux\."):
        links.require()


@pytest.mark.system
def test_a_star_of_links() -> None:
    if why := links.why_not("tc"):
        pytest.skip(why)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"nn-{dead.pid}-host1"
    links.sh(f"ip netns add {left}")
    with pytest.raises(KeyboardInterrupt), links.star(2, 100) as (one, other):
        assert left not in links.sh("ip netns list")
        before = one.traffic()
        reach = "import socket, sys; socket.create_connection((sys.argv[1], 9), 60)"
        words = [*one.inside, os.sys.executable, "-c", reach, other.address]
        tried = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "ConnectionRefusedError" in tried.stderr  # so the other host answered
        assert all(now > then for now, then in zip(one.traffic(), before, strict=True))
        sleeping = subprocess.Popen([*other.inside, "sleep", "60"])
        raise KeyboardInterrupt
    assert sleeping.wait(30)
    assert f"nn-{os.getpid()}-" not in links.sh("ip netns list")


@pytest.mark.system
@pytest.mark.parametrize("mbit", [0.01, 10_000])
def test_the_slowest_and_the_fastest_rate_that_the_benches_take(mbit: float) -> None:
    if why := links.why_not("tc"):
        pytest.skip(why)
    with links.star(1, mbit) as (host,):
        assert host.traffic()
