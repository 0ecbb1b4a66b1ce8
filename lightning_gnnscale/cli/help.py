"""`gnnscale COMMAND --help`: choices and settings in short; `--help GROUP`: each setting of a group, described."""

import textwrap
from collections.abc import Iterable

from .commands import COMMANDS, TAKES, Command
from .compose import choices_of
from .errors import UsageError, did_you_mean
from .settings import UNSET, Place, described, options_of_method, walk
from .signatures import as_word

_WIDTH = 116


def print_help(command: Command, topic: str = "") -> None:
    """Print the help of a command line, with the settings of the choices that it makes.

    Args:
        command: The command, with its words.
        topic: A group of settings, or a prefix of keys: "model", "strategy/exchange", "model.backbone"; "": short.

    Raises:
        UsageError: there is no such group.
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
