"""Who may read the web page, and who may change something.

Anyone who can reach the port can read; it listens on loopback unless its owner names another address. A page on another
site must not read it through its visitor's browser, which a name that is made to point here would allow (DNS
rebinding): names other than this machine's own are refused, in `Host` and in `Origin`. Nor may it ask for what it
cannot read, as the live events, of which there are few. Changing something needs the token, which is in a file of the
home that only its user can read.
"""

import re
import secrets
import socket
from http import HTTPStatus
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.addresses import is_ip
from noloco_node.errors import UsageError
from noloco_node.web.http import RefusedRequest, Request

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(?::\d{1,5})?")


def names_here(authority: str) -> bool:
    """Whether `host` or `host:port` is an IP address, or a name of this machine that needs no DNS."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return False
    host = match[1].lower()
    return host in ("localhost", socket.gethostname().lower()) or is_ip(host.strip("[]"))


def check_host(request: Request) -> None:
    host = request.headers.get("host")
    if host is None:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "the request names no host")
    if not names_here(host):
        raise RefusedRequest(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this node answers to an address, to localhost and to this machine's name: open it by one of these",
        )
    if request.headers.get("sec-fetch-site") == "cross-site" and request.headers.get("sec-fetch-mode") != "navigate":
        raise RefusedRequest(HTTPStatus.FORBIDDEN, "a page of another site may link to this one, and no more")


def check_write(request: Request, token: str) -> None:
    """Raises RefusedRequest unless it has the token and comes from this node's page, or from no page at all."""
    origin = request.headers.get("origin")
    if origin is not None and not names_here(re.sub(r"^https?://", "", origin)):
        raise RefusedRequest(HTTPStatus.MISDIRECTED_REQUEST, "a page of another site may not do that")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), token.encode()):
        raise RefusedRequest(
            HTTPStatus.UNAUTHORIZED,
            "this needs the token: open the page with #token= and what is in the file web.token of the node's home",
            {"WWW-Authenticate": "Bearer"},
        )


def token_in(path: Path) -> str:
    """The token in this file, which is made the first time."""
    with atomic_files.writing(path):
        if not path.exists():
            atomic_files.create(path, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
        try:
            with atomic_files.open_file(path) as file:
                path.chmod(0o600)
                found = file.read(256).decode("latin-1").strip()
        except atomic_files.NotAFile:
            found = ""
    if not _TOKEN.fullmatch(found):
        raise UsageError(f"{path} holds no token for the web page: remove it, and the next start makes a new one")
    return found
