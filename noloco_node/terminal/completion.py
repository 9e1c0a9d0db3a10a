"""Scripts with which bash, zsh and fish complete verbs and options: plain text, made of the verbs that they are given.

Nothing of noloco-node runs while a shell completes. After an option that takes a file, and for arguments that are
files, the shell completes file names.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    flags: tuple[str, ...]
    help: str
    value: str | None
    """What its value is called; None where it takes none."""
    is_file: bool


@dataclass(frozen=True, slots=True)
class Verb:
    name: str
    help: str
    options: tuple[Option, ...]
    takes_files: bool
    """Whether its arguments are files."""
    verbs: tuple["Verb", ...] = ()
    """Of a verb that is followed by another word, as `bench codec`."""


def script(shell: str, verbs: Sequence[Verb]) -> str:
    """`shell`: one of SHELLS."""
    return "".join(f"{line}\n" for line in SHELLS[shell](verbs))


def _with_second_words(verbs: Sequence[Verb]) -> Iterator[tuple[str, Verb]]:
    for verb in verbs:
        yield verb.name, verb
        for second in verb.verbs:
            yield f"{verb.name} {second.name}", second


def _words(verb: Verb) -> str:
    return " ".join([*(second.name for second in verb.verbs), *(flag for o in verb.options for flag in o.flags)])


def _with_value(verb: Verb, *, is_file: bool) -> str:
    return " ".join(f for o in verb.options if o.value is not None and o.is_file == is_file for f in o.flags)


def _bash(verbs: Sequence[Verb]) -> Iterator[str]:
    several = "|".join(verb.name for verb in verbs if verb.verbs)
    yield "# Completion of noloco-node in bash:   source <(noloco-node completion bash)"
    yield "_noloco_node() {"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} second=${COMP_WORDS[2]}"
    yield "    local verb='' words='' files='' of_files='' of_others=''"
    yield "    (( COMP_CWORD > 1 )) && verb=${COMP_WORDS[1]}"
    yield f'    (( COMP_CWORD > 2 )) && [[ $verb == @({several}) && $second != -* ]] && verb+=" $second"'
    yield "    case $verb in"
    yield f"        '') words='{' '.join(verb.name for verb in verbs)} --help --version' ;;"
    for name, verb in _with_second_words(verbs):
        yield f"        '{name}') words='{_words(verb)}'{' files=1' if verb.takes_files else ''}"
        of_files, of_others = (_with_value(verb, is_file=is_file) for is_file in (True, False))
        yield f"            of_files=' {of_files} ' of_others=' {of_others} ' ;;"
    yield "    esac"
    yield '    [[ $of_files == *" $before "* ]] && return'
    yield '    [[ $of_others == *" $before "* ]] && { compopt +o default; return; }'
    yield '    [[ -n $files && $current != -* ]] || COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _noloco_node noloco-node"


def _zsh(verbs: Sequence[Verb]) -> Iterator[str]:
    yield "#compdef noloco-node"
    yield "# Completion of noloco-node in zsh:   source <(noloco-node completion zsh)"
    yield "_noloco_node() {"
    yield f"    local -a verbs=({' '.join(map(_described, verbs))})"
    yield "    if (( CURRENT == 2 )); then _describe verb verbs; return; fi"
    yield "    local verb=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    for verb in verbs:
        if verb.verbs:
            yield f"    if [[ $verb == {verb.name} ]]; then"
            yield f"        verbs=({' '.join(map(_described, verb.verbs))})"
            yield "        if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then _describe verb verbs; return; fi"
            yield '        if [[ $words[2] != -* ]]; then verb+=" $words[2]"; shift words; (( CURRENT-- )); fi'
            yield "    fi"
    yield "    case $verb in"
    for name, verb in _with_second_words(verbs):
        files = ["'*:file:_files'"] if verb.takes_files else []
        yield f"        '{name}') _arguments {' '.join([*map(_argument, verb.options), *files])} ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ $funcstack[1] == _noloco* ]]; then _noloco_node "$@"; else compdef _noloco_node noloco-node; fi'


def _described(verb: Verb) -> str:
    return _quoted(f"{verb.name}:{verb.help}")


def _argument(option: Option) -> str:
    about = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    value = "" if option.value is None else f":{option.value.replace(':', ' ')}:{'_files' if option.is_file else ' '}"
    return " ".join(_quoted(f"*{flag}[{about}]{value}") for flag in option.flags)


def _fish(verbs: Sequence[Verb]) -> Iterator[str]:
    say = "complete -c noloco-node"
    yield "# Completion of noloco-node in fish:   noloco-node completion fish | source"
    yield f"{say} -f"
    for verb in verbs:
        yield f"{say} -n __fish_use_subcommand -a {verb.name} -d {_in_fish(verb.help)}"
        for second in verb.verbs:
            yield f"{say} -n '__fish_seen_subcommand_from {verb.name}' -a {second.name} -d {_in_fish(second.help)}"
    for name, verb in _with_second_words(verbs):
        where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        if verb.takes_files:
            yield f"{say} -n '{where}' -F"
        for option in verb.options:
            flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags)
            takes = "" if option.value is None else " -r -F" if option.is_file else " -x"
            yield f"{say} -n '{where}' {flags}{takes} -d {_in_fish(option.help)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _in_fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[Sequence[Verb]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
