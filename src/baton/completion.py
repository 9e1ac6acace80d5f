"""`baton completion SHELL`: a script that completes commands, flags and their values on TAB.

The command line calls `script` with every command. The script is made from the parsers that print
`--help`, so it knows each setting, its choices and whether it is a path. The shell runs no Python
on TAB.
"""

from collections.abc import Iterator, Mapping

from baton.runtime.fields import Argument, FlagParser

SHELLS = ("bash", "zsh", "fish")
MAX_HELP = 60  # the number of characters that fish shows beside a flag

_BASH = """\
# Completion of `baton` for {shell}, made by `baton completion {shell}`.
_baton_words() {{ COMPREPLY=($(compgen -W "$1" -- "$cur")); }}
_baton_paths() {{
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$cur"))
    compopt -o filenames 2>/dev/null
}}
_baton() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} flag=${{COMP_WORDS[COMP_CWORD-1]}} command=
    # A shell may make a word of the = in --flag=value.
    [[ $flag == "=" ]] && flag=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $cur == "=" ]] && cur=
    COMPREPLY=()
    (( COMP_CWORD > 1 )) && command=${{COMP_WORDS[1]}}
    (( COMP_CWORD > 2 )) && [[ $command == bench ]] && command="bench ${{COMP_WORDS[2]}}"
    case $command in
{cases}
    esac
}}
complete -F _baton baton
"""


def script(shell: str, commands: Mapping[str, FlagParser]) -> str:
    """Return the script for one of `SHELLS`. The name of a command may have two words."""
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    text = _BASH.format(shell=shell, cases="\n".join(_cases(commands)))
    return text if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{text}"


def _cases(commands: Mapping[str, FlagParser]) -> Iterator[str]:
    """Yield the branches of bash's `case`, one per command and one per word that begins some."""
    for begun, words in _begun(commands).items():
        yield f"    {_quoted(begun)}) _baton_words {_quoted(' '.join(words))} ;;"
    for name, parser in commands.items():
        yield f"    {_quoted(name)})"
        yield "        case $flag in"
        for argument in parser.arguments():
            if argument.names and argument.takes_value:
                yield f"        {'|'.join(argument.names)}) {_value(argument)} ;;"
        yield "        esac"
        flags = " ".join(name for argument in parser.arguments() for name in argument.names)
        operand = next((argument for argument in parser.arguments() if not argument.names), None)
        yield f"        if [[ $cur == -* ]]; then _baton_words {_quoted(flags)}"
        yield f"        else {_reply(operand)}; fi ;;"


def _begun(commands: Mapping[str, FlagParser]) -> dict[str, list[str]]:
    """Return the words that may follow each incomplete name of a command."""
    begun: dict[str, list[str]] = {}
    for name in commands:
        words = name.split()
        for at, word in enumerate(words):
            found = begun.setdefault(" ".join(words[:at]), [])
            if word not in found:
                found.append(word)
    return begun


def _value(argument: Argument) -> str:
    """Return the bash code that completes a flag's value. A switch needs no value."""
    if argument.words:
        return f"[[ $cur == -* ]] || {{ {_reply(argument)}; return; }}"
    return f"{_reply(argument)}; return" if argument.is_path else "return"


def _reply(argument: Argument | None) -> str:
    if argument is not None and argument.words:
        return f"_baton_words {_quoted(' '.join(argument.words))}"
    return "_baton_paths" if argument is not None and argument.is_path else ":"


def _fish(commands: Mapping[str, FlagParser]) -> Iterator[str]:
    yield "# Completion of `baton` for fish, made by `baton completion fish`."
    yield "complete -c baton -f"
    for begun, words in _begun(commands).items():
        names = " ".join(words)
        conditions = [_when(begun)] if begun else []
        conditions.append(f"not __fish_seen_subcommand_from {names}")
        yield f"complete -c baton -n {_quoted('; and '.join(conditions))} -a {_quoted(names)}"
    for name, parser in commands.items():
        when = _quoted(_when(name))
        for argument in parser.arguments():
            line = f"complete -c baton -n {when}"
            if not argument.names and not (argument.words or argument.is_path):
                continue
            for flag in argument.names:
                line += f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
            if argument.names and argument.takes_value:
                line += " -r" if argument.is_path else " -x"
            line += " -F" if argument.is_path else ""
            line += f" -a {_quoted(' '.join(argument.words))}" if argument.words else ""
            yield f"{line} -d {_quoted(_short(argument.help))}"


def _when(name: str) -> str:
    """Return fish's condition that the words of a command have been typed."""
    return "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())


def _short(text: str) -> str:
    return text if len(text) <= MAX_HELP else text[: MAX_HELP - 1].rsplit(" ", 1)[0] + "…"


def _quoted(text: str) -> str:
    """Return a word quoted for shells."""
    return "'" + text.replace("\\", "\\\\").replace("'", "'\\''") + "'"
