"""Imports run one way (DESIGN): a stage knows what stands to its left, and nothing to its right."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = {"across_ranks", "graph", "errors", "rng", "events", "memory", "memory_peak"}
SHARED |= {"jit", "kernel_sets", "keywords", "object_store", "scratch", "values"}
SHARED |= {"device_time", "foreign", "system", "traits"}
KERNELS = {"triton_kernels"}
FLOW = ["edge_stream", "partitioner", "planner", "dataset", "partition_store"]
FLOW += ["placement", "sampler", "loader", "embedding", "remote"]
ALLOWED = {stage: SHARED | KERNELS | set(FLOW[: i + 1]) for i, stage in enumerate(FLOW)}
ALLOWED |= {
    "model": SHARED | KERNELS | {"model"},
    "strategy": SHARED | KERNELS | {"strategy", "model"},
    "datamodule": SHARED | KERNELS | {*FLOW, "datamodule", "model"},
    "report": SHARED | {"report"},
    "triton_kernels": {"graph", "rng", "errors", "jit", "triton_kernels"},
}
# The public face and the commands stand outside of the flow: they put the stages together.


def imported(path: Path, package: list[str]) -> set[str]:
    """The parts of this package that a file imports, by the first name below lightning_gnnscale."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            targets = [full] if len(full) > 1 else [[*full, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        else:
            continue
        names |= {target[1] for target in targets if target[0] == "lightning_gnnscale" and len(target) > 1}
    return names


@pytest.mark.parametrize("stage", sorted(ALLOWED))
def test_imports_run_one_way(stage):
    folder = ROOT / stage if stage == "triton_kernels" else ROOT / "lightning_gnnscale" / stage
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        package = ["lightning_gnnscale", stage, *path.relative_to(folder).parts[:-1]]
        beyond = imported(path, package) - ALLOWED[stage]
        assert not beyond, f"{path.relative_to(ROOT)} imports {', '.join(sorted(beyond))}"


def test_the_reader_of_imports_sees_relative_and_absolute_ones(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from ..rng import fold\nfrom .. import events\nfrom .own import y\nimport lightning_gnnscale.model.gcn\n"
    )
    assert imported(path, ["lightning_gnnscale", "loader"]) == {"rng", "events", "loader", "model"}


def product_modules() -> dict[str, Path]:
    """Every module of the product, by its full name; a package by its own."""
    found = {}
    for folder, package in ((ROOT / "lightning_gnnscale", []), (ROOT / "triton_kernels", ["triton_kernels"])):
        for path in folder.rglob("*.py"):
            parts = ["lightning_gnnscale", *package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_modules(name: str, path: Path, modules) -> set[str]:
    """The modules that a module imports, within functions too; imports for a type checker alone are left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else source for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {one for one in found if one in modules and one != name}


def test_no_imports_go_in_a_circle():
    modules = product_modules()
    assert len(modules) > 100
    # Raises CycleError, which names the circle.
    order = TopologicalSorter({name: imported_modules(name, path, modules) for name, path in modules.items()})
    assert set(order.static_order()) == set(modules)


def test_nothing_of_the_package_imports_the_benchmarks():
    for name, path in product_modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [one for one in names if one.split(".")[0] in ("benchmarks", "tests")], name


def test_no_public_class_name_stands_for_two_things():
    homes = defaultdict(list)
    for path in product_modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_package_is_listed_for_the_build():
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "lightning_gnnscale").rglob("__init__.py")}
    for mapped in ("triton_kernels", "conf", "recipes"):
        for p in (ROOT / mapped).rglob("__init__.py"):
            found.add(".".join(["lightning_gnnscale", *p.parent.relative_to(ROOT).parts]))
    assert found == listed
