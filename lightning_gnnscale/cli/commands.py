"""The commands, and the parts of a command line: its configs, its recipe or run, its other words."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml
from omegaconf import OmegaConf

from .compose import compose_config, key_of, prepare_overrides
from .errors import UsageError, none_such
from .recipes import take_recipe
from .run_paths import CONFIG, checked_config, run_of, take_trust
from .settings import described, elsewhere

COMMANDS = {
    "train": "partition a graph, store the parts, train on them and evaluate on the full graph",
    "test": "evaluate a run's best checkpoint, or any other, on the test nodes",
    "predict": "write the predictions of a run's best checkpoint, or of any other, by your own node ids",
    "reproduce": "compute a step of a run again from its receipt, and say whether it is the same",
    "partition": "partition a graph and write the partition store",
    "plan": "print how many parts a graph needs and what fits where",
    "verify": "check every byte of a partition store against its checksums",
    "inspect": "show what a run folder, a checkpoint, a partition store or a data set holds",
    "stores": "list the partition stores or their sizes, or remove what is not needed",
    "update": "write the next version of a partition store: nodes and edges that came, changed or went",
    "doctor": "show what this machine offers: versions, GPUs and links, memory limits, disk speed, ports",
    "report": "write the report of a run again, or one page that compares several runs or a sweep",
    "bench": "run one benchmark of the source tree, side by side with its peer",
    "prepare": "start workers that prepare batches for trainers, on this machine or on a Ray cluster",
    "completion": "print the shell-completion script of bash, zsh or fish",
}

# Arguments before the settings.
TAKES = {
    "test": "[RUN | CHECKPOINT] ",
    "predict": "[RUN | CHECKPOINT] ",
    "reproduce": "RUN step=N ",
    "update": "STORE ",
    "verify": "[STORE] ",
    "inspect": "[RUN | CHECKPOINT | STORE] ",
    "stores": "[list | sizes | clean] [NAME ...] ",
    "report": "RUN [RUN ...] ",
}

FLAGS_WITH_VALUE = (  # Hydra's own
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"),
)
_FLAGS = (
    *("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--shell-completion"),
    *(flag for flag in FLAGS_WITH_VALUE if flag.startswith("--")),
)
ACTIONS = ("list", "sizes", "clean")  # of gnnscale stores
# Commands whose settings are those of train, and the words by which some of them leave no folder of their own.
_LIKE_TRAIN = ("train", "test", "predict", "reproduce", "partition", "plan", "verify", "inspect")
_NO_FOLDER = ["hydra.run.dir=.", "hydra.output_subdir=null"]
# As in conf/run_folder.yaml: a run's own config has no such line.
_NEW_FOLDER = "${paths.runs}/${name}/${now:%Y-%m-%d_%H-%M-%S}"


class Command(NamedTuple):
    """A parsed command line.

    Attributes:
        name: The command.
        primary: Its config, whose keys are those that it takes.
        config_dir, config_name: Where Hydra begins: the primary config (folder None), a recipe, or a run's own config.
        words: The words left for Hydra.
    """

    name: str
    primary: str
    config_dir: str | None
    config_name: str
    words: list[str]

    @property
    def recipe(self) -> tuple[str, str] | None:
        return None if self.config_dir is None else (self.config_dir, self.config_name)

    def compose(self) -> dict:
        """Return its config, unresolved, without what is said to Hydra itself."""
        words = prepare_overrides([word for word in self.words if not word.lstrip("+").startswith(("-", "hydra"))])
        return OmegaConf.to_container(compose_config(self.config_name, words, self.config_dir), resolve=False)


def locate(name: str, words: list[str]) -> Command:
    """Return the configs that a command's words begin with; UsageError: an unknown recipe or word."""
    _check_flags(words)
    trusted, words = take_trust(words)
    if name == "bench":
        primary = f"bench/{words[0]}"
        return Command(name, primary, *take_recipe(primary, words[1:]))
    before = ["", *words]
    paths = [word for word, flag in zip(words, before, strict=False) if _is_path(word) and flag not in FLAGS_WITH_VALUE]
    settings = [word for word in words if word not in paths]
    if name == "stores":
        settings = [*(f"action={action}" for action in paths[:1]), *_as_list("names", paths[1:]), *settings]
        if any(key_of(word) == "recipe" for word in settings):
            raise UsageError("stores takes no recipe: leave recipe= out")
        _check_action(settings)
        return Command(name, name, None, name, settings)
    if name == "update":
        if len(paths) > 1:
            raise UsageError(f"update takes one store, got {' '.join(paths)}")
        words = [*(f"store={_quoted(path)}" for path in paths), *settings]
    if name == "report":
        words = [*_as_list("runs", paths), *settings]
    if name not in _LIKE_TRAIN:
        return Command(name, name, *take_recipe(name, words))
    settings = [_path_quoted(word) for word in settings]
    if name in ("train", "partition", "plan") and paths:
        raise UsageError(f"{paths[0]} is not a setting: say key=value, or --help")
    if len(paths) > 1:
        raise UsageError(f"{name} takes one path, got {' '.join(paths)}")
    if name in ("test", "predict", "reproduce") and paths:
        return _of_run(name, paths[0], settings, trusted)
    run = _gone_on_from(settings) if name == "train" else None
    if run is not None:
        return _of_run(name, run, [word for word in settings if key_of(word) != "resume"], trusted)
    primary = _primary(name, paths, settings)
    settings = [*(f"{'path' if name == 'inspect' else 'store'}={_quoted(path)}" for path in paths), *settings]
    if name in ("verify", "inspect") and primary == "train":
        settings = [*_NO_FOLDER, *settings]
    return Command(name, primary, *take_recipe(primary, settings))


def _check_action(words: list[str]) -> None:
    """Refuse what `gnnscale stores` does not do; a sweep names several actions."""
    given = [word.partition("=")[2].strip("'\"") for word in words if key_of(word) == "action"]
    for action in ",".join(given).split(",") if given else []:
        if action not in ACTIONS:
            raise UsageError(none_such(f"stores {action}: no such action", action, ACTIONS))


def _check_flags(words: list[str]) -> None:
    """Refuse settings given as flags: `--num_parts 4`."""
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not re.match(r"--[a-zA-Z]", word) or flag in _FLAGS:
            continue
        if not equals and words[number + 1 :] and not re.match(r"-|[+~]*[\w./@]+=", words[number + 1]):
            value = words[number + 1]
        name = flag.lstrip("-").replace("-", "_")
        is_known = "." in name or any(name in config for config in described()["commands"].values())
        raise UsageError(f"{flag} is not a flag: say {name if is_known else elsewhere(name) or name}={value or '...'}")


def _primary(name: str, paths: list[str], words: list[str]) -> str:
    """Return "train" where a command's words are settings of train, and its own config else."""
    if name not in ("plan", "verify", "inspect"):
        return "train"
    own, given = described()["commands"][name], [re.split("[./]", key_of(word))[0] for word in words if "=" in word]
    of_train = {"recipe", *described()["commands"]["train"]}
    return "train" if not paths and any(key in of_train and key not in own for key in given) else name


def _gone_on_from(words: list[str]) -> str | None:
    """Return the run that `train resume=RUN` goes on from with its settings; None where the words give all settings."""
    given = [word.partition("=")[2].strip("'\"") for word in words if key_of(word) == "resume"]
    chosen = any("=" in word and key_of(word) in ("recipe", *described()["choices"]) for word in words)
    is_run = len(given) == 1 and given[0] not in ("", "null") and "://" not in given[0]
    return given[0] if is_run and not chosen else None


def _of_run(name: str, path: str, words: list[str], trusted: bool) -> Command:
    """Return the command line of a run that goes on with its own settings, or that is evaluated: inside its folder."""
    if any(word.startswith("recipe=") for word in words):
        raise UsageError(f"{name} {path} takes the settings of the run: leave recipe= out, or say resume={path}")
    folder = run_of(path)
    own = ["hydra/job_logging=stdout", f"++resume={_quoted(str(Path(path).expanduser().absolute()))}"]
    if name == "train":
        new = [f"hydra.sweep.dir={_NEW_FOLDER}", "hydra.sweep.subdir=${hydra.job.num}"]
        # Else ranks that torchrun starts would name a folder each.
        own += new if "TORCHELASTIC_RUN_ID" in os.environ else [f"hydra.run.dir={_NEW_FOLDER}", *new]
        own.append("num_devices=${trainer.devices}")  # as in train.yaml: a run's own config has its number
    else:
        own.append(f"hydra.run.dir={_quoted(str(folder / name))}")
    given = {word.partition("=")[0] for word in words}
    own = [word for word in own if word.partition("=")[0] not in given]
    return Command(name, "train", str(_config_alone(folder, words, trusted)), "config", [*own, *words])


def _config_alone(folder: Path, words: list[str], trusted: bool) -> Path:
    """Return a folder with nothing but a run's config, once it is checked.

    Hydra takes what lies beside it, test/, for settings' groups.
    """
    alone = Path(tempfile.mkdtemp(prefix="gnnscale_config_"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    config = checked_config(folder / CONFIG, words, trusted)
    for name, value in (("changed", False), ("keep_layers", False), ("step", None)):
        config.setdefault(name, value)  # a run may be older than the setting
    (alone / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return alone


def benches() -> dict[str, str]:
    """Return what each benchmark measures, by name: the opening line of its config."""
    told = described()["told"].items()
    return {name.removeprefix("bench/"): one[""] for name, one in told if name.startswith("bench/")}


def _is_path(word: str) -> bool:
    """Whether a word is a path, not a setting; an existing path may contain =, as Lightning's checkpoints do."""
    if not re.match(r"-|[+~]*[\w./@]+=|~\w[\w./@]*$", word):
        return True
    named = "/" in word or word.endswith(".ckpt")
    return named and not word.startswith("-") and os.path.exists(os.path.expanduser(word))


def _path_quoted(word: str) -> str:
    """`resume=epoch=7.ckpt` as Hydra takes it."""
    key, _, value = word.partition("=")
    plain = key.lstrip("+") not in ("resume", "store") or "=" not in value or value[0] in "'\""
    return word if plain or not os.path.exists(os.path.expanduser(value)) else f"{key}={_quoted(value)}"


def _quoted(word: str) -> str:
    """A word quoted for Hydra."""
    return "'" + word.replace("'", "\\'") + "'"


def _as_list(key: str, words: list[str]) -> list[str]:
    """The setting of a key to a list, where there is any word to list."""
    return [f"{key}=[{','.join(_quoted(word) for word in words)}]"] if words else []
