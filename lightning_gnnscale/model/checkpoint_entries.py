"""The types of a checkpoint's entries, checked once on reading."""

from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any

from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from ..errors import CheckpointError, short
from .made_again import OBJECTS, is_admitted, wrong_value

ROWS_KEY = "gnnscale_inputs"  # a checkpoint's entry on the learned rows beside it
MODEL_KEY = "gnnscale_model"  # and on its model: the backbone's class and plain arguments
_COMPILED = "_orig_mod"  # what `torch.compile` calls the module that it wraps
_KINDS = {
    "state_dict": Mapping,
    "callbacks": Mapping,
    "loops": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
    MODEL_KEY: Mapping,
    ROWS_KEY: Mapping,
}
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
_COUNTS = ("epoch", "global_step")
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path", "dirpath")
_TOLD = {Mapping: "values by name", list: "a list"}


def check_entries(saved: Mapping[str, Any], path: Any) -> None:
    """Refuse a checkpoint whose entries are of other types than Lightning and this package save.

    Raises:
        CheckpointError: one line that names the file and the entry.
    """
    for name, kind in _KINDS.items():
        if name in saved and not isinstance(saved[name], kind) and not (saved[name] is None and name != "state_dict"):
            raise _wrong(path, name, _TOLD[kind], saved[name])
    for name, weight in saved["state_dict"].items():
        if not isinstance(name, str):
            raise _wrong(path, "state_dict", "weights by name", name)
        if not isinstance(weight, Tensor) and not name.endswith("_extra_state"):
            raise _wrong(path, f"state_dict.{name}", "a tensor", weight)
    for name in _HYPER_PARAMETERS:
        if name in saved and not isinstance(saved[name], Mapping):
            raise _wrong(path, name, _TOLD[Mapping], saved[name])
    backbone = (saved.get(MODEL_KEY) or {}).get("backbone", {})
    if not isinstance(backbone, Mapping):
        raise _wrong(path, f"{MODEL_KEY}.backbone", _TOLD[Mapping], backbone)
    for name, kinds, told in (("_target_", str | None, "text"), ("out_channels", int | None, "a whole number")):
        if not isinstance(backbone.get(name), kinds):
            raise _wrong(path, f"{MODEL_KEY}.backbone.{name}", told, backbone[name])
    for name in _COUNTS:
        if name in saved and not is_count(saved[name]):
            raise _wrong(path, name, "a whole number of at least 0", saved[name])
    version = saved.get("pytorch-lightning_version")
    try:
        Version(version if isinstance(version, str) else "none")
    except InvalidVersion:
        raise _wrong(path, "pytorch-lightning_version", "a version such as 2.5.0", version) from None
    for name, state in (saved.get("callbacks") or {}).items():
        _check_callback(str(name), state, path)
    if saved.get(ROWS_KEY) is not None:
        _check_rows(saved[ROWS_KEY], path)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 0, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def named_as(module: nn.Module, saved: Any) -> Any:
    """Return a state with the names of a module's weights, where either was saved or made by `torch.compile`.

    `torch.compile` puts a wrapper around a module, and `_orig_mod.` into the names of what is in it.

    Args:
        module: What the state is for.
        saved: Tensors by name, or dicts and lists of them; not changed.
    """
    own = {name for group in (module.named_parameters, module.named_buffers) for name, _ in group()}
    own |= set(module.state_dict())
    by_bare_name = {_bare(name): name for name in own}
    return _renamed(saved, lambda name: name if name in own else by_bare_name.get(_bare(name), name))


def _bare(name: str) -> str:
    return ".".join(one for one in name.split(".") if one != _COMPILED)


def _renamed(saved: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(saved, list):
        return [_renamed(one, rename) for one in saved]
    if not isinstance(saved, Mapping):
        return saved
    named = {rename(key) if isinstance(key, str) else key: _renamed(one, rename) for key, one in saved.items()}
    # With its own names a state_dict stays as it is, with the versions of modules that it has beside its entries.
    same = list(named) == list(saved) and all(named[key] is one for key, one in saved.items())
    return saved if same else named


def is_of_package(module: type) -> bool:
    """Whether a class is made by a constructor of this package."""
    return module.__init__.__module__.startswith(f"{__package__.partition('.')[0]}.")


def check_hyper_parameters(saved: Any, module: type, path: Any) -> None:
    """Refuse a checkpoint's arguments of a module where they are more than plain values.

    Args:
        saved: What the file holds, a dict.
        module: The class that is made with them.
        path: The file, for the error.

    Raises:
        CheckpointError: one line that names the entry.
    """
    own = is_of_package(module)
    objects = OBJECTS if own else ()
    for key in _HYPER_PARAMETERS:
        for name, value in saved.get(key, {}).items():
            if name == "_instantiator":
                raise CheckpointError(
                    f"{path}: {key}._instantiator would make objects that the file names: "
                    f"give the arguments, and remove that entry"
                )
            wrong = wrong_value(name, value, tensors=not own)
            if name in objects and value is not None and not wrong:
                wrong = f"{name} must be given by the caller, got {short(value)}"
            if wrong:
                raise CheckpointError(f"{path}: {key}: {wrong}")
    for prefix in ("", "datamodule_"):
        kind, name = saved.get(f"{prefix}hparams_type"), saved.get(f"{prefix}hparams_name")
        if not isinstance(kind, str | None) and not is_admitted(kind):
            raise CheckpointError(f"{path}: {prefix}hparams_type must be text, got {short(kind)}")
        if not isinstance(name, str | None) or name in objects:
            raise CheckpointError(f"{path}: {prefix}hparams_name must be the name of an argument, got {short(name)}")


def _check_callback(name: str, state: Any, path: Any) -> None:
    """Check the states of checkpoint callbacks: they open and remove the files named there."""
    if name == "EarlierBest":
        known = state if isinstance(state, Mapping) else {}
        if not isinstance(known.get("path"), str) or not _is_number(known.get("score")):
            raise _wrong(path, f"callbacks.{name}", "a path and a score", state)
    if not name.startswith("ModelCheckpoint"):
        return
    if not isinstance(state, Mapping):
        raise _wrong(path, f"callbacks.{name}", _TOLD[Mapping], state)
    if state.get("best_model_score") is not None and not isinstance(state.get("best_model_path"), str):
        raise _wrong(path, f"callbacks.{name}.best_model_path", "a path", state.get("best_model_path"))
    for key in ("monitor", *_PATHS):
        if not isinstance(state.get(key), str | None):
            raise _wrong(path, f"callbacks.{name}.{key}", "text", state[key])
    for key in ("best_model_score", "current_score", "kth_value"):
        if state.get(key) is not None and not _is_number(state[key]):
            raise _wrong(path, f"callbacks.{name}.{key}", "a number", state[key])
    kept = state.get("best_k_models")
    if not isinstance(kept, Mapping | None):
        raise _wrong(path, f"callbacks.{name}.best_k_models", "scores by path", kept)
    folder = f"{str(state.get('dirpath')).rstrip('/')}/"
    removable = [*(kept or {}), *(state[key] for key in _PATHS[1:3] if state.get(key))]
    for file in removable:
        # Lightning removes them when better ones come, in any folder.
        if not isinstance(file, str) or ".." in PurePath(file).parts or ("://" in file and not file.startswith(folder)):
            raise _wrong(path, f"callbacks.{name}", "files of its own folder", file)


def _check_rows(saved: Mapping[str, Any], path: Any) -> None:
    """Check a checkpoint's entry on the learned rows beside it."""
    ranks = saved.get("ranks")
    if not isinstance(saved.get("folder"), str):
        raise _wrong(path, f"{ROWS_KEY}.folder", "a path", saved.get("folder"))
    if not isinstance(ranks, list) or not all(isinstance(one, Mapping) for one in ranks):
        raise _wrong(path, f"{ROWS_KEY}.ranks", "a list, an entry a process", ranks)
    for one in ranks:
        for file in one.get("files") or []:
            name = file.get("name") if isinstance(file, Mapping) else None
            if not isinstance(name, str) or PurePath(name).name != name:
                raise _wrong(path, f"{ROWS_KEY}.ranks.files", "names of files beside the checkpoint", name)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    return is_scalar or (isinstance(value, Real) and not isinstance(value, bool))


def _wrong(path: Any, entry: str, allowed: str, given: Any) -> CheckpointError:
    return CheckpointError(f"{path}: {entry} must be {allowed}, got {short(given)}")
