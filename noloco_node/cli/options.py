"""The options of the verbs, in groups as `--help` shows them, and how their values are read.

`--help` of any verb imports this file and no verb, so what a reader needs beyond argparse is imported in it.
"""

import argparse
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from noloco_node.base.validation import shown
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.host.home import Home

T = TypeVar("T")

Options = argparse.ArgumentParser | argparse._ArgumentGroup


# ---- values ----
def home_of(args: argparse.Namespace) -> "Home":
    """Raises UsageError where it is not this user's, or cannot be."""
    from noloco_node.host.home import Home, home_dir

    home = Home(home_dir(args.home, os.environ))
    try:
        home.socket.lstat()
    except PermissionError:
        raise home.not_ours() from None
    except NotADirectoryError:
        raise UsageError(f"{home.root} is no directory: name another home with --home or NOLOCO_HOME") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            named = shown(str(home.root))
            raise UsageError(f"{named} is too long for a home: name another with --home or NOLOCO_HOME") from None
    return home


def whole_number(text: str, flag: str, most: int, least: int = 1) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        allowed = f"a whole number from {least} to {most}" if least < most else str(most)
        raise UsageError(f"{flag} must be {allowed}, not {text!r}")
    return int(text)


def seconds(text: str, flag: str, least: float, most: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise UsageError(f"{flag} must be a number of seconds from {least:g} to {most:.9g}, not {text!r}")
    return found


def print_json(found: Any) -> None:
    """A view, or anything else that a verb shows, under the schema of all of them."""
    from noloco_node.views.documents import SCHEMA, plain

    print(json.dumps({"schema": SCHEMA, **plain(found)}, indent=2))


def gathered(found: Iterable[T], show: Callable[[list[T]], None]) -> list[T]:
    """All that is found, shown. Where one fails, or the user interrupts it, those before are: hours may be behind
    them."""
    there: list[T] = []
    try:
        for each in found:
            there.append(each)  # one by one, as the next may fail
    except BaseException:
        if there:
            show(there)
        raise
    show(there)
    return there


def show(args: argparse.Namespace, document: dict[str, Any], *lines: str) -> int:
    """The document with --json, else the lines. Returns the verb's exit code."""
    if args.json:
        print_json(document)
    else:
        print("\n".join(lines))
    return 0


def option(add_to: Options, words: str, about: str, **more: Any) -> None:
    """`words`: `--home DIR`, `-f --follow`, or `path PATH` for an argument: how it is called, and then its value, in
    `--help`. One without a value is a switch."""
    called = words.split()
    names = [word for word in called if word.startswith("-")] or called[:1]
    if value := " ".join(called[len(names) :]):
        more["metavar"] = value
    else:
        more.setdefault("action", "store_true")
    add_to.add_argument(*names, help=about, **more)


# ---- verbs ----
Verbs: TypeAlias = "argparse._SubParsersAction[Any]"


def verb(among: Verbs, name: str, about: str, example: str, description: str = "") -> argparse.ArgumentParser:
    """A verb, or a word after one, as `bench codec`. `example`: the words after it."""
    made: argparse.ArgumentParser = among.add_parser(
        name, help=about, description=description or f"{about[0].upper()}{about[1:]}."
    )
    made.epilog = f"example:\n  {made.prog} {example}".rstrip()
    return made


# ---- options of several verbs ----
def home(add_to: Options) -> None:
    option(add_to, "--home DIR", "the node's directory (default: $NOLOCO_HOME or in ~/.local/state)")


def as_json(add_to: Options) -> None:
    option(add_to, "--json", "print JSON, for programs")


def home_and_json(add_to: Options) -> None:
    home(add_to)
    as_json(add_to)


pause = resume = leave = home
status = paths = settings = identity = home_and_json


def _device(add_to: Options, kinds: str) -> None:
    option(add_to, "--device DEVICE", f"{kinds} (default: auto)")
    option(add_to, "--threads N", "CPU threads for training (default: torch's choice)")


def _data(add_to: Options) -> None:
    option(add_to, "--data FILES", "the data, if the run leaves it to you; may be a pattern", action="append")
    option(add_to, "--encoding NAME", "encoding of text and jsonl files, as latin-1 (default: utf-8)")
    option(add_to, "--tokenizer FILE", "the tokenizer.json that the run asks for")


def _bootstrap(add_to: Options, what_for: str) -> None:
    option(add_to, "--bootstrap ADDRESS", f"{what_for}; or an invitation", action="append")


# ---- make or join a run ----
def init(parser: argparse.ArgumentParser) -> None:
    option(parser, "path PATH", "also names the run (default: run.toml)", nargs="?", default="run.toml")
    option(parser, "--force", "replace the file if it exists")


def check(parser: argparse.ArgumentParser) -> None:
    option(parser, "manifest run.toml", "the run to check")
    _data(parser.add_argument_group("what to train"))
    _how_to_train(parser)
    home_and_json(parser.add_argument_group("output"))


def tokenize(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    add("files FILES", "text, jsonl, parquet or arrow files, a folder of them, or a pattern", nargs="+")
    add("--tokenizer FILE", "a tokenizer.json (default: bytes, one token for each)", default="bytes")
    add("--out FILE", "the token file to write, as corpus.tokens", required=True)
    add("--force", "replace the file if it exists")
    add("--field NAME", "the field of a record that holds its text (default: text)", default="text")
    add("--encoding NAME", "encoding of text and jsonl files, as latin-1 (default: utf-8)", default="utf-8")
    as_json(parser)


def invite(parser: argparse.ArgumentParser) -> None:
    option(parser, "peer PEER_ID", "the volunteer's, as its `noloco-node id` prints it")
    option(parser, "--expires TIME", "hours or days, as 12h (default: 30d)", default="30d")
    _of_author(parser)
    as_json(parser)


def revoke(parser: argparse.ArgumentParser) -> None:
    option(parser, "peer PEER_ID", "who may take part no longer")
    _of_author(parser)
    as_json(parser)


def amend(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(title="what to do", dest="what", metavar="amend", required=True)
    made = verb(what, "amend", "sign a change that every node follows", "my-run --rounds 200")
    option(made, "run RUN", "its name or id, as `noloco-node runs` prints them")
    option(made, "--end-now", "end it with the phase under way")
    option(made, "--rounds N", "give it so many rounds, more than it has")
    option(made, "--swaps N", "let a round have up to N swaps, or auto")
    home(made)


def _of_author(parser: argparse.ArgumentParser) -> None:
    option(parser, "--run ID", "which run, by its name or id (default: the latest one here)")
    home(parser)


def start(parser: argparse.ArgumentParser) -> None:
    option(parser, "manifest run.toml", "what to train; `noloco-node init` writes one")
    _trainer(parser, parser.add_argument_group("what to train"))


def join(parser: argparse.ArgumentParser) -> None:
    option(parser, "invitation INVITATION", "from the run's author (default: the run of last time)", nargs="*")
    what = parser.add_argument_group("what to train")
    option(what, "--run ID", "join this run, by its id (default: the only one in the swarm)")
    option(what, "--trust PEER_ID", "join only runs signed by this author (default: the first one found)")
    option(what, "--token TOKEN", "from the run's author, for a run that is by invitation only")
    option(what, "--start-over", "train it from the start if nobody has its weights")
    _trainer(parser, what)


def bootstrap(parser: argparse.ArgumentParser) -> None:
    _network(parser)
    _output(parser)


def _trainer(parser: argparse.ArgumentParser, what: Options) -> None:
    _data(what)
    option(what, "--weights FOLDER", "the run's first weights, if nobody has later ones")
    option(
        what,
        "--stage N",
        "hold this stage and stay there (default: the one of last time, else the one that fewest hold)",
    )
    option(what, "--rounds N", "stop cleanly after N rounds (default: when the run ends)")
    _how_to_train(parser)
    _network(parser)
    limits = partial(option, parser.add_argument_group("limits"))
    limits("--max-upload RATE", "bytes sent per second, as 5MB or 40Mbit (default: no limit)")
    limits("--max-download RATE", "bytes received per second (default: no limit)")
    limits("--daily-upload AMOUNT", "bytes sent a day, as 20GB; then the node trains alone until midnight")
    limits("--daily-download AMOUNT", "bytes received a day; then the node trains alone until midnight")
    limits("--hours HH-HH", "train only in these hours, as 22-08; pause in the others")
    output = _output(parser)
    option(output, "--sinks NAMES", "write curves to tensorboard, wandb or tensorboard,wandb")
    option(output, "--linger S", "when done, answer `status` for S more seconds (default: 0)")


def _how_to_train(parser: argparse.ArgumentParser) -> None:
    on = parser.add_argument_group("how to train")
    _device(on, "auto, cpu, cuda or cuda:1; cuda:0,cuda:1 or all: several GPUs as one node")
    option(on, "--micro-batch N", "examples at once (default: auto, as many as fit on a GPU)")
    option(on, "--in-flight N", "micro-batches at other stages at once (default: auto)")
    option(on, "--moments KIND", "AdamW's moments: fp32, or 8bit to save GPU memory (default: fp32)")
    option(on, "--gpu-memory-fraction X", "use at most this share of the GPU's memory, as 0.5")
    flag = argparse.BooleanOptionalAction
    option(on, "--compile", "use torch.compile: slow start, faster steps (default: no)", action=flag)
    again = "recompute activations: a third more work, less memory (default: as the run says)"
    option(on, "--checkpoint-activations yes|no", again)


def _network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    _bootstrap(group, "a node to contact first; may be repeated, one that answers is enough")
    add = partial(option, group)
    add("--listen ADDRESS", "where to listen (default: /ip4/0.0.0.0/tcp/0, a free port)")
    add("--announce ADDRESS", "publish this address instead, as a forwarded port's", action="append")
    add(
        "--relay WHEN",
        "auto: use one if needed; only: be called over one alone; off: neither use nor be one (default: auto)",
    )


def _output(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    home(group)
    option(group, "--web HOST:PORT", "serve a web page there, as 127.0.0.1:8090 (default: none)")
    option(group, "--log-level LEVEL", "debug, info, warning or error (default: info)")
    option(group, "--log-format FORM", "text, or json: one object per line (default: text)")
    return group


# ---- the node here ----
def top(parser: argparse.ArgumentParser) -> None:
    option(parser, "--interval S", "ask the node every S seconds (default: 1)", default="1")
    option(parser, "--once", "print one screen and end; with --json, all its data")
    home_and_json(parser)


def peers(parser: argparse.ArgumentParser) -> None:
    rows = parser.add_argument_group("which peers")
    option(rows, "--sort COLUMN", "as round, loss, tokens/s, last-seen (default: together)", default="together")
    option(rows, "--state STATE", "only peers in this state, as training or paused")
    option(rows, "--name TEXT", "only peers with this in their name or id")
    _other_swarm(parser)
    lag = "lag: rounds behind this node when that peer was last seen, as its round;"
    output = parser.add_argument_group("output", f"{lag}\nwith --bootstrap behind the middle one of those that train")
    option(output, "--watch", "repeat until Ctrl-C (exit code 130)")
    home_and_json(output)


def ping(parser: argparse.ArgumentParser) -> None:
    option(parser, "peer PEER", "its name, or its id or a part of it")
    option(parser, "--count N", "how many times (default: 3)", default="3")
    _other_swarm(parser)
    home_and_json(parser)


def _other_swarm(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    _bootstrap(group, "ask the swarm of this node; no node need run here")


def wait(parser: argparse.ArgumentParser) -> None:
    option(parser, "--for WHAT", "training, round=N or finished", dest="goal", required=True)
    option(parser, "--timeout S", "give up after S seconds (default: wait while the node runs)")
    home_and_json(parser)


def logs(parser: argparse.ArgumentParser) -> None:
    option(parser, "-f --follow", "print new lines as they come, until Ctrl-C")
    option(parser, "--lines N", "how many of the last lines (default: 50)", default="50")
    option(parser, "--level LEVEL", "set the running node's: debug, info, warning or error")
    home_and_json(parser)


# ---- this machine ----
def doctor(parser: argparse.ArgumentParser) -> None:
    _bootstrap(parser, "also check whether the swarm can be reached through this node, and this machine from it")
    option(parser, "--listen ADDRESS", "where the node would listen")
    option(parser, "--relay WHEN", "as for join: auto, only or off")
    option(parser, "--device DEVICE", "as for join: auto, cpu, cuda ...")
    option(parser, "--threads N", "as for join")
    home_and_json(parser)


def runs(parser: argparse.ArgumentParser) -> None:
    option(parser, "--remove ID", "remove these; four digits or more of each are enough", nargs="+")
    home_and_json(parser)


def completion(parser: argparse.ArgumentParser) -> None:
    option(parser, "shell SHELL", "bash, zsh or fish")


def bugreport(parser: argparse.ArgumentParser) -> None:
    option(parser, "--to FILE", "the zip file to write (default: named by the time)")
    home_and_json(parser)


# ---- the trained model ----
def export(parser: argparse.ArgumentParser) -> None:
    option(
        _weights(parser),
        "--average N or LIST",
        "export a mean: of this node's weights and the present ones of N peers, which the running node fetches; "
        "or of homes, checkpoints or exported folders of the same run, separated by commas",
    )
    _evaluation(parser)
    output = parser.add_argument_group("output")
    option(output, "--to DIR", "the folder; an earlier export there is replaced", required=True)
    as_json(output)


def evaluate(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    _weights(parser)
    _evaluation(parser)
    as_json(parser.add_argument_group("output"))


def sample(parser: argparse.ArgumentParser) -> None:
    option(parser, "text TEXT", "the text to continue")
    _path(parser)
    _weights(parser)
    how = partial(option, parser.add_argument_group("how to sample"))
    how("--tokens N", "tokens to add at most (default: 100)", type=int, default=100)
    how("--temperature X", "0: always the most likely (default: 0.8)", type=float, default=0.8)
    how("--seed N", "the same seed gives the same text (default: 1)", type=int, default=1)
    _evaluation(parser)
    as_json(parser.add_argument_group("output"))


def _path(parser: argparse.ArgumentParser) -> None:
    option(parser, "path PATH", "a checkpoint, a home or an exported folder (default: the home)", nargs="?")


def _weights(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("which weights")
    option(group, "--run ID", "which run of the home, by its name or id (default: the last one trained)")
    option(group, "--checkpoint STEP", "this checkpoint (default: the newest complete one)")
    home(group)
    return group


def _evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and device")
    _data(group)
    _device(group, "auto, cpu or cuda")


# ---- try and measure ----
def swarm(parser: argparse.ArgumentParser) -> None:
    option(parser, "--nodes N", "how many nodes train (default: 4)", default="4")
    option(parser, "--stages N", "2: cut the tiny model in two stages (default: the whole on each)")
    option(parser, "--rounds N", "rounds of each node (default: 16, or the manifest's)")
    option(parser, "--run run.toml", "what to train (default: the tiny model)", dest="manifest")
    option(parser, "--web HOST:PORT", "a web page for each node, on ports from this one on")
    option(parser, "--keep DIR", "keep the nodes' homes in this empty folder (default: they are deleted)")
    as_json(parser)
