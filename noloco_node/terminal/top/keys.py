"""What keys mean: keys in, wishes out. It remembers what is open, and what was said last and until when."""

from enum import Enum, auto

SAID_S = 5.0
"""How long an answer stands at the foot of the screen."""
QUESTION_S = 20.0
LEAVE_QUESTION = "leave the run, so that the node ends? y leaves, any other key stays"
KEYS = (
    ("p", "pause", "train and exchange no more, until `r`"),
    ("r", "resume", "go on"),
    ("l", "leave", "finish the swap, save, say goodbye; the node ends"),
    ("q", "quit", "close this view; the node goes on"),
    ("?", "help", "what keys and marks mean"),
)


class Command(Enum):
    PAUSE = auto()
    RESUME = auto()
    LEAVE = auto()
    QUIT = auto()


_WISHES = {"p": Command.PAUSE, "r": Command.RESUME, "q": Command.QUIT}


class Keys:
    def __init__(self) -> None:
        self.shows_help = False
        self._asks = False
        self._said: str | None = None
        self._until = 0.0

    def press(self, keys: str, now: float) -> list[Command]:
        """What came from the keyboard at once; an escape sequence, an arrow's say, is nobody's wish."""
        if len(keys) > 1 and keys.startswith("\x1b"):
            return []
        return [wish for key in keys if (wish := self._press(key, now))]

    def say(self, what: str, now: float) -> None:
        self._said, self._until, self._asks = what, now + SAID_S, False

    def said(self, now: float) -> str | None:
        if now >= self._until:
            self._said, self._asks = None, False
        return self._said

    def _press(self, key: str, now: float) -> Command | None:
        if self._asks and self.said(now):
            self._said, self._asks = None, False
            return Command.LEAVE if key.lower() == "y" else None
        key = key.lower()
        if key == "l":
            self._said, self._until, self._asks = LEAVE_QUESTION, now + QUESTION_S, True
        elif key in "?h":
            self.shows_help = not self.shows_help
        elif self.shows_help and key in "\x1bq":
            self.shows_help = False
        else:
            return _WISHES.get(key)
        return None
