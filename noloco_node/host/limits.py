"""What a volunteer allows: a rate, an amount a day, and the hours; as plain arithmetic.

Knows no clock, no files and no network: the time is an argument. host/traffic.py waits and counts, node/trainer.py
pauses. The only module that reads units like `5MB`.
"""

import re
from dataclasses import dataclass, replace

MIN_RATE_BYTES_S = 32_000
"""256 kbit/s: with less, not even one piece of a swap arrives before the partner's timeout."""
MIN_DAILY_BYTES = 1_000_000
BURST_S = 0.5
"""Seconds of the rate that an idle bucket saves for a burst."""
ANSWERS_BYTES_S = 2_000_000
"""Of answers to look-ups: what each of the five nodes sends that hold the records at depth 0 (peers/size_estimate.py)
while 1000 nodes join in a minute."""

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:(?P<prefix>[kKMGT]?)(?P<unit>B|bit))?")


def rate(text: str) -> float:
    """Bytes a second of `5MB`, `40Mbit/s` or plain bytes. Raises ValueError that says what is allowed."""
    found = _amount(text.removesuffix("/s"))
    if found is None or found < MIN_RATE_BYTES_S:
        raise ValueError("must be a rate like 5MB or 40Mbit (a second), at least 32kB")
    return found


def amount(text: str) -> int:
    """Bytes of `20GB` or plain bytes. Raises ValueError that says what is allowed."""
    found = None if text.endswith("bit") else _amount(text)
    if found is None or found < MIN_DAILY_BYTES:
        raise ValueError("must be an amount like 20GB or 500MB, at least 1MB")
    return int(found)


def _amount(text: str) -> float | None:
    """In powers of ten, as for networks. `Mb` is refused: some mean bits by it, others bytes."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    number = float(match["number"]) * _PREFIXES[(match["prefix"] or "").lower()]
    return number / 8 if match["unit"] == "bit" else number


class TokenBucket:
    """Limits traffic to `rate_bytes_s` on average. A message may overdraw the bucket; then the next one waits.

    In any t seconds at most rate · (t + burst_s) bytes pass, plus the one message that overdrew.
    """

    def __init__(self, rate_bytes_s: float, burst_s: float = BURST_S) -> None:
        self._rate = rate_bytes_s
        self._most = self._saved = rate_bytes_s * burst_s
        self._at: float | None = None

    def take(self, size_bytes: int, now: float) -> None:
        """Count bytes that are sent or were received. Never refuses: see `wait_s`."""
        self._settle(now)
        self._saved -= size_bytes

    def wait_s(self, now: float) -> float:
        """How long until the bucket is no longer overdrawn; all streams share it."""
        self._settle(now)
        return max(0.0, -self._saved / self._rate)

    def _settle(self, now: float) -> None:
        """Add what was saved since the last call; nothing if the clock was set back."""
        passed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._saved = min(self._most, self._saved + passed_s * self._rate)


def for_answers(upload_bytes_s: float | None, daily_upload: int | None) -> float:
    """Bytes a second that may answer look-ups: half of what the volunteer allows stays for swaps."""
    allowed = [2.0 * ANSWERS_BYTES_S, upload_bytes_s, daily_upload and daily_upload / (60 * DAY_MIN)]
    return min(filter(None, allowed)) / 2


@dataclass(frozen=True, slots=True)
class Used:
    day: str = ""
    """The day in local time, as 2031-12-24."""
    sent: int = 0
    received: int = 0

    def plus(self, sent: int, received: int, day: str) -> "Used":
        """A new day, even an earlier one after the clock was set back, begins at 0."""
        used = self if day == self.day else Used(day)
        return replace(used, sent=max(0, used.sent + sent), received=used.received + received)


@dataclass(frozen=True, slots=True)
class DailyQuota:
    """Bytes that may be sent and received in a day; None: unlimited."""

    sent: int | None = None
    received: int | None = None

    def exhausted(self, used: Used, sent: int = 0, received: int = 0) -> str | None:
        """`upload` or `download` where so much more would exceed the quota, or nothing is left of it."""
        if self.sent is not None and used.sent + max(1, sent) > self.sent:
            return "upload"
        if self.received is not None and used.received + max(1, received) > self.received:
            return "download"
        return None


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of every day, in minutes since midnight; it may include midnight."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """`22-08` or `22:30-8:15`. Raises ValueError that says what is allowed."""
        match = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", text)
        numbers = [int(part or 0) for part in match.groups()] if match else []
        if not numbers or max(numbers[0], numbers[2]) > 24 or max(numbers[1], numbers[3]) > 59:
            raise ValueError("must be hours like 22-08 or 22:30-08:15")
        begin, end = (60 * numbers[0] + numbers[1]) % DAY_MIN, (60 * numbers[2] + numbers[3]) % DAY_MIN
        if begin == end:
            raise ValueError("must be hours like 22-08; leave them out for the whole day")
        return cls(begin, end)

    def open(self, minute: int) -> bool:
        return (minute - self.begin) % DAY_MIN < (self.end - self.begin) % DAY_MIN

    def __str__(self) -> str:
        return f"{clock(self.begin)}-{clock(self.end)}"


DAY_MIN = 24 * 60


def clock(minute: int) -> str:
    """`22:00`."""
    return f"{minute // 60:02}:{minute % 60:02}"


PAUSED, QUOTA = "paused", "quota"
"""Why a node makes no swaps; when PAUSED it does not train either. Counted in `rounds.by_reason`."""


def held_back(*, asked: bool, hours: Hours | None, minute: int, exhausted: bool) -> str | None:
    """PAUSED, QUOTA, or None where the limits allow all. `asked`: by the user's `pause`."""
    if asked or (hours is not None and not hours.open(minute)):
        return PAUSED
    return QUOTA if exhausted else None
