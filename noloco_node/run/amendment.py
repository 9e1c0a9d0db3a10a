"""What a run's author changes in it later: one signed document, which each version of it replaces as a whole.

It may end the run, make it longer, let a round have more swaps, and take peers out. The manifest and the run's id stay.
A node keeps the one of the highest version beside the manifest, as `amendment.json`, and never goes back to an older
one. Canonical form, signature and limits are as those of the manifest (run/manifest.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from noloco_node.base import atomic_files, identity
from noloco_node.base.identity import Identity
from noloco_node.errors import Incompatible, NotAdmitted
from noloco_node.run.schema import MAX_ROUNDS, Manifest, Swaps, Table

NAME = "amendment.json"
MAX_BYTES = 32 << 10
"""About five hundred peers that were taken out: 64 of them with their manifests fit into a message."""
MAX_VERSION = 1 << 53
_PEER = r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$"
"""By their letters alone: to decode five hundred takes 10 ms, and anybody may announce a run with its amendment."""

_SIGNING_CONTEXT = b"noloco amendment v1\n"
_LOST = "the node asks its peers for it"


class Amendment(Table):
    run: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The run's id."""
    version: int = Field(ge=1, le=MAX_VERSION)
    ended: bool = False
    rounds: int | None = Field(ge=1, le=MAX_ROUNDS, default=None)
    """Instead of the manifest's, if it is more. The learning rate falls over them from then on."""
    swaps_per_round: Swaps | None = None
    revoked: tuple[Annotated[str, Field(pattern=_PEER)], ...] = Field(default=(), strict=False)
    """Peers that may not take part, in order."""

    @field_validator("revoked")
    @classmethod
    def _peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("must be peer ids, each once and in order")
        return value

    def canonical(self) -> bytes:
        document = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    def words(self) -> str:
        """`amended (2): ended, 200 rounds`, for people."""
        parts = [
            "ended" if self.ended else "",
            f"{self.rounds} rounds" if self.rounds else "",
            f"swaps {self.swaps_per_round}" if self.swaps_per_round else "",
            f"{len(self.revoked)} taken out" if self.revoked else "",
        ]
        return f"amended ({self.version}): {', '.join(filter(None, parts)) or 'as in the manifest'}"


@dataclass(frozen=True, slots=True)
class SignedAmendment:
    """As it is sent. Its author is the run's."""

    document: bytes
    signature: bytes


def sign(amendment: Amendment, author: Identity) -> SignedAmendment:
    document = amendment.canonical()
    return SignedAmendment(document, author.sign(_SIGNING_CONTEXT + document))


def verify(found: SignedAmendment, run_id: str, author: str) -> Amendment:
    """Raises NotAdmitted where the run's author did not sign it, or for another run; Incompatible where this version
    cannot read it."""
    size = len(found.document)
    if size > MAX_BYTES or not identity.verify(author, _SIGNING_CONTEXT + found.document, found.signature):
        raise NotAdmitted("an amendment does not bear the signature of the run's author: it is not followed")
    try:
        document = json.loads(found.document.decode())
        if isinstance(document, dict) and document.get("run", run_id) != run_id:
            raise NotAdmitted("an amendment is of another run: it is not followed")
        amendment = Amendment.model_validate(document)
    except (ValidationError, ValueError, RecursionError):
        raise Incompatible("the run was amended in a way that this version cannot read: update noloco-node") from None
    if amendment.canonical() != found.document:
        raise Incompatible("an amendment is not in canonical form: it is not followed")
    return amendment


def apply(run: Manifest, amendment: Amendment | None) -> Manifest:
    """The run as it was amended; its id stays."""
    return run.amended(amendment.rounds, amendment.swaps_per_round) if amendment else run


def read(folder: Path, run_id: str, author: str) -> tuple[SignedAmendment, Amendment] | None:
    """That of a run's folder; None where there is none. A damaged one is set aside. Raises Incompatible where this
    version cannot read it: it stays, for the version that can."""

    def checked(found: object) -> tuple[SignedAmendment, Amendment]:
        match found:
            case {"amendment": str(document), "signature": str(signature)}:
                signed = SignedAmendment(document.encode(), bytes.fromhex(signature))
                try:
                    return signed, verify(signed, run_id, author)
                except NotAdmitted as error:
                    raise ValueError(str(error)) from None
        raise ValueError("it is not what noloco-node writes")

    return atomic_files.read_json_or_set_aside(folder / NAME, checked, 4 * MAX_BYTES, _LOST)


def write(folder: Path, signed: SignedAmendment) -> None:
    """Raises DiskFull, UsageError."""
    document = {"amendment": signed.document.decode(), "signature": signed.signature.hex()}
    atomic_files.write(folder / NAME, json.dumps(document, indent=1) + "\n")
