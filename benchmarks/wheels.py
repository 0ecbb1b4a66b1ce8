"""The wheels that a machine without a network needs for `gnnscale bench gpu`: python -m benchmarks.wheels > wheels.txt

One requirement a line, with the versions that are installed here. On a machine with a network and the same Python say
`pip download -r wheels.txt -d wheels`; carry the folder, and say `pip install --no-index --find-links wheels -r
wheels.txt` where there is none.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PACKAGE = "lightning-gnnscale"
# What builds and tests the source tree, and the compiled sampler of PyG's loop.
BESIDE = ("setuptools", "wheel", "pytest", "hypothesis")
SAMPLER = "pyg-lib"


def wheels(package: str = PACKAGE, beside: tuple[str, ...] = BESIDE) -> dict[str, str]:
    """Return name to version of all that a package needs, directly or not, as installed here.

    Args:
        package: An installed distribution, itself left out: it is installed from its source.
        beside: Further distributions; those that are not installed are left out.
    """
    found: dict[str, str] = {}
    waiting = [(name, frozenset()) for name in (package, *beside)]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            own = distribution(name)
        except PackageNotFoundError:
            continue
        if canonicalize_name(name) != canonicalize_name(package):
            found[canonicalize_name(name)] = own.version
        new = set(_needed(own.requires or (), extras)) - seen
        seen |= new
        waiting += sorted(new, key=str)
    return dict(sorted(found.items()))


def _needed(requires: list[str], extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for line in requires:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one.name, frozenset(one.extras)


def lines() -> Iterator[str]:
    """Yield the lines of the list."""
    found = wheels()
    if "cpu" in (Version(found["torch"]).local or ""):
        found.pop("triton", None)
        yield "# torch here is a CPU build: take the CUDA build, which brings its own triton and nvidia-* wheels"
    for name, version in found.items():
        yield f"{name}=={Version(version).public}"
    yield f"# {SAMPLER}: the compiled sampler of PyG's loop, a wheel for exactly this torch and CUDA; else PyG's rows"
    yield "# are left out"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines())
