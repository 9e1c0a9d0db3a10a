"""Why a round went solo or a peer is in quarantine: codes in plain words."""

_WORDS = {
    "backing_off": "waiting to call again",
    "partner_diverged": "partner says diverged",
}
"""Where the code itself does not say it; web/page/words.js has the same."""


def in_words(code: str) -> str:
    return _WORDS.get(code, code.replace("_", " "))
