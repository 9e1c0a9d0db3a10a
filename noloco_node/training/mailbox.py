"""Letters to the training thread whose senders wait for what becomes of them: each ends, read or not."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from noloco_node.errors import NolocoError
from noloco_node.training.replica import Replica

T = TypeVar("T")


class Question(Generic[T]):
    """A letter to the training thread that wants an answer."""

    def __init__(self, ask: Callable[[Replica], T]) -> None:
        self.answer: Future[T] = Future()
        self._ask = ask

    def __call__(self, inner: Replica) -> None:
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self._ask(inner))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                self.answer.set_exception(error)

    def give_up(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(NolocoError("the training has ended"))


class Correction:
    """A letter to the training thread; `added` is done when there is nothing left of it, whatever became of it."""

    def __init__(self, add: Callable[[Replica], None]) -> None:
        self.added: Future[None] = Future()
        self._add = add

    def __call__(self, inner: Replica) -> None:
        try:
            self._add(inner)
        finally:
            self.give_up()

    def give_up(self) -> None:
        self.added.set_result(None)
