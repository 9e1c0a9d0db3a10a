"""What a node has seen of a partner itself: nothing here is hearsay."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    committed: int = 0
    """Swaps that were whole."""
    taken_back: int = 0
    """Corrections of it that were taken back because they made the model worse."""
    refused: int = 0
    """Its calls and swaps that were refused for what it sent."""
    failed: int = 0
    """Swaps that broke."""
    quarantined_s: float = 0.0
    """For so long it is neither called nor accepted."""
    why: str = ""
    """Of the quarantine: a short code."""
