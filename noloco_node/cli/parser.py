"""What can be typed. Each verb names the function that does it, which is imported only when it is the one."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from noloco_node.base.validation import did_you_mean
from noloco_node.errors import UsageError
from noloco_node.version import PROTOCOL, VERSION

Verb = Callable[[argparse.Namespace], int]

_ABOUT = """\
Volunteers on ordinary internet links train one model together: no coordinator,
no all-reduce, no barrier.

  try it here:      noloco-node swarm
  help a run:       noloco-node join --bootstrap <address>
  make a run:       noloco-node init && noloco-node start run.toml
"""


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see `{self.prog} --help`")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 30, **kwargs})


@dataclass(frozen=True, slots=True)
class _Entry:
    does: str
    """`module:function` inside cli/."""
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    example: str


def parse(args: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """The verb's function and its options. Raises UsageError, with the likely word where one was mistyped."""
    if not args:
        args = ["--help"]
    verb = args[0]
    if verb not in _VERBS and not verb.startswith("-"):
        raise UsageError(f"there is no verb {verb!r}, {did_you_mean(verb, _VERBS)}")
    if verb not in (*_VERBS, "-h", "--help", "--version"):
        raise UsageError(f"the verb comes first, before {verb!r}: see `noloco-node --help`")
    parser, flags = _parser(verb)
    options, unknown = parser.parse_known_args(args)
    if unknown:
        word = unknown[0].partition("=")[0]
        likely = did_you_mean(word, flags()) if word.startswith("-") else f"see `noloco-node {verb} --help`"
        raise UsageError(f"{verb} does not know {word!r}, {likely}")
    module, function = _VERBS[verb].does.split(":")
    return getattr(import_module(f"noloco_node.cli.{module}"), function), options


def _parser(verb: str) -> tuple[argparse.ArgumentParser, Callable[[], list[str]]]:
    """The parser, with the options of `verb` only: the others' would cost time and are not read. And their names."""
    listed = "\n".join(f"  {name:<10} {entry.help}" for name, entry in _VERBS.items())
    parser = _Parser(
        prog="noloco-node",
        usage="noloco-node <verb> [options]",
        description=_ABOUT,
        epilog=f"verbs:\n{listed}\n\n`noloco-node <verb> --help` says more, with an example.",
    )
    parser.add_argument(
        "--version", action="version", version=f"noloco-node {VERSION} (protocol {PROTOCOL})", help="show the version"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, help=argparse.SUPPRESS, parser_class=_Parser)
    made = parser
    if entry := _VERBS.get(verb):
        description, example = f"{entry.help[0].upper()}{entry.help[1:]}.", f"example:\n  {entry.example}"
        made = verbs.add_parser(verb, prog=f"noloco-node {verb}", description=description, epilog=example)
        entry.options(made)
    return parser, lambda: [flag for action in made._actions for flag in action.option_strings]


def _home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", metavar="DIR", help="state directory (default: $NOLOCO_HOME)")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _look(parser: argparse.ArgumentParser) -> None:
    _home(parser)
    _json(parser)


def _rendezvous(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bootstrap", metavar="ADDRESS", action="append", help="a node to meet first; may be repeated, one is enough"
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="where to listen (default: /ip4/0.0.0.0/tcp/0, a free port)"
    )
    parser.add_argument(
        "--announce", metavar="ADDRESS", action="append", help="what to tell others instead: a forwarded port, say"
    )
    parser.add_argument(
        "--relay", metavar="WHEN", help="be called through a relay: auto, only or off (default: auto, where need be)"
    )
    parser.add_argument("--web", metavar="HOST:PORT", help="serve a web page there, as 127.0.0.1:8090 (default: none)")
    parser.add_argument("--log-level", metavar="LEVEL", help="what node.log holds (default: info)")
    parser.add_argument("--log-format", metavar="FORM", help="text, or json: an object a line (default: text)")
    _home(parser)


def _trainer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sinks", metavar="NAMES", help="write curves for tensorboard, wandb or both, with a comma (default: none)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps (default: auto)")
    parser.add_argument("--threads", metavar="N", help="CPU threads for training (default: torch's choice)")
    parser.add_argument("--gpu-memory-fraction", metavar="X", help="share of the GPU's memory to use at most, as 0.5")
    parser.add_argument("--micro-batch", metavar="N", help="examples at once (default: auto, as many as fit on a GPU)")
    parser.add_argument(
        "--compile", action="store_const", const=True, help="let torch compile the model first: faster steps"
    )
    for way, word in (("upload", "sends"), ("download", "takes")):
        parser.add_argument(f"--max-{way}", metavar="RATE", help=f"what it {word} a second at most, as 5MB or 40Mbit")
        parser.add_argument(
            f"--daily-{way}", metavar="AMOUNT", help=f"what it {word} a day, as 20GB; then it trains alone"
        )
    parser.add_argument("--hours", metavar="HH-HH", help="train in these hours only, as 22-08; else it is paused")
    parser.add_argument(
        "--data", metavar="FILES", action="append", help="what to train on, where the run leaves it to you; a pattern"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json that the run asks for")
    parser.add_argument("--rounds", metavar="N", help="stop cleanly after N rounds (default: with the run)")
    parser.add_argument("--linger", metavar="S", help="when done, answer `status` for S seconds more (default: 0)")
    _rendezvous(parser)


def _start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="run.toml", help="what to train; `noloco-node init` writes one")
    _trainer(parser)


def _join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="ID", help="join this run only (default: the only one there is)")
    parser.add_argument("--trust", metavar="PEER_ID", help="join only what this author signed (default: first use)")
    _trainer(parser)


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="?", default="run.toml", help="default: run.toml")
    parser.add_argument("--force", action="store_true", help="replace the file that is there")


def _top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", metavar="S", default="1", help="ask the node every S seconds (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one screen and end; with --json all that it shows")
    _look(parser)


def _visit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bootstrap", metavar="ADDRESS", action="append", help="ask this node's swarm, without a node here"
    )


def _peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sort", metavar="COLUMN", default="together", help="as round, loss, tokens/s, last-seen (default: together)"
    )
    parser.add_argument("--state", metavar="STATE", help="only those, as training or paused")
    parser.add_argument("--name", metavar="TEXT", help="only those with this in their name or id")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C (exit code 130)")
    _visit(parser)
    _look(parser)


def _ping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="PEER", help="its name, or its id or a part of that")
    parser.add_argument("--count", metavar="N", default="3", help="how often (default: 3)")
    _visit(parser)
    _look(parser)


def _wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", metavar="WHAT", dest="goal", required=True, help="training, round=N or finished")
    parser.add_argument("--timeout", metavar="S", help="give up after S seconds (default: wait while the node runs)")
    _look(parser)


def _logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until Ctrl-C")
    parser.add_argument("--lines", metavar="N", default="50", help="how many of the last lines (default: 50)")
    parser.add_argument("--level", metavar="LEVEL", help="let the running node log at debug, info, warning or error")
    _look(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bootstrap", metavar="ADDRESS", action="append", help="a node to reach the swarm by")
    parser.add_argument("--listen", metavar="ADDRESS", help="where the node would listen")
    parser.add_argument("--relay", metavar="WHEN", help="as for join: auto, only or off")
    parser.add_argument("--device", metavar="DEVICE", help="as for join: auto, cpu, cuda ...")
    parser.add_argument("--threads", metavar="N", help="as for join")
    _look(parser)


def _bugreport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="FILE", help="the zip file to make (default: named by the time)")
    _look(parser)


def _simulate(parser: argparse.ArgumentParser) -> None:
    from noloco_node.cli.simulate import options

    options(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    from noloco_node.cli.bench import options

    options(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    from noloco_node.cli.publish import export_options

    export_options(parser)


def _eval(parser: argparse.ArgumentParser) -> None:
    from noloco_node.cli.publish import eval_options

    eval_options(parser)


def _sample(parser: argparse.ArgumentParser) -> None:
    from noloco_node.cli.publish import sample_options

    sample_options(parser)


def _tokenize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", metavar="FILES", nargs="+", help="text, jsonl, parquet or arrow files, a folder of them, or a pattern")
    add("--tokenizer", metavar="FILE", default="bytes", help="a tokenizer.json (default: bytes, each one a token)")
    add("--out", metavar="FILE", required=True, help="the token file to make, as corpus.tokens")
    add("--field", metavar="NAME", default="text", help="where the text stands in a record (default: text)")
    _json(parser)


def _swarm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", metavar="N", default="4", help="how many nodes train (default: 4)")
    parser.add_argument("--rounds", metavar="N", help="rounds of each node (default: 8, or what the manifest says)")
    parser.add_argument("--run", metavar="run.toml", dest="manifest", help="what to train (default: the tiny model)")
    parser.add_argument("--web", metavar="HOST:PORT", help="serve a web page for each node, on ports from this one on")
    parser.add_argument("--keep", metavar="DIR", help="keep the nodes' homes here (default: they are removed)")
    _json(parser)


_VERBS = {
    "init": _Entry("author:init", "write a commented run.toml", _init, "noloco-node init my-run.toml"),
    "start": _Entry(
        "daemon:start",
        "start a run as its first node; prints how others join",
        _start,
        "noloco-node start run.toml --listen /ip4/0.0.0.0/tcp/4001",
    ),
    "join": _Entry(
        "daemon:join",
        "join a run and train with the others until it is done",
        _join,
        "noloco-node join --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
    ),
    "bootstrap": _Entry(
        "daemon:bootstrap",
        "let others find each other here, without training",
        _rendezvous,
        "noloco-node bootstrap --listen /ip4/0.0.0.0/tcp/4001",
    ),
    "status": _Entry("show:status", "show how the node on this machine is", _look, "noloco-node status --json"),
    "peers": _Entry(
        "look:peers",
        "show whom the node on this machine knows, or who is in a swarm",
        _peers,
        "noloco-node peers --state training --sort loss --watch",
    ),
    "top": _Entry(
        "top:top", "watch the node here on a whole screen: p pauses, ? tells the keys", _top, "noloco-node top"
    ),
    "ping": _Entry("look:ping", "measure the way to a peer", _ping, "noloco-node ping brisk-heron --count 5"),
    "wait": _Entry(
        "wait:wait",
        "wait until the node here trains, comes to a round, or is done",
        _wait,
        "noloco-node wait --for round=10 --timeout 600",
    ),
    "logs": _Entry(
        "tail:logs", "show the log of the node here, or change how much it says", _logs, "noloco-node logs -f"
    ),
    "doctor": _Entry(
        "doctor:doctor",
        "look whether this machine is fit to train in a swarm",
        _doctor,
        "noloco-node doctor --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
    ),
    "paths": _Entry("files:paths", "show where everything lies, and its size", _look, "noloco-node paths --json"),
    "bugreport": _Entry(
        "files:bugreport",
        "pack what helps to find a fault, without secrets",
        _bugreport,
        "noloco-node bugreport --to report.zip",
    ),
    "pause": _Entry(
        "show:pause",
        "make the node here train and exchange no more, until `resume`",
        _home,
        "noloco-node pause",
    ),
    "resume": _Entry("show:resume", "make a paused node go on", _home, "noloco-node resume"),
    "leave": _Entry(
        "show:leave", "make the node on this machine leave cleanly, and wait for it", _home, "noloco-node leave"
    ),
    "id": _Entry("show:identity", "show this node's peer id, name and home", _look, "noloco-node id --json"),
    "export": _Entry(
        "publish:export",
        "write what was trained as a Hugging Face folder",
        _export,
        "noloco-node export --to my-model",
    ),
    "eval": _Entry(
        "publish:evaluate", "measure what was trained on held-out data", _eval, "noloco-node eval my-model --json"
    ),
    "sample": _Entry(
        "publish:sample", "let what was trained go on with a text", _sample, 'noloco-node sample "def main():" my-model'
    ),
    "swarm": _Entry(
        "swarm:swarm",
        "train a small model with several real nodes on this machine",
        _swarm,
        "noloco-node swarm --nodes 4 --rounds 8",
    ),
    "tokenize": _Entry(
        "tokenize:tokenize",
        "make a token file of texts, for `--data` of a run",
        _tokenize,
        "noloco-node tokenize 'corpus/*.parquet' --out corpus.tokens",
    ),
    "simulate": _Entry(
        "simulate:run",
        "compare NoLoCo with its rivals: many replicas in one process",
        _simulate,
        "noloco-node simulate --replicas 8 --rounds 12 --json",
    ),
    "bench": _Entry(
        "bench:run", "measure what this machine can do", _bench, "noloco-node bench codec --params 10000000"
    ),
}
