"""Keywords that a function passes on to others: shown in its signature, and refused where none of them takes them."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .errors import did_you_mean

_F = TypeVar("_F", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def passes_on(*takers: Callable, **defaults: Any) -> Callable[[_F], _F]:
    """Return a decorator for a function whose `**` goes to `takers`.

    The signature that `help` and the command line see has the takers' named parameters in place of the `**`. Parameters
    without a default are left out: the function gives those itself.

    Args:
        takers: Functions and classes that take the keywords.
        defaults: The function's own defaults of such keywords: they are passed on where the caller gives none.

    Raises:
        TypeError: raised by the decorated function for a keyword that neither it nor a taker has.
    """

    def decorate(function: _F) -> _F:
        own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        found = {each.name: each for each in own}
        for taker in takers:
            for each in inspect.signature(taker).parameters.values():
                if each.kind in _NAMED and each.default is not each.empty:
                    default = defaults.get(each.name, each.default)
                    found.setdefault(each.name, each.replace(kind=each.KEYWORD_ONLY, default=default))
        signature = inspect.Signature(list(found.values()))

        @wraps(function)
        def checked(*args, **kwargs):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in found), None)
                near = "" if unknown is None else did_you_mean(unknown, found)
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}: {error}{near}") from None
            return function(*args, **{**defaults, **kwargs})

        checked.__signature__, checked.passes_on_to = signature, takers
        return checked

    return decorate
