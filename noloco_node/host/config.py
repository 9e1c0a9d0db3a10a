"""This machine: one frozen NodeConfig, resolved once: flag > environment (`NOLOCO_*`) > node.toml > what was given last
time > default. What was given last time (host/remembered.py) counts for `join`, and its files for the verbs about the
model. `none` stands for the default.

Knows the names of environment variables, and gets the environment as an argument. By hand rather
than with pydantic-settings: importing pydantic takes 0.1 s, as long as all else that `--help` and `status` import, and
the parsers of rates, hours and addresses would remain.
"""

import codecs
import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from noloco_node.base.addresses import ANY_PORT, Address, WrongPeerId, parse
from noloco_node.base.atomic_files import open_file
from noloco_node.base.validation import did_you_mean, listed, shown
from noloco_node.errors import UsageError
from noloco_node.host import limits, remembered
from noloco_node.host.home import Home, home_dir
from noloco_node.host.limits import Hours

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SINKS = TENSORBOARD, WANDB = "tensorboard", "wandb"
MOMENTS = FULL, EIGHT_BIT = "fp32", "8bit"
PREFIX = "NOLOCO_"

log = logging.getLogger(__name__)

_MAX_ADDRESSES = 64  # more than any machine has, or any joining node tries
_MAX_GLOBS = 64
_DEVICES = r"auto|all|mps|cuda|(cpu|cuda:[0-9]{1,2})(,(cpu|cuda:[0-9]{1,2})){0,15}"
_DEVICE_NAMES = "auto, all, cpu, cuda, cuda:<number>, or several GPUs as cuda:0,cuda:1"
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MAX_FILE_BYTES = 64 << 10


def _listen(value: object) -> Address:
    return _address(value, "an address like /ip4/0.0.0.0/tcp/4001 (port 0: any free one)", lambda a: not a.peer)


def _announce(value: object) -> tuple[Address, ...]:
    return _addresses(value, "addresses like /ip4/203.0.113.7/tcp/4001", lambda _: True)


def _bootstrap(value: object) -> tuple[Address, ...]:
    allowed = "addresses like /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…, or an invitation, nn1…"
    return _addresses(value, allowed, lambda address: bool(address.peer and address.port))


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _text(pattern: str, allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not (isinstance(value, str) and re.fullmatch(pattern, value)):
            raise ValueError(f"must be {allowed}")
        return value

    return parse


def _written(parse: Callable[[str], object]) -> Callable[[object], object]:
    return lambda value: parse(_words(value))


def _fraction(value: object) -> float:
    text = _words(value)
    if not re.fullmatch(r"[01]?\.?[0-9]{1,6}", text) or not 0.05 <= float(text) <= 1:
        raise ValueError("must be a share from 0.05 to 1")
    return float(text)


def _words(value: object) -> str:
    """A number may stand in node.toml as one."""
    return "" if isinstance(value, bool) else str(value)


def _micro_batch(value: object) -> int | None:
    try:
        return None if value == "auto" else _whole(1, 1_000_000)(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _switch(value: object) -> bool:
    if (text := str(value).lower()) not in _SWITCH:
        raise ValueError("must be yes or no")
    return _SWITCH[text]


def _globs(value: object) -> tuple[str, ...]:
    """A list, or one text with commas between: spaces belong to names of files."""
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or len(words) > _MAX_GLOBS or not all(map(_is_path, words)):
        raise ValueError(f"must be at most {_MAX_GLOBS} names of files or folders, or patterns like corpus/*.parquet")
    return tuple(dict.fromkeys(words))


def text_encoding(value: object) -> str:
    try:
        TextIOWrapper(BytesIO(), str(value))
        return codecs.lookup(str(value)).name
    except (LookupError, ValueError):
        raise ValueError("must be the name of a text encoding, as latin-1 or utf-16") from None


def _file(value: object) -> Path:
    if not _is_path(value):
        raise ValueError("must be the name of a file")
    return Path(str(value))


def _is_path(value: object) -> bool:
    if not (isinstance(value, str) and 0 < len(value) <= 4096 and value.isprintable()):
        return False
    if os.path.expanduser(value).startswith("~"):  # noqa: PTH111 (pathlib's raises RuntimeError)
        raise ValueError("must be in the home directory of a user that is there", value)
    return True


def _token(value: object) -> bytes:
    from noloco_node.run import invitation  # with cryptography, which `status` can do without

    try:
        return invitation.read_token(str(value))
    except UsageError as error:
        raise ValueError("must be what `noloco-node invite` printed, all of it") from error


def web_address(value: object) -> str:
    text = str(value).replace("localhost:", "127.0.0.1:", 1)
    host, _, port = text.rpartition(":")
    try:
        wrong = ipaddress.ip_address(host.strip("[]")).version == (4 if "[" in host else 6) or int(port) > 65535
    except ValueError:
        wrong = True
    if wrong or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError("must be an address and a port like 127.0.0.1:8090 or [::1]:8090 (port 0: any free one)")
    return text


def _sinks(value: object) -> tuple[str, ...]:
    words = _list(value) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or any(word not in SINKS for word in words):
        raise ValueError(f"must be a list of {listed(SINKS)}")
    return tuple(dict.fromkeys(words))


def _key(parse: Callable[[object], object], **rules: Any) -> Any:
    return field(metadata={"parse": parse}, **rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    home: Path
    """The state directory: identity, checkpoints, control socket."""
    listen: Address = _key(_listen, default=ANY_PORT)  # noqa: RUF009 (it is immutable)
    """The one address that this node listens on; port 0 takes a free one."""
    announce: tuple[Address, ...] = _key(_announce, default=())
    """Addresses to announce instead of the found ones, as behind a forwarded port."""
    relay: str = _key(_text("auto|only|off", "auto, only or off"), default="auto")
    """Whether others connect through a relay: `auto` where nobody can connect directly, `only` always, `off` never. A
    rendezvous and a first node are relays for others, unless `off`."""
    bootstrap: tuple[Address, ...] = _key(_bootstrap, default=())
    """Nodes to connect to first; any one of them is enough."""
    device: str = _key(_text(_DEVICES, _DEVICE_NAMES), default="auto")
    """Where to train. `mps` is known, so that it is said what it lacks (core/device.py). Of several the first is the
    node's own, the others compute shares of its gradients (training/workers.py)."""
    threads: int | None = _key(_whole(1, 1024), default=None)
    """CPU threads for training; torch's own choice when None."""
    gpu_memory_fraction: float | None = _key(_fraction, default=None)
    """Share of a CUDA device's memory that training may take; beyond it, it is out of memory."""
    moments: str = _key(_text("|".join(MOMENTS), listed(MOMENTS)), default=FULL)
    """AdamW's moments: `8bit` takes 6 bytes a parameter less, and is an extra to install."""
    micro_batch: int | None = _key(_micro_batch, default=None)
    """Examples in one forward pass; None (`auto`): as many as fit on a GPU, few on a CPU."""
    compile: bool = _key(_switch, default=False)
    """Whether torch compiles the model's layers first: seconds to a minute at the start, then faster steps."""
    checkpoint_activations: bool | None = _key(_switch, default=None)
    """Whether to compute activations again in the backward pass instead of keeping them; None: as the run says."""
    max_upload: float | None = _key(_written(limits.rate), default=None)
    """Bytes a second that swaps, state transfers and answers to look-ups send: `5MB`, `40Mbit`."""
    max_download: float | None = _key(_written(limits.rate), default=None)
    """Bytes a second that they receive."""
    daily_upload: int | None = _key(_written(limits.amount), default=None)
    """Bytes that they send in a day, `20GB`; after them this node trains without swaps until midnight, local time."""
    daily_download: int | None = _key(_written(limits.amount), default=None)
    """Bytes that they receive in a day."""
    hours: Hours | None = _key(_written(Hours.parse), default=None)  # noqa: RUF009 (it is immutable)
    """Hours of each day to train in, local time, `22-08`; in the others the node is paused."""
    data: tuple[str, ...] = _key(_globs, default=())
    """Files, folders or patterns to train on, for a run whose source is `files`."""
    encoding: str = _key(text_encoding, default="utf-8")
    """Of text files and jsonl among them."""
    tokenizer: Path | None = _key(_file, default=None)  # noqa: RUF009 (it is immutable)
    """The tokenizer.json of a run that names one by its digest."""
    weights: Path | None = _key(_file, default=None)  # noqa: RUF009 (it is immutable)
    """The folder of the weights that the run begins with, where it names some; only who begins it needs them."""
    rounds: int | None = _key(_whole(1, 10_000_000), default=None)
    """Stop after so many rounds of this node; None: at the end of the run."""
    stage: int | None = _key(_whole(1, 64), default=None)
    """The stage to hold of a run that is cut into stages; None: the one of last time, else the thinnest, also
    where another one gets thin later."""
    in_flight: int | None = _key(_micro_batch, default=None)
    """Micro-batches that the first stage has under way at once; None (`auto`): found by trying."""
    linger: int = _key(_whole(0, 30 * 86_400), default=0)
    """Seconds that a finished node keeps its control socket open, unless it is told to leave."""
    run: str | None = _key(
        _text(r"[0-9a-f]{32,64}", "the run's id, 64 hex digits, or its first 32; 12 of a run that this home was in"),
        default=None,
    )
    """Join this run only, by its id or the first half of it."""
    trust: str | None = _key(
        _text(
            r"12D3KooW[1-9A-HJ-NP-Za-km-z]{23,44}", "the peer id of the run's author, or at least its first 31 letters"
        ),
        default=None,
    )
    """Join only what this author signed; by its peer id, or by so many letters of it that nobody can find another."""
    token: bytes | None = _key(_token, default=None)
    """With which the run's author lets this node take part; an invitation may hold it."""
    web: str | None = _key(web_address, default=None)
    """Where to serve the web page and the metrics; None: nowhere. Anyone who can reach the port can read it."""
    log_level: str = _key(_text("|".join(LOG_LEVELS), listed(LOG_LEVELS)), default="info")
    """The least level that goes into node.log."""
    log_format: str = _key(_text("|".join(LOG_FORMATS), listed(LOG_FORMATS)), default="text")
    """Of lines in node.log and in the terminal: `text` for people, `json` (an object a line) for log collectors."""
    sinks: tuple[str, ...] = _key(_sinks, default=())
    """Where to write curves besides the run's own files: `tensorboard`, `wandb`; each is an extra to install."""
    seen: tuple[Address, ...] = ()
    """Peers seen earlier by which it joins, as no bootstrap node answers. No setting: nobody chose them, so they are
    believed less (transport/libp2p.py)."""
    last_port: int = 0
    """Where it listened last, 0 where that is not known. No setting: addresses and invitations of this node stay valid
    where it listens there again, so it does if any port is allowed and this one is free."""
    start_over: bool = False
    """Whether to begin with the run's first weights where nobody has later ones. No setting: it is about one `join`."""
    given: Mapping[str, object] = field(default_factory=dict)
    """Flags and what was remembered, as they were written: what is kept for the next time."""

    @property
    def ways_in(self) -> tuple[Address, ...]:
        return (*self.bootstrap, *self.seen)


_PARSERS: dict[str, Callable[[object], Any]] = {
    f.name: f.metadata["parse"] for f in fields(NodeConfig) if "parse" in f.metadata
}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(NodeConfig)}


def among(words: Mapping[str, object]) -> dict[str, object]:
    """Of a verb's options those that are settings, and the home."""
    return {name: value for name, value in words.items() if name in _PARSERS or name == "home"}


def resolve(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    home_toml: Mapping[str, object],
    kept: Mapping[str, object] | None = None,
) -> NodeConfig:
    """One NodeConfig from all places. `flags` holds None where a flag was not given; `kept`: what is remembered. Raises
    UsageError."""
    given = _invited({key: value for key, value in flags.items() if key != "home" and value is not None})
    named, home_toml = _invited(_named(environ), "NOLOCO_INVITATION: "), _invited(home_toml, "node.toml: ")
    kept = _known(remembered.fitting(kept or {}, {**home_toml, **named, **given}))
    found: dict[str, Any] = {"home": home_dir(flags.get("home"), environ)}
    found |= _remembered({key: value for key, value in kept.items() if key not in {**home_toml, **named, **given}})
    found |= _read(home_toml, str, "node.toml: ")
    found |= _read(named, _variable)
    found |= _read(given, lambda key: f"--{key.replace('_', '-')}")
    return NodeConfig(**found, given={**kept, **given})


def load(flags: Mapping[str, object], environ: Mapping[str, str], *, coming_back: bool = False) -> NodeConfig:
    """`resolve`, with the node.toml of the home that the flags or the environment name. `coming_back`: what it
    remembers counts, too."""
    home = Home(home_dir(flags.get("home"), environ))
    return resolve(flags, environ, read_home_toml(home.root), remembered.read(home) if coming_back else None)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, and where it comes from when `join` is typed alone."""

    name: str
    value: object
    """As node.toml has it: switches, numbers and lists are that also where they came as words; None: none."""
    origin: str


def explained(home: Home, environ: Mapping[str, str]) -> list[Setting]:
    """Raises UsageError where a value cannot be."""
    home_toml, kept = read_home_toml(home.root), remembered.read(home)
    resolve({"home": str(home.root)}, environ, home_toml, kept)
    home_toml, named = _invited(home_toml), _invited(_named(environ))
    kept = remembered.fitting(kept, {**home_toml, **named})
    places: list[tuple[Mapping[str, object], str]]
    places = [(named, "environment"), (home_toml, "node.toml"), (kept, "remembered")]
    found = []
    for f in fields(NodeConfig):
        if f.name in _PARSERS:
            given = ((place[f.name], origin) for place, origin in places if f.name in place)
            written, origin = next(given, ("none", "default"))
            found.append(Setting(f.name, _plain(written, _parsed(f.name, written, "")), origin))
    return found


def _plain(written: object, value: object) -> object:
    """One form for each value, whichever place it came from; `5MB` stays as it was written."""
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if written == "none":
        return str(value) if isinstance(value, Address) else value
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and isinstance(written, str) and re.fullmatch(r"[0-9]*\.?[0-9]+", written):
        return float(written) if "." in written else int(written)
    return written


def _invited(place: Mapping[str, object], where: str = "") -> dict[str, object]:
    """An invitation among the settings of one place, also where a bootstrap address is given, stands for addresses, run
    and author. Another run or author beside it wins; another address is one more to try."""
    rest = {key: value for key, value in place.items() if key != "invitation"}
    more = rest.get("bootstrap") or []
    others = _list(more) if isinstance(more, str) else more if isinstance(more, list) else [more]
    words = [word for word in others if str(word).startswith("nn1")]
    if "invitation" in place:
        words.insert(0, place["invitation"])
    if not words:
        return rest
    from noloco_node.run import invitation  # with cryptography, which `status` can do without

    try:
        found = [invitation.read(str(word)) for word in words]
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    addresses: list[object] = [str(address) for each in found for address in each.addresses]
    addresses += [word for word in others if word not in words]
    tokens = [invitation.token_word(each.token) for each in found if each.token]
    token = {"token": tokens[0]} if tokens else {}
    return {"run": found[0].run, "trust": found[0].author, **token, **rest, "bootstrap": addresses}


def _list(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _variable(key: str) -> str:
    return f"{PREFIX}{key.upper()}"


def read_home_toml(home: Path) -> dict[str, object]:
    path = home / "node.toml"
    try:
        with open_file(path) as file:
            return tomllib.loads(file.read(_MAX_FILE_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        remedy = "Make it a file that this user can read, or name another directory with --home"
        raise UsageError(f"cannot read {path}: {error.strerror}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {str(error).splitlines()[0]}") from None


def _named(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are ours. An empty one counts as not set, as compose files leave them."""
    ours = {key.removeprefix(PREFIX).lower(): value for key, value in environ.items() if key.startswith(PREFIX)}
    return {key: value for key, value in ours.items() if value and key != "home"}


def _read(source: Mapping[str, object], spelled: Callable[[str], str], where: str = "") -> dict[str, object]:
    """The values of one place, checked. `spelled`: how a key is written there."""
    for key in source:
        if key not in _PARSERS:
            names = map(spelled, _PARSERS)
            raise UsageError(f"{where}{shown(spelled(key))[1:-1]} is not known, {did_you_mean(spelled(key), names)}")
    return {key: _parsed(key, value, f"{where}{spelled(key)}") for key, value in source.items()}


def _remembered(kept: Mapping[str, object]) -> dict[str, object]:
    try:
        return _read(kept, str, "remembered.json: ")
    except UsageError as error:
        raise UsageError(f"{error}. Give this setting again, or `none`") from None


def _known(kept: Mapping[str, object]) -> dict[str, object]:
    """What this version knows of what is remembered: a newer one may have written the file, and nobody typed it."""
    if unknown := [key for key in kept if key not in _PARSERS]:
        log.warning(
            "remembered.json: this version does not know %s, and goes on without", ", ".join(map(shown, unknown))
        )
    return {key: value for key, value in kept.items() if key in _PARSERS}


def _parsed(key: str, value: object, where: str) -> object:
    if value in remembered.TAKEN_BACK:
        return _DEFAULTS[key]
    try:
        return _PARSERS[key](value)
    except ValueError as error:
        allowed, *word = error.args  # of a list, the word that is wrong
        raise UsageError(f"{where} {allowed}, not {shown(word[0] if word else value)}") from None


def _address(value: object, allowed: str, fits: Callable[[Address], bool]) -> Address:
    """`fits`: whether an address of a TCP port, without a relay, can be used here."""
    try:
        address = parse(str(value))
    except WrongPeerId:
        raise
    except UsageError:
        raise ValueError(f"must be {allowed}", value) from None
    if address.transport != "tcp" or address.relay or not fits(address):
        raise ValueError(f"must be {allowed}", value)
    return address


def _addresses(value: object, allowed: str, fits: Callable[[Address], bool]) -> tuple[Address, ...]:
    """A list, or in the environment one text with commas or spaces between."""
    words = _list(value) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or len(words) > _MAX_ADDRESSES:
        raise ValueError(f"must be a list of {allowed}")
    return tuple(dict.fromkeys(_address(word, allowed, fits) for word in words))
