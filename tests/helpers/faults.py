"""Failing os calls: what a kill, a full disk or a read-only one does in the middle of a write."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OS_CALLS = ("open", "fsync", "replace", "link")


@contextmanager
def fail_at(monkeypatch: pytest.MonkeyPatch, place: int, fault: BaseException) -> Iterator[list[str]]:
    """The call of this place (1: the first) among OS_CALLS raises instead of being done. Gives the calls' names."""
    calls: list[str] = []

    def failing(name: str) -> Any:
        real = getattr(os, name)

        def call(*given: Any, **named: Any) -> Any:
            if name == "open" and given[1] & os.O_NONBLOCK:  # a file that is read
                return real(*given, **named)
            calls.append(name)
            if len(calls) == place:
                raise fault
            return real(*given, **named)

        return call

    with monkeypatch.context() as patched:
        for name in OS_CALLS:
            patched.setattr(os, name, failing(name))
        yield calls
