"""`gnnscale completion SHELL`: shell completion of commands, recipes, choices and keys."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from .commands import ACTIONS, COMMANDS, TAKES, benches, locate
from .compose import choices_of, key_of
from .errors import UsageError, did_you_mean
from .recipes import available_recipes
from .settings import UNSET, Place, walk
from .signatures import as_word

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


def run(words: list[str]) -> None:
    """Print a shell's completion script, or the completions of a typed line.

    Raises:
        UsageError: no shell is named, or an unknown one.
    """
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
    """Return the sorted completions of a command line.

    Args:
        line: As typed so far, the program's name first.
    """
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
