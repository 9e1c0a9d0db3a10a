"""What keys do: keys in, commands out. Keeps what is open, and the last answer and until when it is shown."""

import re
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


_SEQUENCE = re.compile(r"\x1b(\[200~.*?\x1b\[201~|\[(?!200~)[0-?]*[ -/]*[@-~]|O.|[^\[O\x1b])", re.DOTALL)
"""What was pasted, with the marks that the terminal puts around it; an arrow or function key; a key with Alt."""
_BEGUN = re.compile(r"\x1b(\[200~.*|\[[0-?]*[ -/]*|O)?\Z", re.DOTALL)
_COMMANDS = {"p": Command.PAUSE, "r": Command.RESUME, "q": Command.QUIT}


class Keys:
    def __init__(self) -> None:
        self.shows_help = False
        self._asks = False
        self._said: str | None = None
        self._until = 0.0
        self._begun = ""
        """Of a sequence whose end has not arrived."""

    def press(self, keys: str, now: float) -> list[Command]:
        """Keys that arrived together."""
        commands = []
        for key in self._without_sequences(keys):
            if command := self._press(key, now):
                commands.append(command)
            if self._asks:  # by this key: what came with it was typed before the question was shown
                break
        return commands

    def say(self, what: str, now: float) -> None:
        """The answer to an earlier key does not close the question: the key after it would be taken as no answer."""
        if not (self._asks and self.said(now)):
            self._said, self._until = what, now + SAID_S

    def said(self, now: float) -> str | None:
        if now >= self._until:
            self._said, self._asks = None, False
        return self._said

    def _without_sequences(self, keys: str) -> str:
        if self._begun == "\x1b" and keys[:1] not in "[O":  # it was the key Escape
            self._begun = ""
        typed = _SEQUENCE.sub("", self._begun + keys)
        begun = _BEGUN.search(typed)
        if begun is None:
            self._begun = ""
            return typed
        mark, rest = begun[0][:6], begun[0][6:]
        self._begun = mark + rest[-5:]  # of what is pasted these may be the first ones of the mark at its end
        return typed if mark == "\x1b" else typed[: begun.start()]

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
