"""The signed manifest of a run: the same bytes on every node.

The author's signature covers the canonical form that run/schema.py defines. Anything another node sends is parsed here
under limits, and only our own errors come out. Imports no torch.
"""

import json
from dataclasses import dataclass
from typing import NoReturn

from pydantic import BaseModel, ValidationError

from noloco_node.base import identity
from noloco_node.base.validation import explain, shown, table_in
from noloco_node.errors import Incompatible, NotAdmitted
from noloco_node.run.schema import Manifest, with_additions

MAX_BYTES = 64 << 10
"""Of a manifest, either form: it is sent to everyone who joins, and parsed before its author is trusted."""

_SIGNING_CONTEXT = b"noloco manifest v1\n"  # so that no signature made for something else counts here


@dataclass(frozen=True, slots=True)
class Signed:
    """A manifest as it is sent."""

    manifest: bytes
    """In canonical form."""
    author: str
    """Peer id of its author."""
    signature: bytes


def sign(manifest: Manifest, author: identity.Identity) -> Signed:
    canonical = manifest.canonical()
    return Signed(canonical, author.peer_id, author.sign(_SIGNING_CONTEXT + canonical))


def verify(signed: Signed) -> Manifest:
    """The manifest, if its author signed these bytes. Whether the author is trusted, the caller decides."""
    if len(signed.manifest) > MAX_BYTES:
        _incompatible(f"it has {len(signed.manifest)} bytes, and {MAX_BYTES} are allowed")
    if not identity.verify(signed.author, _SIGNING_CONTEXT + signed.manifest, signed.signature):
        raise NotAdmitted("the run's manifest does not bear its author's signature: do not join through this address")
    return parse(signed.manifest)


def parse(canonical: bytes) -> Manifest:
    """A manifest from the network, of MAX_BYTES at most. Raises Incompatible, also for bytes not in canonical form:
    another run id."""
    try:
        document = json.loads(canonical.decode())
        _require_known(Manifest, document)
        manifest = Manifest.model_validate(with_additions(Manifest, document))
    except ValidationError as error:
        _incompatible(explain(error, Manifest))
    except (ValueError, RecursionError):
        _incompatible("it is not valid JSON")
    if manifest.canonical() != canonical:
        _incompatible("it is not in canonical form")
    return manifest


def _require_known(table: type[BaseModel], document: object, where: str = "") -> None:
    """An unknown key is no typo here: it comes from a newer version. Asked first: pydantic would find thousands."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if key not in table.model_fields:
            raise Incompatible(
                f"the run was made by a newer version of noloco-node, which knows {shown(where + key)[1:-1]}: "
                "update this one"
            )
        if hasattr(inner := table_in(table.model_fields[key].annotation), "model_fields"):
            _require_known(inner, value, f"{where}{key}.")


def _incompatible(why: str) -> NoReturn:
    raise Incompatible(f"cannot read the run's manifest: {why}. Update noloco-node, or ask the run's author")
