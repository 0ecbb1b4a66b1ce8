"""Kernels compiled for Hopper without a device, and what their machine code holds; for a Python of its own."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Compiled(NamedTuple):
    """What a kernel became: counts of its loads and stores by PTX name, its atomics, registers and spilled bytes."""

    moves: Counter
    atomics: list
    registers: int | None
    spilled: int | None


def compiled(kernel, aligned=(), options=None, **arguments) -> Compiled:
    """Compile a kernel.

    Args:
        aligned: names of arguments that 16 divides.
        options: of the compiler.
        arguments: types of its arguments as Triton spells them, and values of its constants.
    """
    arguments = {name: arguments[name] for name in kernel.arg_names}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options or {})
    ptx = result.asm["ptx"]
    moves = Counter(re.findall(r"\b((?:ld|st)\.global[\w.:]*)", ptx))
    return Compiled(moves, re.findall(r"\b(?:atom|red)\.[\w.:]*", ptx), *_usage(result.asm["cubin"]))


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Return the registers of a thread and its bytes of stack, as cuobjdump tells them; None where it is missing."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", said).group(1)) for name in ("REG", "STACK"))
