"""Packs logs, manifests, status and the latest round events into one zip file, without secrets, to find a fault.

Left out: the identity's key, tokens, invitations, settings, and every value of the environment. Masked everywhere: IP
addresses; host names that appear in an address, a URL or a network error; this machine's name, the user's, and those of
home directories; credentials, which are recognised by the name before them, by their issuer's form, or because they are
long and random. The same host always gets the same mask, so calls can still be followed. Peer ids stay: everybody in
the run knows them. What cannot be recognised stays too, as a bare host name in a sentence or the name of a data file;
so the user should read the report before sending it.
"""

import ipaddress
import json
import os
import re
import socket
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from noloco_node.base.addresses import is_ip
from noloco_node.base.atomic_files import cannot_write, open_file
from noloco_node.errors import UsageError
from noloco_node.host import paths
from noloco_node.host.home import Home, user_dir
from noloco_node.run import signed_file

TAIL_BYTES = 1 << 20
"""Of each log's end: thousands of lines."""
RUNS = 3
"""The latest ones."""

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = rf"{_LABEL}(?:\.{_LABEL})*"
_HOST = re.compile(
    rf"(/dns[46]?/|://(?:[^/@\s\"]+@)?|\blookup (?=\S+(?:: | on ))|\bthe name (?=\S+ is not known))({_NAME})"
)
_HOST_AND_PORT = re.compile(rf"(?<![\w.-])({_NAME}\.[A-Za-z]{{2,}})(?<!\.py)(?<!\.go):\d{{1,5}}(?![\w.])")
_NAMED_BY_IP = re.compile(rf"(?<![\w.-])(?:[A-Za-z][\w-]*-)?\d{{1,3}}(?:-\d{{1,3}}){{3}}(?:\.{_NAME})?(?![\w-])")
_IP4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:)[0-9A-Fa-f:]{2,39}(?:\.\d{1,3}){0,3}(?![\w:])")
_NAMED = r"(?:token|secret|passw(?:or)?d|pwd|passphrase|credentials?|(?:api|access|private|auth|account)[_-]?key)"
_KEY_ID = r"(?:access|api)[_-]?key[_-]?id"
_VALUE = r"(?!(?:null|none|true|false)\b)[^\s\"'\\&,;<>{}\[\]()]+"
_QUOTE = r"\\?[\"']?"
_CREDENTIALS = re.compile(
    "|".join(
        [
            # a key, whole or cut at either end
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)",
            r"(?<![A-Za-z0-9+/=\s\\])[A-Za-z0-9+/=\s\\]+-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----",
            # in a URL, before its host
            r"(?<=://)[^/\s\"]{1,300}(?=@)",
            r"(?<=://)[^/@:\s\"]{0,100}:[^@\s\"]{1,200}(?=@)",
            # a name that says what its value is; a header
            rf"(?i:(?<=[?&]key=|[?&]sig=){_VALUE})",
            rf"(?i:(?P<name>(?:{_NAMED}|{_KEY_ID}){_QUOTE}\s{{0,3}}[:=]\s{{0,3}}{_QUOTE}){_VALUE})",
            rf"(?i:(?P<header>\bauthorization{_QUOTE}\s{{0,3}}[:=]\s{{0,3}}{_QUOTE})(?:[A-Z]{{3,12}} )?[^\s\"'\\,]+)",
            rf"(?i:(?P<cookie>\bcookie{_QUOTE}\s{{0,3}}[:=])[^\n\"]+)",
            r"(?i:(?P<scheme>\b(?:bearer|basic) )[A-Za-z0-9_.~+/=-]{8,})",
            # forms that issuers gave to their keys, so that they are found
            r"\b(?:hf_|sk-|[sr]k_(?:live|test)_|gh[oprsu]_|github_pat_|glpat-|npm_|pypi-|xapp-|xox[a-z]-|ya29\.|SG\.)"
            r"[A-Za-z0-9_.-]{8,}",
            r"\b(?:AKIA|ASIA|ABIA|ACCA|AIDA|AROA)[A-Z0-9]{12,}",
            r"\bAIza[A-Za-z0-9_-]{20,}",
            r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]+",
        ]
    ),
    re.DOTALL,
)
_RANDOM = re.compile(r"(?<![A-Za-z0-9+])(?!12D3KooW)(?=[^\W_]*[a-z])(?=[^\W_]*[A-Z])[A-Za-z0-9+]{24,}={0,2}")
"""Letters of both cases and digits without order, as no word, digest or number has them; a peer id begins like this."""
_DIGIT_RUNS = re.compile(r"\d+")
_HOMES = re.compile(r"(?<![\w.-])(/home/|/Users/|[A-Z]:\\+Users\\+)[^/\\\s\"':;,()<>]+")
_SECRET_NAME = re.compile(
    "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|_KEY$", re.IGNORECASE
)
_EVERYBODY = frozenset({"root", "user", "admin", "ubuntu", "debian", "nobody", "noloco", "node", "localhost"})
"""Names of users and hosts that say nothing of anybody, and are words of this program too."""
_SMALL_BYTES = 64 << 10
_LEAST_LETTERS = 6
"""Of a secret: a shorter one would match parts of many words."""
_LEAST_OF_A_NAME = 3


class Mask:
    def __init__(
        self, secrets: Iterable[str], places: Mapping[str, str], names: Mapping[str, str] | None = None
    ) -> None:
        """`places`: directories, and what replaces them; `names`: the same of the user and of this machine."""
        spelled = {form for s in secrets if len(s) >= _LEAST_LETTERS for form in (s, json.dumps(s)[1:-1], quote(s, ""))}
        self._secrets = sorted(spelled, key=len, reverse=True)
        self._names = {name: shown for name, shown in (names or {}).items() if len(name) >= _LEAST_OF_A_NAME}
        self._places = [
            (re.compile(rf"(?<![\w.-]){re.escape(place)}(?![\w-]|\.\w)"), places[place])
            for place in sorted(places, key=len, reverse=True)
        ]
        self._masks: dict[str, str] = {}

    def learn(self, text: str) -> None:
        """Finds host names in addresses and errors, to mask them everywhere; one without a dot may be any word."""
        found = [host for _, host in _HOST.findall(text)] + _HOST_AND_PORT.findall(text) + _NAMED_BY_IP.findall(text)
        for host in found:
            if "." in host and not is_ip(host):
                self._masks.setdefault(host, f"<host-{len(self._masks) + 1}>")

    def hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "<secret>")
        text = _RANDOM.sub(_unless_a_word, _CREDENTIALS.sub(_secret, text))
        for place, shown in self._places:
            text = place.sub(shown, text)
        text = _HOMES.sub(r"\1<user>", text)
        for host in sorted(self._masks, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", self._masks[host], text)
        for name, shown in self._names.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", shown, text, flags=re.IGNORECASE)
        text = _HOST.sub(lambda form: form[1] + self._bare(form[2]), text)
        return _IP6.sub(self._address, _IP4.sub(self._address, text))

    def _bare(self, host: str) -> str:
        """For a name without a dot, which is masked only where the context shows that it is a host."""
        return host if host == "localhost" or is_ip(host) else "<host>"

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]  # a time of day, a version
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return self._masks.setdefault(str(address), f"<ip-{len(self._masks) + 1}>")


def _secret(found: re.Match[str]) -> str:
    """What names it stays: it shows what was there."""
    return f"{found['name'] or found['header'] or found['cookie'] or found['scheme'] or ''}<secret>"


def _unless_a_word(found: re.Match[str]) -> str:
    return "<secret>" if len(_DIGIT_RUNS.findall(found[0])) > 1 else found[0]


def _names(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's and this machine's, in the forms in which they appear."""
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")} | {user_dir(environ).name}
    hosts = {socket.gethostname(), environ.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    found = {**dict.fromkeys(hosts, "<this-host>"), **dict.fromkeys(users, "<user>")}
    return {name: found[name] for name in sorted(found, key=len, reverse=True) if name.lower() not in _EVERYBODY}


def mask(home: Home, environ: Mapping[str, str]) -> Mask:
    kept = (path for path in paths.files_below(home.root) if path.suffix == ".token")
    tokens = [line.strip() for path in kept for line in _text(path).splitlines()]
    values = [value for name, value in environ.items() if _SECRET_NAME.search(name)]
    known = {home.root: "<home>", user_dir(environ): "~"}
    places = {str(path): shown for place, shown in known.items() for path in (place.resolve(), place)}
    named = {place: shown for place, shown in places.items() if len(place) > 1}
    made = Mask([*tokens, *values], named, _names(environ))
    made.learn(_text(home.root / "node.toml"))
    made.learn(_text(home.remembered))
    made.learn(environ.get("NOLOCO_BOOTSTRAP", ""))
    return made


def files(home: Home) -> dict[str, str]:
    """The ends of the logs, and the manifests, by their names in the report."""
    found = {"node.log": _tail(home.log)}
    for run in paths.runs(home)[:RUNS]:
        for name in (signed_file.NAME, "events.jsonl", "metrics.jsonl"):
            found[f"runs/{run.name[:12]}/{name}"] = _tail(run / name)
    return {name: text for name, text in found.items() if text}


def write(to: Path, contents: Mapping[str, str], masked: Mask) -> None:
    """Readable by this user only. Raises UsageError, DiskFull."""
    for text in contents.values():
        masked.learn(text)
    try:
        descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as pack:
            for name, text in contents.items():
                pack.writestr(name, masked.hide(text))
    except FileExistsError:
        raise UsageError(f"{to} exists already: name another file with --to") from None
    except OSError as error:
        with suppress(OSError):
            to.unlink()
        raise cannot_write(to, error, "name another file with --to") from None


def _tail(path: Path) -> str:
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= TAIL_BYTES else text.partition("\n")[2]


def _text(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read(_SMALL_BYTES).decode(errors="replace")
    except OSError:
        return ""
