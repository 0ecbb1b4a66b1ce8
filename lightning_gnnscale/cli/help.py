"""What may be said: `gnnscale COMMAND --help`, each setting of a group described, and the completions of a shell."""

import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from .commands import ACTIONS, COMMANDS, TAKES, Command, benches, locate
from .compose import choices_of, key_of
from .errors import UsageError, did_you_mean
from .recipes import available_recipes
from .settings import UNSET, Place, as_word, described, options_of_method, walk

_WIDTH = 116


def print_help(command: Command, topic: str = "") -> None:
    """Print the help of a command line, with the settings of the choices that it makes.

    topic: A group of settings, or a prefix of keys: "model", "strategy/exchange", "model.backbone"; "": short.
    """
    config = command.compose()
    what = " ".join([command.name, *([command.primary.partition("/")[2]] if command.name == "bench" else [])])
    choices, places = choices_of(config), list(walk(config))
    if topic:
        _print_topic(topic, choices, places)
        return
    print(f"gnnscale {what}: {COMMANDS[command.name]}\n")
    recipe = "" if command.name in ("stores", "report", "doctor") else "[recipe=NAME | recipe=FILE.yaml] "
    print(f"usage: gnnscale {what} {TAKES.get(command.name, '')}{recipe}[key=value ...] [--multirun] [--cfg job]\n")
    if choices:
        print("choices (key=NAME; the settings below change with them):")
        for group, names in choices.items():
            _print_wrapped(f"  {group + '=':<22} ", ", ".join(names))
        print()
    print(f"settings (key=value; gnnscale {what} --help KEY, for example --help {next(iter(config))}, shows more):")
    groups = [key for key, value in config.items() if value and isinstance(value, dict)]
    for group in groups:
        given = [one for one in places if one.key.startswith(f"{group}.") and one.value != UNSET]
        shown = [_shown(one).removeprefix(f"{group}.") for one in given if not isinstance(one.value, dict)]
        _print_wrapped(f"  {group + '.':<22} ", " ".join(shown) or "-")
    told = described()["told"][command.primary]
    for one in places:
        if one.key in config and one.key not in groups:
            text = told.get(one.key)
            print(f"  {_shown(one):<30}  # {text}" if text else f"  {_shown(one)}")
    print("\nflags: --multirun runs every combination of key=a,b; --cfg job prints the settings; GNNSCALE_TRACEBACK=1")


def _print_topic(topic: str, choices: dict[str, list[str]], places: list[Place]) -> None:
    """Print the choices of a group, and each of its settings with its default and description."""
    path = topic.replace("/", ".").rstrip("=.")
    chosen = [one for one in places if f"{one.key}.".startswith(f"{path}.") and not isinstance(one.value, dict)]
    if not chosen and path.replace(".", "/") not in choices:
        known = list(dict.fromkeys([*choices, *(one.key for one in places)]))
        tops = ", ".join(dict.fromkeys(one.key.partition(".")[0] for one in places))
        raise UsageError(f"--help {topic}: no setting or group{did_you_mean(topic, known)}; there are {tops}")
    for group, names in choices.items():
        if f"{group.replace('/', '.')}.".startswith(f"{path}.") and group not in ("partitioner", "dataset"):
            _print_wrapped(f"{group + '=':<22} ", ", ".join(names))
        elif group == path:
            print(f"{group}=NAME {group}.setting=value; = precedes the default:")
            for name in names:
                _print_wrapped(f"  {name:<22} ", ", ".join(_of_choice(group, name)) or "none")
    told: dict[tuple, str] = {}
    print("\nsettings of what is chosen:")
    for one in chosen:
        name = (one.target, one.key.rpartition(".")[2])
        text = f"see {told[name]}" if one.setting.told and name in told else one.setting.told
        told.setdefault(name, one.key)
        _print_wrapped(f"  {_shown(one):<34} ", text)


def _of_choice(group: str, name: str) -> Iterable[str]:
    """Return setting=default of a choice's settings; of a partitioner, its options."""
    if group == "partitioner":
        options = options_of_method(name)
        return ["any"] if options is None else [f"{key}={one.default or '?'}" for key, one in options.items()]
    found = walk(described()["choices"][group][name], group)
    return [_shown(one).removeprefix(f"{group}.") for one in found if one.key.count(".") == 1]


def _shown(one: Place) -> str:
    """Return key=value as the command line takes it, with the default where the config has no value."""
    value = one.setting.default if one.value == UNSET else as_word(one.value)
    return f"{one.key}={'?' if value is None else value}"


def _print_wrapped(head: str, text: str) -> None:
    """Print a heading and a text beside it, wrapped."""
    whole_words = {"break_long_words": False, "break_on_hyphens": False}
    wrapped = textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), **whole_words)
    print(wrapped or head.rstrip())


_BASH = """# eval "$(gnnscale completion bash)"
_gnnscale_complete() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    local cut="${COMP_WORDS[COMP_CWORD]}"
    local IFS=$'\\n'
    COMPREPLY=( $(gnnscale completion query "$line" 2>/dev/null) )
    # Readline splits words at = and :, and wants what follows them.
    local before="${word%"${cut#[=:]}"}"
    [[ "$cut" == "=" || "$cut" == ":" ]] && before="$word"
    COMPREPLY=( "${COMPREPLY[@]#"$before"}" )
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace
}
complete -F _gnnscale_complete gnnscale
"""
_ZSH = """# eval "$(gnnscale completion zsh)"
autoload -Uz compinit && compinit -u
_gnnscale_complete() {
    local -a found
    found=( ${(f)"$(gnnscale completion query "${words[1,CURRENT]}" 2>/dev/null)"} )
    compadd -Q -S '' -- ${found}
}
compdef _gnnscale_complete gnnscale
"""
_FISH = """# gnnscale completion fish | source
complete -c gnnscale -f -a '(gnnscale completion query (commandline -cp) 2>/dev/null)'
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_FILES = ("resume", "store", "output", "dataset.edges", "dataset.features", "dataset.labels", "dataset.nodes")


def complete(words: list[str]) -> None:
    """Print a shell's completion script, or the completions of a typed line."""
    if words[:1] == ["query"]:
        line = words[1] if len(words) > 1 else ""
        try:
            print("\n".join(candidates(line)))
        except Exception:  # a line that is half typed need not make sense
            return
        return
    if words in (["-h"], ["--help"]):
        print("gnnscale completion: print the shell-completion script\n")
        print("usage: " + "\n       ".join(script.splitlines()[0].removeprefix("# ") for script in SHELLS.values()))
        return
    if len(words) != 1 or words[0] not in SHELLS:
        given = " ".join(words)
        near = did_you_mean(given, SHELLS)
        raise UsageError(f"completion takes a shell, one of {', '.join(SHELLS)}, got {given or 'nothing'}{near}")
    print(SHELLS[words[0]], end="")


def candidates(line: str) -> list[str]:
    """Return the sorted completions of a command line as typed so far, the program's name first."""
    *before, last = re.split(r"\s+", line.lstrip())
    words = before[1:]
    if not words:
        return _starting(last, COMMANDS)
    if words[0] not in COMMANDS:
        return []
    if len(words) == 1 and words[0] in ("completion", "bench", "stores"):
        return _starting(last, {"completion": SHELLS, "bench": benches(), "stores": ACTIONS}[words[0]])
    key, is_value, value = last.partition("=")
    if key == "recipe" and is_value:
        shipped = [f"recipe={name}" for name in available_recipes()]
        return _starting(last, [*shipped, *_paths(value, "recipe=", ".yaml")])
    if is_value and key_of(key) in _FILES:
        return _paths(value, f"{key}=")
    found = [] if is_value or words[0] not in TAKES else _paths(last, "")
    return _starting(last, [*found, *_settings(words, key, bool(is_value))])


def _settings(words: list[str], key: str, is_value: bool) -> list[str]:
    """Return key= of a command's settings, or key=value of a given setting."""
    typed = [word for word in words[1:] if "=" in word and not word.endswith("=")]
    config = locate(words[0], [*(words[1:2] if words[0] == "bench" else []), *typed]).compose()
    choices, places = choices_of(config), list(walk(config))
    if not is_value:
        return ["recipe=", *(f"{group}=" for group in choices), *(_next(place, key) for place in places)]
    place = next((one for one in places if one.key == key.lstrip("+")), None)
    values = choices.get(key) or ([] if place is None or place.value in (None, UNSET) else [as_word(place.value)])
    if place is not None and (isinstance(place.value, bool) or "bool" in place.setting.kinds.split("|")):
        values = ["true", "false"]
    return [f"{key}={text}" for text in values]


def _next(place: Place, typed: str) -> str:
    """Return a key up to its next dot after what is typed."""
    rest = place.key[len(typed) :] if place.key.startswith(typed) else place.key
    inner = rest.partition(".")[0] + "." if "." in rest else rest + ("." if isinstance(place.value, dict) else "=")
    return place.key[: len(place.key) - len(rest)] + inner


def _paths(typed: str, head: str, suffix: str = "") -> list[str]:
    """Return files and folders that complete a path."""
    folder, start = os.path.split(typed)
    here = Path(folder or ".").expanduser()
    if not here.is_dir():
        return []
    found = [one for one in here.iterdir() if one.name.startswith(start) and (start or not one.name.startswith("."))]
    kept = [one for one in found if one.is_dir() or one.name.endswith(suffix)]
    return [head + os.path.join(folder, one.name) + "/" * one.is_dir() for one in kept]


def _starting(typed: str, words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(typed)})
