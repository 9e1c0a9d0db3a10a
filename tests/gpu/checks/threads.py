"""What a training thread posts, and a swap of two offers as the event loop does it."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

from torch import Tensor

from noloco_node.training.mailbox import Failed, PhaseEnded
from noloco_node.training.offer import Offer

DEADLINE_S = 60.0

T = TypeVar("T")


class Posts:
    """Of one training thread."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.put = self._posts.put
        self._left: list[object] = []
        """That nobody has wanted yet."""

    def until(self, kind: type[T], within_s: float = DEADLINE_S) -> T:
        """The next one of this kind. Raises what the thread has failed with."""
        ends = time.monotonic() + within_s
        for post in self._left:
            if isinstance(post, kind):
                self._left.remove(post)
                return post
        while True:
            try:
                post = self._posts.get(timeout=max(0.1, ends - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} came within {within_s:.0f} s") from None
            if isinstance(post, kind):
                return post
            if isinstance(post, Failed):
                raise post.error
            self._left.append(post)

    def offer(self) -> Offer:
        ended = self.until(PhaseEnded)
        assert ended.offer is not None, ended.closed
        return ended.offer


def answer(future: "Future[T]") -> T:
    return future.result(timeout=DEADLINE_S)


def swap(one: Offer, other: Offer, exchange: bytes) -> Iterator[tuple[Tensor, Tensor]]:
    """Fragment by fragment. Gives the corrections. At its end all of them are in the mailboxes."""
    for index in range(one.fragments):
        scale = talk(one, other, index, exchange)
        yield correction(one, index), correction(other, index)
        one.apply(index, scale)
        other.apply(index, scale)
    arrive(one, other)


def talk(one: Offer, other: Offer, index: int, exchange: bytes) -> float:
    """The factor that both allow for the fragment's correction."""
    said = answer(one.open(index, exchange)), answer(other.open(index, exchange))
    while True:
        received = one.receive(index, said[1]), other.receive(index, said[0])
        mine, theirs = (answer(each) for each in received)
        if isinstance(mine, float) and isinstance(theirs, float):
            return min(mine, theirs)
        assert isinstance(mine, bytes) and isinstance(theirs, bytes), "both take the same number of turns"
        said = mine, theirs


def correction(offer: Offer, index: int) -> Tensor:
    found = offer._corrections[index].here
    assert found is not None
    return found


def arrive(*offers: Offer) -> None:
    """Until everything that was applied is in a mailbox."""
    for offer in offers:
        answer(offer.stats())
