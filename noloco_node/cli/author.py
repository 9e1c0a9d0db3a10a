"""The verbs for the author of a run: `init` writes a run.toml to edit, `check` says what it costs, `tokenize` writes a
token file to share; `invite`, `revoke` and `run amend` sign who may take part and what changes later.
"""

import argparse
import asyncio
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.base.atomic_files import cannot_write, require_known, writing
from noloco_node.base.identity import Identity, is_peer_id
from noloco_node.base.peer_names import name_of
from noloco_node.base.units import count, loss, rate, size, span
from noloco_node.checkpoints import kept_runs
from noloco_node.cli.options import home_of, print_json, show, whole_number
from noloco_node.control import socket_client
from noloco_node.data import pin_commit, sources
from noloco_node.data.documents import Reading
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host import config
from noloco_node.host.home import Home
from noloco_node.run import admission, amendment, invitation, signed_file, toml
from noloco_node.run.amendment import Amendment
from noloco_node.run.schema import Manifest
from noloco_node.run.signed_file import RunFile

if TYPE_CHECKING:
    from noloco_node.data.files import FilesProgress
    from noloco_node.data.tokens import Tokenizer
    from noloco_node.node.check_run import Checked

_SUFFIX = ".tokens"


def init(args: argparse.Namespace) -> int:
    path = Path(args.path)
    try:
        if path.is_dir():
            path /= "run.toml"
        named = re.sub("[^a-z0-9]+", "-", path.stem.lower())[:32].strip("-")
        text = toml.template() if named in {"", "run"} else toml.template(named)
        with path.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(path) from None
    except FileNotFoundError:
        raise UsageError(f"there is no folder {path.parent}: make it first, or name another file") from None
    except OSError as error:
        if not args.force:
            with suppress(OSError):
                path.unlink()  # a part of it, which would be in the way of the next one
        raise cannot_write(path, error, "name another file") from None
    print(f"wrote {path}: edit it, then run `noloco-node start {shlex.quote(str(path))}`")
    return 0


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists already: name another file, or replace it with --force")


def check(args: argparse.Namespace) -> int:
    def say(what: str) -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    settings, run = config.load(config.among(vars(args)), os.environ), toml.load(Path(args.manifest), say)
    if named := toml.weights(Path(args.manifest)):
        settings = replace(settings, weights=Path(named))
    given = sources.Sources(settings.data, settings.tokenizer)
    sources.check(run.data, given)
    for line in sources.unused(run, given):
        print(line, file=sys.stderr)
    run = pin_commit.pinned(run, Home(settings.home))
    from noloco_node.node.check_run import check as check_run

    found = check_run(run, settings, say)
    if args.json:
        print_json(found)
    else:
        _print_checked(run, found)
    return 0


def _print_checked(run: Manifest, found: "Checked") -> None:
    taken, disk, trial, needs = found.memory, found.disk, found.trial, found.needs
    on_device = "" if taken.device is None else f"{size(taken.device)} on {found.device} and "
    in_all = "" if taken.device_taken is None else f"{size(taken.device_taken)} on {found.device} and "
    how = f"{count(trial.steps, 'step')} tried" if trial.steps else "estimated from one micro-batch"
    losses = "" if trial.loss_last is None else f", loss {loss(trial.loss_first)} to {loss(trial.loss_last)}"
    many = found.swaps_per_round
    several = {1: "", "auto": ", as often as the link allows"}.get(many, f", up to {many} times a round")
    lines = {
        "run": f"{found.run}: {found.parameters / 1e6:.3g} M parameters, trained on {found.device}",
        "memory": f"{on_device}{size(taken.host)} here at most; "
        f"this check took {in_all}{size(taken.host_taken)} in all",
        **{f"  {where}": _items(items) for where, items in taken.plan.items() if items},
        "disk": f"{size(disk.needed)} for checkpoints of {size(disk.checkpoint)}; {size(disk.free)} are free",
        "a step": f"{span(trial.step_s)}, {rate(trial.tokens_per_s)} tokens/s ({how}{losses})",
        "a round": f"{span(found.round_s)}; all {count(run.rounds, 'round')} {span(found.run_s)}",
        "a swap": f"sends {size(found.swap)} ({run.outer.codec}) and receives as much{several}",
        "data": needs.data,
        "tokenizer": needs.tokenizer,
        "packages": needs.packages,
    }
    for title, line in lines.items():
        if title == "data":
            print("\na volunteer needs the memory and the disk above, and")
        print(f"{title:<10}  {line}")
    if disk.free is not None and disk.free < disk.checkpoint:
        print("\nwarning: what is trained here cannot be saved. Free some space, or move NOLOCO_HOME")


def _items(items: dict[str, int]) -> str:
    return ", ".join(f"{what} {size(some)}" for what, some in items.items())


def tokenize(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if not out.name.endswith(_SUFFIX):
        raise UsageError(f"--out must end in {_SUFFIX}, by which --data recognises one: try {out.name}{_SUFFIX}")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing trains at the same time, and nothing forks
    from noloco_node.data import files
    from noloco_node.terminal.progress import Progress

    try:
        reading = Reading(args.field, config.text_encoding(args.encoding))
    except ValueError as error:
        raise UsageError(f"--encoding {error}") from None
    paths = sources.find(tuple(args.files))
    if any(path.resolve() == out.resolve() for path in paths):
        raise UsageError(f"--out names {out}, which is one of the files to read: name another")
    with writing(out, "name another file with --out"):  # which may be in a folder of others, or too long a name
        require_known(out)
    if out.exists() and not args.force:
        raise _exists(out)
    tokenizer, name = _tokenizer(args.tokenizer)
    kilobytes = sum(path.stat().st_size for path in paths) // 1000
    with Progress() as bar:

        def say(progress: "FilesProgress") -> None:
            done = round(progress.share * kilobytes)
            bar("tokenizing", done, kilobytes, f"{rate(progress.tokens)} tokens", unit="kB")

        train, held_out = files.tokenize(paths, out, tokenizer, reading, say)
    lines = {"source": "files", "tokenizer": name, "field": args.field}
    found = {"tokens": {"train": train, "held_out": held_out}, "vocabulary": tokenizer.vocabulary}
    return show(
        args,
        {"path": str(out), "bytes": out.stat().st_size, **found, "data": lines},
        f"wrote {out}: {train:,} tokens to train on, {held_out:,} held out. In run.toml:\n\n[data]",
        *(f'{key} = "{value}"' for key, value in lines.items()),
    )


def _tokenizer(given: str) -> "tuple[Tokenizer, str]":
    """The tokenizer, and its name in a manifest."""
    from noloco_node.data import tokens

    if given == "bytes":
        return tokens.BYTES, given
    found = tokens.FileTokenizer(sources.read_tokenizer(Path(given)))
    return found, f"sha256:{found.digest.hex()}"


# ---- of a run that was started ----
def invite(args: argparse.Namespace) -> int:
    with _own_run(args) as (home, file, author):
        peer, expires = _peer(args.peer, author), int(time.time()) + _seconds(args.expires)
        revoked = file.amendment.revoked if file.amendment else ()
        left = tuple(other for other in revoked if other != peer)
        told = peer in revoked and _amend(home, file, author, revoked=left)
    if file.run.membership != "invite":
        if not told:
            raise UsageError(f'{file.run.label} is open to all: only a run with membership = "invite" takes tokens')
        again = f"{name_of(peer)} may take part in it again: {told}"
        return show(args, {"peer_id": peer, "run_id": file.run.run_id}, again)
    token = admission.sign(file.run.run_id, peer, expires, author)
    line = asyncio.run(_join_line(home, file.run.run_id))
    if line is None:  # the addresses are known while the node runs
        words = f"<invitation> --token {invitation.token_word(token)}"
    else:
        words = invitation.write(replace(invitation.read(line.removeprefix(invitation.COMMAND)), token=token))
    command, until = f"{invitation.COMMAND} {words}", time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    found = {"peer_id": peer, "run_id": file.run.run_id, "expires": expires, "token": invitation.token_word(token)}
    lines = [
        f"until {until} this line lets {name_of(peer)}, and nobody else, take part in {file.run.label}:\n\n{command}"
    ]
    if line is None:
        lines.append(
            "\nno node of this run runs here: put the run's invitation there, or type this again while one runs"
        )
    return show(args, {**found, "join": None if line is None else command}, *lines)


def revoke(args: argparse.Namespace) -> int:
    with _own_run(args) as (home, file, author):
        peer = _peer(args.peer, author)
        revoked = {*(file.amendment.revoked if file.amendment else ()), peer}
        told = _amend(home, file, author, revoked=tuple(sorted(revoked)))
    no_more = f"{name_of(peer)} may not take part in it any more: {told}"
    return show(args, {"peer_id": peer, "run_id": file.run.run_id}, no_more)


def amend(args: argparse.Namespace) -> int:
    with _own_run(args) as (home, file, author):
        print(_amend(home, file, author, **_changes(args, file)))
    return 0


def _changes(args: argparse.Namespace, file: RunFile) -> dict[str, object]:
    if args.end_now and args.rounds:
        raise UsageError("--end-now ends the run, and --rounds lets it go on: name one of them")
    changes: dict[str, object] = {"ended": True} if args.end_now else {}
    if args.rounds:
        changes |= {"ended": False, "rounds": whole_number(args.rounds, "--rounds", 10_000_000, file.run.rounds)}
    if args.swaps:
        if file.run.outer.overlap == "blocking":
            raise UsageError('--swaps: a round has one swap where overlap = "blocking"')
        changes["swaps_per_round"] = "auto" if args.swaps == "auto" else whole_number(args.swaps, "--swaps", 16)
    if not changes:
        raise UsageError("name what changes: --end-now, --rounds or --swaps")
    return changes


@contextmanager
def _own_run(args: argparse.Namespace) -> Iterator[tuple[Home, RunFile, Identity]]:
    """A run of this home that its node's key has signed: the one named, else the latest. No other command changes it
    meanwhile. Raises Incompatible where a newer version has amended it."""
    home = home_of(args)
    there = kept_runs.kept(home, None)
    if not there:
        raise UsageError(f"no run was started in {home.root}: name the home of the run's author with --home")
    if args.run is None and len(there) > 1:
        raise UsageError(f"name one of the runs here with --run: {', '.join(run.label for run in there)}")
    folder = home.run((kept_runs.named(home, there, args.run) if args.run else there[0]).run_id)
    author = Identity.load_or_create(home.identity)
    with home.changing():
        file = signed_file.read(folder)
        if file.signed.author != author.peer_id:
            raise UsageError(
                f"only its author, {file.signed.author}, can do this in {file.run.label}: name that node's home with "
                "--home"
            )
        amendment.read(folder, file.run.run_id, author.peer_id)
        yield home, file, author


def _amend(home: Home, file: RunFile, author: Identity, **changes: object) -> str:
    """Writes the next version; the node here, or the next one, reads it and tells the others."""
    run_id, before = file.run.run_id, file.amendment.model_dump() if file.amendment else {"version": 0}
    newer = Amendment.model_validate({**before, **changes, "run": run_id, "version": before["version"] + 1})
    signed = amendment.sign(newer, author)
    if len(signed.document) > amendment.MAX_BYTES:
        raise UsageError(f"{len(newer.revoked)} peers are too many to take out: start another run")
    amendment.write(home.run(run_id), signed)
    who = "the node here" if home.holder() else f"`noloco-node join{home.flag}` here"
    return f"{file.run.label} is {newer.words()}. {who} tells the others"


async def _join_line(home: Home, run_id: str) -> str | None:
    try:
        view = await socket_client.ask(home, socket_client.ControlClient.status)
    except NolocoError:
        return None
    return view.join if view.run_id == run_id else None


def _peer(text: str, author: Identity) -> str:
    if not is_peer_id(text):
        raise UsageError(
            f"{text!r} is not a whole peer id, 12D3KooW...: the volunteer's `noloco-node id` prints it, and "
            "`noloco-node peers --json` those that are there"
        )
    if text == author.peer_id:
        raise UsageError("this is the run's author, who always takes part")
    return text


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,5})([hd])", text)
    if not found or not int(found[1]):
        raise UsageError(f"--expires must be hours or days, as 12h or 30d, not {text!r}")
    return int(found[1]) * {"h": 3600, "d": 86_400}[found[2]]
