"""Models that a checkpoint may have made: those of a closed list, from plain values that are each checked."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CheckpointError, short
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
    """Return the model that a checkpoint describes: a `Backbone`, also of the user's own once imported, or one of PyG.

    Args:
        settings: `_target_`, a dotted name, and the arguments.

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
    """Refuse arguments of a module, beside its backbone, that a checkpoint may not give.

    Raises:
        CheckpointError: names the first one.
    """
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
