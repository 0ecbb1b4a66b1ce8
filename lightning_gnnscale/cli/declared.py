"""What functions and classes take, read from their source: wrong settings are refused before anything is imported."""

import ast
import builtins
import collections.abc
import functools
import importlib.util
import inspect
import os
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

_OWN = "lightning_gnnscale"
_KINDS = inspect.Parameter
_ARITHMETIC = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
_SAME_SIGNATURE = ("_defaults_from_env_vars", "override", "classmethod", "staticmethod", "wraps")
# What an annotation is compared with; one that names anything else is left to the class itself.
_NAMES = {
    **{name: getattr(builtins, name) for name in ("int", "float", "bool", "str", "list", "tuple", "dict", "object")},
    **{name: getattr(typing, name) for name in ("Any", "Optional", "Union", "Literal", "Dict", "List", "Tuple")},
    **{name: getattr(collections.abc, name) for name in ("Callable", "Iterable", "Mapping", "Sequence")},
    "Path": Path,
    "os": os,
}


class _Unread:
    """A default that is no plain value, shown as it is written."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Declared(NamedTuple):
    """What a target takes.

    Attributes:
        parameters: by name, in the order of the source; annotations of other than plain types are left out.
        takes_more: any other keyword is taken too.
        told: the line of the docstring's "Args:" on each parameter that has one.
    """

    parameters: dict[str, inspect.Parameter]
    takes_more: bool
    told: dict[str, str]


class _Place(NamedTuple):
    """A class, function or assignment of a module."""

    node: ast.AST
    module: str


def declared(target: str) -> Declared | None:
    """Return what a dotted name takes; None where only an import would tell.

    Cost: a parse of the files on the way, a few ms each; nothing is imported but the package's own parents.
    """
    try:
        place = _find(target)
        return None if place is None else _takes(place)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def constant(target: str) -> Any:
    """Return the literal value of a module's variable, or the keys of a dict whose values are none.

    Raises:
        ValueError: there is none.
    """
    place = _find(target)
    value = getattr(place and place.node, "value", None)
    if isinstance(value, ast.Dict):
        try:
            return ast.literal_eval(value)
        except ValueError:
            return {
                ast.literal_eval(key): ast.unparse(name) for key, name in zip(value.keys, value.values, strict=True)
            }
    if value is None:
        raise ValueError(f"{target} is no variable of a module")
    return ast.literal_eval(value)


@functools.cache
def _file(module: str) -> Path | None:
    """Return the file of a module, found without an import of its parents; None: it has none."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    for name in rest:
        if path.name != "__init__.py":
            return None
        folder = path.parent
        path = next((one for one in (folder / name / "__init__.py", folder / f"{name}.py") if one.is_file()), None)
        if path is None:
            return None
    return path if path.suffix == ".py" else None


@functools.cache
def _names(module: str) -> dict[str, ast.AST]:
    """Return what a module's top level names."""
    found: dict[str, ast.AST] = {}
    for node in _top_level(ast.parse(_file(module).read_text()).body):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _top_level(body: list[ast.stmt]):
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top_level(node.body)
        else:
            yield node


def _find(target: str, seen: tuple[str, ...] = ()) -> _Place | None:
    """Return where a dotted name is defined; imports are followed."""
    if target in seen or len(seen) > 20:
        return None
    parts = target.split(".")
    # The whole name may be a module as well: a package may name what it holds after the module that it is from.
    module = next((".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1) if _file(".".join(parts[:n]))), None)
    if module is None:
        return None
    name, *inner = parts[len(module.split(".")) :]
    if module == _OWN and name not in _names(module) and name != "_HOME":
        home = constant(f"{_OWN}._HOME").get(name)  # the public face loads each name on first use
        return None if home is None else _find(".".join([_OWN, home, name, *inner]), (*seen, target))
    node = _names(module).get(name)
    if isinstance(node, ast.ImportFrom):
        origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return _find(".".join([_absolute(node, module), origin, *inner]), (*seen, target))
    if not inner:
        return None if node is None or isinstance(node, ast.Import) else _Place(node, module)
    if isinstance(node, ast.ClassDef) and len(inner) == 1:
        method = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == inner[0]), None)
        return None if method is None else _Place(method, module)
    return None


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (_file(module).name == "__init__.py")
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def _takes(place: _Place) -> Declared | None:
    node = place.node
    if isinstance(node, ast.FunctionDef):
        return _of_function(node, place.module, skip=0)
    return _of_class(node, place.module) if isinstance(node, ast.ClassDef) else None


def _of_class(node: ast.ClassDef, module: str) -> Declared | None:
    told = _told(ast.get_docstring(node))
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if any(isinstance(one, ast.FunctionDef) and one.name == "__new__" for one in node.body) and init is None:
        return None
    if init is not None:
        own = _of_function(init, module, skip=1)
        if own is None:
            return None
        own = own._replace(told=told | own.told)
        if not own.takes_more or not node.bases or not _is_own(node.bases[0], module):
            return own
        base = _base(node, module, 0)  # to which the other keywords are passed on
        return base and Declared(base.parameters | own.parameters, base.takes_more, base.told | own.told)
    if any(_last_name(one) == "dataclass" for one in node.decorator_list):
        bases = [
            _base(node, module, number) for number in range(len(node.bases)) if _is_own(node.bases[number], module)
        ]
        if any(base is None for base in bases):
            return None
        fields = {name: one for base in reversed(bases) for name, one in base.parameters.items()}
        inherited = {name: text for base in bases for name, text in base.told.items()}
        return Declared(fields | _fields(node, module), False, inherited | told)
    if node.decorator_list:
        return None
    if not node.bases:
        return Declared({}, False, told)
    base = _base(node, module, 0)
    return None if base is None else base._replace(told=base.told | told)


def _base(node: ast.ClassDef, module: str, number: int) -> Declared | None:
    if number >= len(node.bases):
        return None
    place = _named(node.bases[number], module)
    return None if place is None else _takes(place)


def _is_own(base: ast.expr, module: str) -> bool:
    place = _named(base, module)
    return place is not None and place.module.startswith(f"{_OWN}.")


def _named(name: ast.expr, module: str) -> _Place | None:
    """Return what an expression of a module names."""
    return _find(f"{module}.{ast.unparse(name)}") if isinstance(name, ast.Name | ast.Attribute) else None


def _of_function(node: ast.FunctionDef, module: str, skip: int) -> Declared | None:
    """Return what a function takes; skip: leading arguments that a caller does not give."""
    passed = next((one for one in node.decorator_list if _last_name(one) == "passes_on"), None)
    if any(one is not passed and not _keeps_signature(one, module) for one in node.decorator_list):
        return None
    skip = max(skip, any(_last_name(one) == "classmethod" for one in node.decorator_list))
    arguments, found = node.args, {}
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for one, default in list(zip(positional, defaults, strict=True))[skip:]:
        found[one.arg] = _parameter(one.arg, one.annotation, default, _KINDS.POSITIONAL_OR_KEYWORD, module)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[one.arg] = _parameter(one.arg, one.annotation, default, _KINDS.KEYWORD_ONLY, module)
    told, takes_more = _told(ast.get_docstring(node)), arguments.kwarg is not None
    if passed is None:
        return Declared(found, takes_more, told)
    given = {one.arg: _literal(one.value, module) for one in passed.keywords}
    for taker in passed.args:
        place = _named(taker, module)
        other = None if place is None else _takes(place)
        if other is None:
            return None
        for name, one in other.parameters.items():
            if one.default is not one.empty:
                found.setdefault(name, one.replace(default=given.get(name, one.default), kind=one.KEYWORD_ONLY))
                told.setdefault(name, other.told.get(name, ""))
    return Declared(found, False, told)


def _keeps_signature(decorator: ast.expr, module: str) -> bool:
    """Whether what a decorator returns takes what it was given: it says so itself, by functools.wraps."""
    if _last_name(decorator) in _SAME_SIGNATURE:
        return True
    place = _named(decorator, module)
    inner = [one for one in ast.walk(place.node) if isinstance(one, ast.FunctionDef)] if place is not None else ()
    return any(_last_name(one) == "wraps" for function in inner for one in function.decorator_list)


def _fields(node: ast.ClassDef, module: str) -> dict[str, inspect.Parameter]:
    found = {}
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(one.annotation):
            continue
        default = one.value
        if isinstance(default, ast.Call) and _last_name(default) == "field":
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            if "init" in given and not ast.literal_eval(given["init"]):
                continue
            default = given.get("default", given.get("default_factory"))
        name = one.target.id
        found[name] = _parameter(name, one.annotation, default, _KINDS.POSITIONAL_OR_KEYWORD, module)
    return found


def _parameter(name: str, annotation: ast.expr | None, default: ast.expr | None, kind, module) -> inspect.Parameter:
    known = _KINDS.empty
    if annotation is not None:
        try:
            known = eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}}, _NAMES)
        except (NameError, AttributeError, TypeError, SyntaxError):
            known = _KINDS.empty
    return _KINDS(name, kind, default=_KINDS.empty if default is None else _literal(default, module), annotation=known)


def _literal(value: ast.expr, module: str) -> Any:
    """Return a plain value, also of arithmetic with a module's constants; what is none is shown as it is written."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        pass
    try:
        if not all(isinstance(one, _ARITHMETIC) for one in ast.walk(value)):
            return _Unread(ast.unparse(value))
        names = {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}
        places = {name: _find(f"{module}.{name}") for name in names}
        known = {name: _literal(place.node.value, place.module) for name, place in places.items()}
        return eval(compile(ast.Expression(value), "default", "eval"), {"__builtins__": {}}, known)
    except (AttributeError, TypeError, ValueError, RecursionError):
        return _Unread(ast.unparse(value))


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _told(docstring: str | None) -> dict[str, str]:
    """Return the text of a docstring's "Args:" by parameter, each on one line."""
    section = re.search(r"^Args:\n((?:[ \t]+\S.*\n?|\n)+)", docstring or "", re.M)
    told: dict[str, str] = {}
    if section is None:
        return told
    text = re.sub(r"\n {5,}", " ", section[1])
    for names, words in re.findall(r"^ {4}([\w, *]+): (.*)$", text, re.M):
        told |= {name.strip(" *"): words.strip() for name in names.split(",")}
    return told
