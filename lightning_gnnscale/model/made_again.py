"""What a checkpoint may hold: entries of known types, plain values, and models of a closed list."""

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CheckpointError, is_count, short
from .backbone import Backbone

_GIVE = "give load_from_checkpoint(..., backbone=...)"
# PyG's models of plain layers. Others read text as code (`Sequential`), open files or run what they are given.
PYG_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
_PYG_MODULES = ("torch_geometric.nn", "torch_geometric.nn.models", "torch_geometric.nn.models.basic_gnn")
_ACTIVATIONS = ("relu", "relu6", "rrelu", "leakyrelu", "prelu", "elu", "celu", "selu", "gelu", "silu", "swish", "mish")
_ACTIVATIONS += ("tanh", "sigmoid", "hardtanh", "hardsigmoid", "hardswish", "softplus", "softsign", "logsigmoid")
_NORMS = ("batch", "batchnorm", "layer", "layernorm", "instance", "instancenorm", "graph", "graphnorm", "graphsizenorm")
_NORMS += ("pair", "pairnorm", "meansubtraction", "meansubtractionnorm")
_AGGREGATIONS = ("add", "sum", "mean", "max", "min", "mul", "var", "std", "median", "softmax", "powermean")
# Of the arguments of PyG's models, those that are looked up by name, and the names.
_WORDS = {
    "act": _ACTIVATIONS,
    "norm": _NORMS,
    "jk": ("last", "cat", "max", "lstm"),
    "aggr": _AGGREGATIONS,
    "fill_value": ("mean", "add", "sum", "min", "max", "mul"),
    "flow": ("sourcetotarget", "targettosource"),
    "aggregators": _AGGREGATIONS,
    "scalers": ("identity", "amplification", "attenuation", "linear", "inverselinear"),
}
_REPEATED = {"num_layers": 1000, "towers": 1000, "pre_layers": 100, "post_layers": 100, "heads": 10_000}
_REPEATED |= {"decomposed_layers": 1000, "feed_forward_layers": 100, "num_bases": 1_000_000}
# Arguments of this package's modules that are objects.
OBJECTS = ("backbone", "optimizer", "scheduler", "inputs", "dataset", "store", "sampler")
_LARGEST = 1 << 31  # of any integer
_MOST_ENTRIES = 1 << 20
_DEEPEST = 8


def make_backbone(settings: Mapping[str, Any]) -> nn.Module:
    """Return the model of `_target_`, a dotted name, and its arguments: a `Backbone` that is imported, or one of PyG.

    Raises:
        CheckpointError: another class is named, or the arguments are not those of such a model.
    """
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"the checkpoint's model must be settings by name, got {short(settings)}: {_GIVE}")
    arguments = dict(settings)
    target = arguments.pop("_target_", "")
    found = _class_of(target if isinstance(target, str) else "")
    if found is None:
        raise CheckpointError(
            f"the checkpoint's model is {short(target) if target else 'unknown'}, which is not an imported "
            f"Backbone, and not {', '.join(PYG_MODELS)} of PyG: import it, or {_GIVE}"
        )
    for name, value in arguments.items():
        wrong = _wrong_of_pyg(name, value) if not issubclass(found, Backbone) else wrong_value(name, value)
        if wrong:
            raise CheckpointError(f"the checkpoint's model {target}: {wrong}: {_GIVE}")
    try:
        return found(**arguments)
    except CheckpointError:
        raise
    except Exception as error:  # plain values of other types may raise anything inside
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"the checkpoint's model {target} is not made again ({told}): {_GIVE}") from None


class NoLargerThan(TorchDispatchMode):
    """While it is entered, modules take no more memory than the weights of a checkpoint explain.

    Sizes are refused before memory is taken. Weights may be kept in a narrower type than they are made in, and a
    module may make tables that are not saved: the bound is 8 times the weights' bytes and 64 MiB.

    Args:
        weights: The checkpoint's `state_dict`.
        path: The file, for the error.

    Raises:
        CheckpointError: the tensors that are made exceed the bound, or are far more in number than the weights.
    """

    def __init__(self, weights: Mapping[str, Any], path: Any):
        super().__init__()
        # A tensor's shape may claim more than the file holds, its storage may not.
        dense = [one for one in weights.values() if isinstance(one, Tensor) and one.layout == torch.strided]
        held = {one.data_ptr(): one.untyped_storage().nbytes() for one in dense if not one.is_meta}
        self.path, self.held = path, sum(held.values())
        self.bytes_left, self.tensors_left = 8 * self.held + (64 << 20), 100 * len(weights) + 2_000

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(one, Tensor) for one in args):
            item = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            self.bytes_left -= _num_elements(func, args) * item
            self.tensors_left -= 1
            if self.bytes_left < 0 or self.tensors_left < 0:
                raise CheckpointError(
                    f"{self.path}: the arguments of its model ask for far more than the {self.held:,} bytes of weights"
                    f" that it holds: {_GIVE}"
                )
        return func(*args, **kwargs)


def _num_elements(func: Any, args: tuple) -> int:
    """Return how many elements a function makes that takes no tensor: `torch.empty`, `torch.arange`, ..."""
    shapes = [one for one in args if isinstance(one, list | tuple) and all(isinstance(size, int) for size in one)]
    if shapes:
        return math.prod(max(size, 0) for size in shapes[0])
    numbers = [abs(one) for one in args if isinstance(one, int | float) and math.isfinite(one)]
    most = int(max(numbers, default=0))
    return most * most if "eye" in str(func) else most if "arange" in str(func) else 1


def check_plain_arguments(given: Mapping[str, Any]) -> None:
    """Refuse, by a CheckpointError, arguments of a module beside its backbone that a checkpoint may not give."""
    for name, value in given.items():
        if name == "backbone":
            continue
        wrong = wrong_value(name, value) or (f"{name} must be given by the caller" if name in OBJECTS else None)
        if wrong:
            raise CheckpointError(f"the checkpoint's arguments of the module: {wrong}: give {name}=...")


def target_of(kind: type) -> str:
    """Return the dotted name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of(target: str) -> type[nn.Module] | None:
    """Return the class of a dotted name of the list; nothing is imported by it."""
    known = {target_of(kind): kind for kind in _subclasses(Backbone)}
    own = {f"{__package__}.{kind.__name__}": kind for kind in known.values() if kind.__module__.startswith(__package__)}
    found = (known | own).get(target)
    module, _, name = target.rpartition(".")
    if found is None and module in _PYG_MODULES and name in PYG_MODELS:
        from torch_geometric.nn.models import basic_gnn

        found = getattr(basic_gnn, name)
    return found if inspect.isclass(found) else None


def _wrong_of_pyg(name: Any, value: Any) -> str | None:
    """Return what is wrong with an argument of a model of PyG: text is a name of a list, all else are numbers."""
    if isinstance(value, str):
        if _word(value) not in _WORDS.get(name, ()):
            return f"{name}={short(value)} is not one of {', '.join(_WORDS.get(name, ())) or 'its numbers'}"
        return None
    if isinstance(value, list | tuple) and any(isinstance(entry, str) for entry in value):
        if name not in ("aggr", "aggregators", "scalers"):
            return f"{name} must hold numbers, got {short(value)}"
        return next(filter(None, (_wrong_of_pyg(name, entry) for entry in value)), None)
    options = name in ("act_kwargs", "norm_kwargs", "aggr_kwargs")
    if isinstance(value, Mapping) and not (options and all(map(_is_number, value.values()))):
        return f"{name} must hold numbers, got {short(value)}"
    return wrong_value(name, value)


def wrong_value(name: Any, value: Any, depth: int = 0, tensors: bool = False) -> str | None:
    """Return what is wrong with a value that must be plain, and no larger than settings are; None: nothing."""
    if not isinstance(name, str | int):
        return f"names must be text, got {short(name)}"
    if name == "_target_" or depth > _DEEPEST:
        return f"{short(value)} would be made from within its settings" if name == "_target_" else "is nested too deep"
    if isinstance(value, bool | None) or (tensors and isinstance(value, Tensor)) or is_admitted(type(value)):
        return None
    if isinstance(value, int):
        most = _REPEATED.get(name, _LARGEST if not tensors else 1 << 64)
        return f"{name}={short(value)} is not in [-{most}, {most}]" if abs(value) > most else None
    if isinstance(value, float):
        return None if math.isfinite(value) or tensors else f"{name}={value} is not finite"
    if isinstance(value, str):
        return f"{name} is text of {len(value):,} characters" if len(value) > _MOST_ENTRIES else None
    if isinstance(value, list | tuple | Mapping):
        if len(value) > _MOST_ENTRIES:
            return f"{name} has {len(value):,} entries"
        entries = value.items() if isinstance(value, Mapping) else ((name, entry) for entry in value)
        return next(filter(None, (wrong_value(key, entry, depth + 1, tensors) for key, entry in entries)), None)
    return f"{name} must be a plain value, got {type(value).__name__}"


def is_admitted(kind: Any) -> bool:
    """Whether the user has named a class to `torch.serialization.add_safe_globals`."""
    from torch.serialization import get_safe_globals

    return any(kind is (one[0] if isinstance(one, tuple) else one) for one in get_safe_globals())


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | None)


def _word(text: str) -> str:
    """Return a name as PyG compares it."""
    return text.lower().replace("-", "").replace("_", "").replace(" ", "")


def _subclasses(kind: type) -> list[type]:
    return [one for below in kind.__subclasses__() for one in (below, *_subclasses(below))]


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
_NEVER_NULL = ("state_dict", *_HYPER_PARAMETERS)
_COUNTS = ("epoch", "global_step")
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path", "dirpath")
_TOLD = {Mapping: "values by name", list: "a list"}


def check_entries(saved: Mapping[str, Any], path: Any) -> None:
    """Refuse, by a CheckpointError, entries of other types than Lightning and this package save."""
    for name, kind in (_KINDS | dict.fromkeys(_HYPER_PARAMETERS, Mapping)).items():
        may_be_null = name not in _NEVER_NULL
        if name in saved and not isinstance(saved[name], kind) and not (saved[name] is None and may_be_null):
            raise _wrong(path, name, _TOLD[kind], saved[name])
    for name, weight in saved["state_dict"].items():
        if not isinstance(name, str):
            raise _wrong(path, "state_dict", "weights by name", name)
        if not isinstance(weight, Tensor) and not name.endswith("_extra_state"):
            raise _wrong(path, f"state_dict.{name}", "a tensor", weight)
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


def named_as(module: nn.Module, saved: Any) -> Any:
    """Return a state with the names of a module's weights, where either was saved or made by `torch.compile`.

    `torch.compile` puts a wrapper around a module, and `_orig_mod.` into the names of what is in it. saved: tensors by
    name, or dicts and lists of them; not changed.
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
    """Refuse, by a CheckpointError, a file's arguments of a class that are more than plain values."""
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
