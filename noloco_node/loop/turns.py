"""Whose turn it is: a loop's thread and the node's training thread work on the same weights, one at a time.

The loop's thread has the turn for one step. Then it hands the turn over and waits, in which time the training thread
adds corrections, takes boundaries, evaluates and answers its mailbox, until it wants another step. So a handover costs
two switches between threads a step, and nothing is locked while either works.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Turns:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits = False
        """Whether the loop's thread waits for its turn."""
        self._steps = False
        """Whether it has the turn."""
        self._closed = False
        """Whether it makes no further step."""
        self._over = False
        """Whether none is wanted any more."""
        self.loss = 0.0
        """Of the step that was made last."""

    # ---- the loop's thread ----
    def wait(self, loss: float = 0.0) -> bool:
        """Its step is done, with this loss, or none was begun yet. Returns when the next one is wanted; False: none is
        any more."""
        with self._changed:
            self.loss, self._steps, self._waits = loss, False, True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._steps or self._over)
            finally:
                self._waits = False
            return self._steps

    def close(self) -> None:
        """The loop is left: it makes no further step, and a step that is under way does not count."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- the training thread ----
    def step(self, within_s: float, working: Callable[[], AbstractContextManager[object]]) -> bool:
        """Have the loop make a step, once it waits for that. False where it does not within this time. `working` is
        around the step, which takes as long as it takes."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waits and not self._closed, within_s):
                return False
            self._waits, self._steps = False, True
            self._changed.notify_all()
            with working():
                self._changed.wait_for(lambda: not self._steps or self._closed)
            done, self._steps = not self._steps, False
            return done

    # ---- any thread ----
    def end(self) -> None:
        """No further step is wanted."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
