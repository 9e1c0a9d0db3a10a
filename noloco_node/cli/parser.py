"""The verbs: their help, their options, and the function of each, whose module is imported only when it is called."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from noloco_node.base.validation import did_you_mean, listed, shown, similar
from noloco_node.cli import options
from noloco_node.errors import UsageError
from noloco_node.version import PROTOCOL, VERSION

if TYPE_CHECKING:
    from noloco_node.terminal.completion import Verb

Function = Callable[[argparse.Namespace], int]

_ABOUT = """\
Volunteers on ordinary internet links train one model together: no coordinator,
no all-reduce, no barrier.

  try it here:      noloco-node swarm
  help a run:       noloco-node join <invitation>
  come back to it:  noloco-node join
  make a run:       noloco-node init && noloco-node start run.toml
"""


_NEGATIVE = re.compile(r"-\.?\d")


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})
        self._negative_number_matcher = _NEGATIVE  # `--max-upload -5MB` has a wrong value, and does not lack one

    def format_help(self) -> str:
        self.usage = " ".join([self.prog, *filter(None, map(_in_usage, self._actions)), "[options]"])
        return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own ignores that it cannot be written, as on a full disk."""
        print(message, end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A second word, as after `bench`."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            verb = self.prog.removeprefix("noloco-node ")
            raise UsageError(f"{verb} does not know {value!r}, {did_you_mean(value, action.choices)}")
        super()._check_value(action, value)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """A number that is none, for every option that has `type=int` or `type=float`; and nothing, as of a shell's
        variable that is not set: a path would be the current folder, and anything else as if it were not given."""
        is_value = action.nargs not in {argparse.PARSER, argparse.REMAINDER} and action.dest not in {"text", "sinks"}
        if not arg_string and is_value:  # `sample ''` begins a text, `--sinks ''` is none at all
            name = action.option_strings[-1] if action.option_strings else action.metavar
            is_needed = action.required and action.nargs != argparse.ZERO_OR_MORE
            raise UsageError(f"{name} is empty: name one" + ("" if is_needed else ", or leave it out"))
        with suppress(argparse.ArgumentError):
            value = super()._get_value(action, arg_string)
            if not isinstance(value, float) or math.isfinite(value):
                return value
        kind = "a whole number" if action.type is int else "a number"
        raise UsageError(f"{action.option_strings[-1]} must be {kind}, not {shown(arg_string)}")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 30, **kwargs})

    def _format_action(self, action: argparse.Action) -> str:
        """Second words like verbs, without a line above them that has their placeholder alone."""
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._choices_actions))
        return super()._format_action(action)


_INVITATION = "nn1SckV2vaSQ..."
_INSTEAD = {("swarm", "--home"): "its nodes have homes of their own, which --keep DIR keeps"}
"""Options of other verbs, and what this one has for them."""
_FILES = ("FILE", "FILES", "FOLDER", "PATH", "DIR", "run.toml", "out.png")
"""What values and arguments are called that are names of files or folders."""


@dataclass(frozen=True, slots=True)
class _Verb:
    module: str
    """Of cli/."""
    help: str
    example: str
    """Its words after the verb."""
    function: str = ""
    """Of the module, where it is not called as the verb is."""
    options: Callable[[argparse.ArgumentParser], None] | None = None
    """None: those that have the function's name in options.py."""


def parse(args: Sequence[str]) -> tuple[Function, argparse.Namespace]:
    """The verb's function and its options. Raises UsageError, which suggests a word where one was mistyped."""
    if not args:
        args = ["--help"]
    name = args[0]
    if name not in _VERBS and not name.startswith("-"):
        raise UsageError(f"there is no verb {name!r}, {did_you_mean(name, _VERBS)}")
    if name not in (*_VERBS, "-h", "--help", "--version"):
        raise UsageError(f"the verb comes first, before {name!r}: see `noloco-node --help`")
    parser, made = _parser(name)
    asked, second_words = name, _second_words(made)
    if len(args) > 1 and args[1] in second_words:
        made, asked = second_words[args[1]], f"{name} {args[1]}"
    flags = _flags(made)
    for word in takewhile("--".__ne__, args[1:]):
        flag, has_value, value = word.partition("=")
        is_long = flag.startswith("--") or (flag.startswith("-") and f"-{flag}" in flags)
        if is_long and flag not in flags:  # before its value is taken for something else
            raise UsageError(f"{asked} does not know {flag!r}{_instead(asked, flag, flags)}")
        if flag in flags and has_value and flags[flag].nargs == 0:
            raise UsageError(f"{flag} takes no value, not {shown(value)}: type {listed(flags[flag].option_strings)}")
    given, unknown = parser.parse_known_args(args)
    if unknown:
        raise UsageError(f"{asked} does not know {unknown[0]!r}, see `noloco-node {asked} --help`")
    if (second := getattr(given, "what", None)) and args[1] != second:  # it takes none of the verb's own options
        raise UsageError(f"{second!r} comes first, before {shown(args[1])}: see `noloco-node {name} {second} --help`")
    verb = _VERBS[name]
    return getattr(import_module(f"noloco_node.cli.{verb.module}"), verb.function or name), given


def _instead(verb: str, flag: str, known: Iterable[str]) -> str:
    if told := _INSTEAD.get((verb, flag)):
        return f": {told}"
    words = {each.lstrip("-"): each for each in known}  # the dashes alone would make two of them alike
    close = [words[word] for word in similar(flag.lstrip("-"), words)]
    return f", did you mean {listed(close)}?" if close else f": see `noloco-node {verb} --help`"


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    found = {flag: action for action in parser._actions for flag in action.option_strings}
    for second in _second_words(parser).values():
        found |= _flags(second)
    return found


def _second_words(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def verbs() -> "list[Verb]":
    """All verbs and their options, for the shells' completion."""
    return [_described(name, entry.help, _parser(name)[1]) for name, entry in _VERBS.items()]


def _described(name: str, about: str, parser: argparse.ArgumentParser) -> "Verb":
    from noloco_node.terminal.completion import Option, Verb

    options, files, second = [], False, []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            second = [_described(word, helps[word], made) for word, made in action.choices.items()]
        elif action.option_strings:
            value = None if action.nargs == 0 else str(action.metavar or action.dest)
            options.append(Option(tuple(action.option_strings), action.help or "", value, value in _FILES))
        else:
            files = files or action.metavar in _FILES
    return Verb(name, about, tuple(options), files, tuple(second))


def _parser(name: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, with the options of one verb only, since the others' would cost time; and that verb's own."""
    listed = [
        f"{title}:\n" + "".join(f"  {verb:<10} {_VERBS[verb].help}\n" for verb in group.split())
        for title, group in _GROUPS.items()
    ]
    parser = _Parser(
        prog="noloco-node",
        description=_ABOUT,
        epilog="\n".join([*listed, "`noloco-node <verb> --help` shows its options and an example."]),
    )
    parser.add_argument(
        "--version", action="version", version=f"noloco-node {VERSION} (protocol {PROTOCOL})", help="show the version"
    )
    verbs = parser.add_subparsers(
        prog=parser.prog, dest="verb", metavar="<verb>", required=True, help=argparse.SUPPRESS
    )
    made: argparse.ArgumentParser = parser
    if verb := _VERBS.get(name):
        made = options.verb(verbs, name, verb.help, verb.example)
        (verb.options or getattr(options, verb.function or name))(made)
    return parser, made


def _in_usage(action: argparse.Action) -> str:
    """Required options and positional arguments only; argparse would list every option."""
    if action.option_strings:
        return f"{action.option_strings[-1]} {action.metavar}" if action.required else ""
    words = {"?": "[{}]", "*": "[{}]", "+": "{0} [{0} ...]"}.get(str(action.nargs), "{}" if action.required else "[{}]")
    return words.format(action.metavar)


def _late(module: str) -> Callable[[argparse.ArgumentParser], None]:
    """Options that stand beside their verb, in a module that is imported when they are wanted."""
    return lambda parser: import_module(f"noloco_node.cli.{module}").options(parser)


_VERBS = {
    "init": _Verb("author", "write a run.toml with comments, to edit", "my-run.toml"),
    "check": _Verb(
        "author", "find a run.toml's mistakes, what it costs, what volunteers need", "run.toml --device cuda"
    ),
    "tokenize": _Verb("author", "make a token file from texts, for --data", "'corpus/*.parquet' --out corpus.tokens"),
    "start": _Verb(
        "daemon", "start a run as its first node, and print how others join", "run.toml --listen /ip4/0.0.0.0/tcp/4001"
    ),
    "join": _Verb("daemon", "join a run and train until it is done", _INVITATION),
    "invite": _Verb("author", "make a token for one volunteer of a run that is not open", "12D3KooW..."),
    "revoke": _Verb("author", "take a peer out of a run", "12D3KooW..."),
    "run": _Verb("author", "amend a run: end it, give it more rounds", "amend my-run --rounds 200", function="amend"),
    "bootstrap": _Verb("daemon", "help nodes find each other, without training", "--listen /ip4/0.0.0.0/tcp/4001"),
    "status": _Verb("show", "show what the node does", "--json"),
    "top": _Verb("show", "show the node live on a full screen; ? lists the keys", "--interval 2"),
    "peers": _Verb(
        "peers", "list the peers that the node knows, or those in a swarm", "--state training --sort loss --watch"
    ),
    "ping": _Verb("peers", "measure the round-trip time and the bandwidth to a peer", "brisk-heron --count 5"),
    "wait": _Verb("control", "wait until the node trains, reaches a round, or is done", "--for round=10 --timeout 600"),
    "logs": _Verb("logs", "show the node's log, or change its log level", "-f"),
    "pause": _Verb("control", "pause training and swaps until `resume`", ""),
    "resume": _Verb("control", "continue after `pause`", ""),
    "leave": _Verb("control", "stop the node cleanly, and wait until it has ended", ""),
    "doctor": _Verb("machine", "check whether this machine can train in a swarm", f"--bootstrap {_INVITATION}"),
    "paths": _Verb("machine", "show where the node's files are, and their sizes", "--json"),
    "config": _Verb("machine", "show each setting and where it comes from", "--json", function="settings"),
    "runs": _Verb("machine", "list the runs in the node's home, or remove some", "--remove 3f9a2c"),
    "completion": _Verb("machine", "print a script that completes verbs and options in a shell", "bash"),
    "id": _Verb("show", "show the node's peer id, name and home", "--json", function="identity"),
    "bugreport": _Verb("machine", "write logs and status to a zip file, without secrets", "--to report.zip"),
    "export": _Verb("publish", "write the model as a Hugging Face folder", "--to my-model"),
    "eval": _Verb("publish", "measure the model's loss on held-out data", "my-model --json", function="evaluate"),
    "sample": _Verb("publish", "let the model continue a text", '"def main():" my-model'),
    "swarm": _Verb("swarm", "train a small model with several real nodes on this machine", "--nodes 4 --rounds 8"),
    "simulate": _Verb(
        "simulate",
        "compare NoLoCo with other methods, many replicas in one process",
        "--replicas 8 --rounds 12 --json",
        function="run",
        options=_late("simulate"),
    ),
    "bench": _Verb(
        "bench",
        "measure what a node takes, also beside other systems",
        "codec --quick",
        function="run",
        options=_late("bench"),
    ),
}
_GROUPS = {
    "make or join a run": "init check tokenize start join invite revoke run bootstrap",
    "the node on this machine": "status top peers ping wait logs pause resume leave",
    "this machine": "doctor config runs paths id bugreport completion",
    "the trained model": "export eval sample",
    "try and measure": "swarm simulate bench",
}
