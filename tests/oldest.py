"""`python tests/oldest.py` prints the oldest version of each requirement that pyproject.toml allows, as pip takes it.

With names of packages it leaves these out: `python tests/oldest.py torch`.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def oldest(names: list[str]) -> list[str]:
    """Return a pin of each requirement that has a lower bound."""
    pins = []
    for each in map(Requirement, names):
        bounds = [part.version for part in each.specifier if part.operator in (">=", "==")]
        pins += [f"{each.name}=={bound}" for bound in bounds]
    return pins


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    print(*(pin for pin in oldest(project["dependencies"]) if pin.split("==")[0] not in sys.argv[1:]), sep="\n")
