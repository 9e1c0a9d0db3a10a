"""The options of the verbs, in groups as `--help` shows them, and how their values are read.

`--help` of any verb imports this file and no verb, so what a reader needs beyond argparse is imported in it.
"""

import argparse
import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.host.home import Home

Options = argparse.ArgumentParser | argparse._ArgumentGroup


# ---- values ----
def home_of(args: argparse.Namespace) -> "Home":
    import os

    from noloco_node.host import config
    from noloco_node.host.home import Home

    return Home(config.home_dir(args.home, os.environ))


def whole_number(text: str, flag: str, most: int, least: int = 1) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise UsageError(f"{flag} must be a whole number from {least} to {most}, not {text!r}")
    return int(text)


def print_json(document: dict[str, Any]) -> None:
    """A view, or anything else that a verb shows, under the schema of all of them."""
    from noloco_node.views.documents import SCHEMA

    print(json.dumps({"schema": SCHEMA, **document}, indent=2))


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
    add_to.add_argument(
        "--home", metavar="DIR", help="the node's directory (default: $NOLOCO_HOME or in ~/.local/state)"
    )


def as_json(add_to: Options) -> None:
    add_to.add_argument("--json", action="store_true", help="print JSON, for programs")


def home_and_json(add_to: Options) -> None:
    home(add_to)
    as_json(add_to)


def _device(add_to: Options, kinds: str) -> None:
    add_to.add_argument("--device", metavar="DEVICE", help=f"{kinds} (default: auto)")
    add_to.add_argument("--threads", metavar="N", help="CPU threads for training (default: torch's choice)")


def _data(add_to: Options) -> None:
    add_to.add_argument(
        "--data", metavar="FILES", action="append", help="the data, if the run leaves it to you; may be a pattern"
    )
    add_to.add_argument(
        "--encoding", metavar="NAME", help="encoding of text and jsonl files, as latin-1 (default: utf-8)"
    )
    add_to.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json that the run asks for")


def _bootstrap(add_to: Options, what_for: str) -> None:
    add_to.add_argument("--bootstrap", metavar="ADDRESS", action="append", help=f"{what_for}; or an invitation")


# ---- make or join a run ----
def init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default="run.toml", help="also names the run (default: run.toml)"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="run.toml", help="the run to check")
    _data(parser.add_argument_group("what to train"))
    _how_to_train(parser)
    home_and_json(parser.add_argument_group("output"))


def tokenize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", metavar="FILES", nargs="+", help="text, jsonl, parquet or arrow files, a folder of them, or a pattern")
    add("--tokenizer", metavar="FILE", default="bytes", help="a tokenizer.json (default: bytes, one token for each)")
    add("--out", metavar="FILE", required=True, help="the token file to write, as corpus.tokens")
    add("--force", action="store_true", help="replace the file if it exists")
    add("--field", metavar="NAME", default="text", help="the field of a record that holds its text (default: text)")
    add(
        "--encoding",
        metavar="NAME",
        default="utf-8",
        help="encoding of text and jsonl files, as latin-1 (default: utf-8)",
    )
    as_json(parser)


def invite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="PEER_ID", help="the volunteer's, as its `noloco-node id` prints it")
    parser.add_argument("--expires", metavar="TIME", default="30d", help="hours or days, as 12h (default: 30d)")
    _of_author(parser)
    as_json(parser)


def revoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="PEER_ID", help="who may take part no longer")
    _of_author(parser)
    as_json(parser)


def run(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(title="what to do", dest="what", metavar="amend", required=True)
    amend = verb(what, "amend", "sign a change that every node follows", "my-run --rounds 200")
    amend.add_argument("run", metavar="RUN", help="its name or id, as `noloco-node runs` prints them")
    amend.add_argument("--end-now", action="store_true", help="end it with the phase under way")
    amend.add_argument("--rounds", metavar="N", help="give it so many rounds, more than it has")
    amend.add_argument("--swaps", metavar="N", help="let a round have up to N swaps, or auto")
    home(amend)


def _of_author(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="ID", help="which run, by its name or id (default: the latest one here)")
    home(parser)


def start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="run.toml", help="what to train; `noloco-node init` writes one")
    _trainer(parser, parser.add_argument_group("what to train"))


def join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "invitation", metavar="INVITATION", nargs="*", help="from the run's author (default: the run of last time)"
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--run", metavar="ID", help="join this run, by its id (default: the only one in the swarm)")
    what.add_argument(
        "--trust", metavar="PEER_ID", help="join only runs signed by this author (default: the first one found)"
    )
    what.add_argument("--token", metavar="TOKEN", help="from the run's author, for a run that is by invitation only")
    what.add_argument("--start-over", action="store_true", help="train it from the start if nobody has its weights")
    _trainer(parser, what)


def bootstrap(parser: argparse.ArgumentParser) -> None:
    _network(parser)
    _output(parser)


def _trainer(parser: argparse.ArgumentParser, what: Options) -> None:
    _data(what)
    what.add_argument("--weights", metavar="FOLDER", help="the run's first weights, if nobody has later ones")
    what.add_argument(
        "--stage",
        metavar="N",
        help="hold this stage and stay there (default: the one of last time, else the one that fewest hold)",
    )
    what.add_argument("--rounds", metavar="N", help="stop cleanly after N rounds (default: when the run ends)")
    _how_to_train(parser)
    _network(parser)
    limits = parser.add_argument_group("limits").add_argument
    limits("--max-upload", metavar="RATE", help="bytes sent per second, as 5MB or 40Mbit (default: no limit)")
    limits("--max-download", metavar="RATE", help="bytes received per second (default: no limit)")
    limits(
        "--daily-upload", metavar="AMOUNT", help="bytes sent a day, as 20GB; then the node trains alone until midnight"
    )
    limits("--daily-download", metavar="AMOUNT", help="bytes received a day; then the node trains alone until midnight")
    limits("--hours", metavar="HH-HH", help="train only in these hours, as 22-08; pause in the others")
    output = _output(parser)
    output.add_argument("--sinks", metavar="NAMES", help="write curves to tensorboard, wandb or tensorboard,wandb")
    output.add_argument("--linger", metavar="S", help="when done, answer `status` for S more seconds (default: 0)")


def _how_to_train(parser: argparse.ArgumentParser) -> None:
    on = parser.add_argument_group("how to train")
    _device(on, "auto, cpu, cuda or cuda:1; cuda:0,cuda:1 or all: several GPUs as one node")
    on.add_argument("--micro-batch", metavar="N", help="examples at once (default: auto, as many as fit on a GPU)")
    on.add_argument("--in-flight", metavar="N", help="micro-batches at other stages at once (default: auto)")
    on.add_argument(
        "--moments", metavar="KIND", help="AdamW's moments: fp32, or 8bit to save GPU memory (default: fp32)"
    )
    on.add_argument("--gpu-memory-fraction", metavar="X", help="use at most this share of the GPU's memory, as 0.5")
    flag = argparse.BooleanOptionalAction
    on.add_argument("--compile", action=flag, help="use torch.compile: slow start, faster steps (default: no)")
    again = "recompute activations: a third more work, less memory (default: as the run says)"
    on.add_argument("--checkpoint-activations", metavar="yes|no", help=again)


def _network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    _bootstrap(group, "a node to contact first; may be repeated, one that answers is enough")
    add = group.add_argument
    add("--listen", metavar="ADDRESS", help="where to listen (default: /ip4/0.0.0.0/tcp/0, a free port)")
    add("--announce", metavar="ADDRESS", action="append", help="publish this address instead, as a forwarded port's")
    add(
        "--relay",
        metavar="WHEN",
        help="auto: use one if needed; only: be called over one alone; off: neither use nor be one (default: auto)",
    )


def _output(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    home(group)
    group.add_argument("--web", metavar="HOST:PORT", help="serve a web page there, as 127.0.0.1:8090 (default: none)")
    group.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    group.add_argument("--log-format", metavar="FORM", help="text, or json: one object per line (default: text)")
    return group


# ---- the node here ----
def top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", metavar="S", default="1", help="ask the node every S seconds (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one screen and end; with --json, all its data")
    home_and_json(parser)


def peers(parser: argparse.ArgumentParser) -> None:
    rows = parser.add_argument_group("which peers")
    rows.add_argument(
        "--sort", metavar="COLUMN", default="together", help="as round, loss, tokens/s, last-seen (default: together)"
    )
    rows.add_argument("--state", metavar="STATE", help="only peers in this state, as training or paused")
    rows.add_argument("--name", metavar="TEXT", help="only peers with this in their name or id")
    _other_swarm(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--watch", action="store_true", help="repeat until Ctrl-C (exit code 130)")
    home_and_json(output)


def ping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="PEER", help="its name, or its id or a part of it")
    parser.add_argument("--count", metavar="N", default="3", help="how many times (default: 3)")
    _other_swarm(parser)
    home_and_json(parser)


def _other_swarm(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    _bootstrap(group, "ask the swarm of this node; no node need run here")


def wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", metavar="WHAT", dest="goal", required=True, help="training, round=N or finished")
    parser.add_argument("--timeout", metavar="S", help="give up after S seconds (default: wait while the node runs)")
    home_and_json(parser)


def logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they come, until Ctrl-C")
    parser.add_argument("--lines", metavar="N", default="50", help="how many of the last lines (default: 50)")
    parser.add_argument("--level", metavar="LEVEL", help="set the running node's: debug, info, warning or error")
    home_and_json(parser)


# ---- this machine ----
def doctor(parser: argparse.ArgumentParser) -> None:
    _bootstrap(parser, "also check whether the swarm can be reached through this node, and this machine from it")
    parser.add_argument("--listen", metavar="ADDRESS", help="where the node would listen")
    parser.add_argument("--relay", metavar="WHEN", help="as for join: auto, only or off")
    parser.add_argument("--device", metavar="DEVICE", help="as for join: auto, cpu, cuda ...")
    parser.add_argument("--threads", metavar="N", help="as for join")
    home_and_json(parser)


def runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", metavar="ID", nargs="+", help="remove these; the first digits of each are enough")
    home_and_json(parser)


def completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")


def bugreport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="FILE", help="the zip file to write (default: named by the time)")
    home_and_json(parser)


# ---- the trained model ----
def export(parser: argparse.ArgumentParser) -> None:
    _weights(parser).add_argument(
        "--average",
        metavar="N or LIST",
        help="export a mean: of this node's weights and the present ones of N peers, which the running node fetches; "
        "or of homes, checkpoints or exported folders of the same run, separated by commas",
    )
    _evaluation(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--to", metavar="DIR", required=True, help="the folder; an earlier export there is replaced")
    as_json(output)


def evaluate(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    _weights(parser)
    _evaluation(parser)
    as_json(parser.add_argument_group("output"))


def sample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="the text to continue")
    _path(parser)
    _weights(parser)
    how = parser.add_argument_group("how to sample").add_argument
    how("--tokens", metavar="N", type=int, default=100, help="tokens to add at most (default: 100)")
    how("--temperature", metavar="X", type=float, default=0.8, help="0: always the most likely (default: 0.8)")
    how("--seed", metavar="N", type=int, default=1, help="the same seed gives the same text (default: 1)")
    _evaluation(parser)
    as_json(parser.add_argument_group("output"))


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="a checkpoint, a home or an exported folder (default: the home)"
    )


def _weights(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("which weights")
    group.add_argument(
        "--run", metavar="ID", help="which run of the home, by its name or id (default: the last one trained)"
    )
    group.add_argument("--checkpoint", metavar="STEP", help="this checkpoint (default: the newest complete one)")
    home(group)
    return group


def _evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and device")
    _data(group)
    _device(group, "auto, cpu or cuda")


# ---- try and measure ----
def swarm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", metavar="N", default="4", help="how many nodes train (default: 4)")
    parser.add_argument(
        "--stages", metavar="N", help="2: cut the tiny model in two stages (default: the whole on each)"
    )
    parser.add_argument("--rounds", metavar="N", help="rounds of each node (default: 16, or the manifest's)")
    parser.add_argument("--run", metavar="run.toml", dest="manifest", help="what to train (default: the tiny model)")
    parser.add_argument("--web", metavar="HOST:PORT", help="a web page for each node, on ports from this one on")
    parser.add_argument("--keep", metavar="DIR", help="keep the nodes' homes here (default: they are deleted)")
    as_json(parser)
