"""What keys do: keys in, commands out. Keeps what is open, and the last answer and until when it is shown."""

from enum import Enum, auto

SAID_S = 5.0
"""How long an answer is shown."""
QUESTION_S = 20.0
LEAVE_QUESTION = "leave the run and end the node? y leaves, any other key stays"
KEYS = (
    ("p", "pause", "pause training and swaps until `r`"),
    ("r", "resume", "continue"),
    ("l", "leave", "finish the swap, save, and end the node"),
    ("q", "quit", "close this view; the node continues"),
    ("?", "help", "explain keys and marks"),
)


class Command(Enum):
    PAUSE = auto()
    RESUME = auto()
    LEAVE = auto()
    QUIT = auto()


_COMMANDS = {"p": Command.PAUSE, "r": Command.RESUME, "q": Command.QUIT}


class Keys:
    def __init__(self) -> None:
        self.shows_help = False
        self._asks = False
        self._said: str | None = None
        self._until = 0.0

    def press(self, keys: str, now: float) -> list[Command]:
        """Keys that arrived together; an escape sequence, as an arrow key sends it, is no command."""
        if len(keys) > 1 and keys.startswith("\x1b"):
            return []
        return [command for key in keys if (command := self._press(key, now))]

    def say(self, what: str, now: float) -> None:
        """The answer to an earlier key does not close the question: the key after it would be taken as no answer."""
        if not (self._asks and self.said(now)):
            self._said, self._until = what, now + SAID_S

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
            return _COMMANDS.get(key)
        return None
