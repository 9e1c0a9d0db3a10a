"""Why a round went solo or a peer is in quarantine: codes in plain words."""

_WORDS = {
    "backing_off": "waiting to call again",
    "partner_diverged": "partner says diverged",
    "quarantined": "quarantined by a peer",
    "all_quarantined": "all peers quarantined",
}
"""Where the code itself does not say it; web/page/words.js has the same."""


def in_words(code: str) -> str:
    return _WORDS.get(code, code.replace("_", " "))
