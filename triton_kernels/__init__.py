"""Operations with a plain reference, a CPU path and one function that picks."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def triton_kernels_of(package: str) -> ModuleType | None:
    """Return the module of an operation's Triton kernels, or None where Triton is missing.

    Imported when first needed.
    """
    try:
        return import_module(f"{package}.kernel")
    except ImportError:
        return None
