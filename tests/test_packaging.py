"""What is installed: requirements and the lock agree, a wheel holds what runs and no more, import asks for no Linux."""

import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.oldest import oldest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Not in the lock: a CPU or a CUDA build of torch is the machine's choice, and these follow it.
OF_THE_MACHINE = {"torch", "torch-scatter", "triton"}


def requirements(names) -> list[Requirement]:
    return [Requirement(each) for each in names]


def test_compromised_releases_of_lightning_are_excluded():
    allowed = next(each.specifier for each in requirements(PROJECT["dependencies"]) if each.name == "lightning")
    refused = [version for version in ("2.5.1", "2.6.2", "2.6.3") if version in allowed]
    assert refused == [] and "2.6.0" in allowed and "2.6.1" in allowed and "2.6.4" in allowed


def test_every_requirement_has_a_lower_bound_to_be_tested_with():
    pinned = {Requirement(each).name for each in oldest(PROJECT["dependencies"])}
    assert pinned == {each.name for each in requirements(PROJECT["dependencies"])} - {"triton"}  # torch pins its own
    for extra in set(EXTRAS) - {"test", "dev"}:
        bounds = [each.specifier for each in requirements(EXTRAS[extra])]
        assert all(any(part.operator == ">=" for part in each) for each in bounds), extra


def test_the_oldest_versions_are_read_off_the_bounds():
    assert oldest(["a>=1.2,<3", "b[x]>=4,!=4.1; python_version > '3'", "c", "d==7"]) == ["a==1.2", "b==4", "d==7"]


def test_the_lock_has_a_version_of_every_requirement_and_the_bounds_allow_it():
    locked = locked_versions()
    for each in requirements([*PROJECT["dependencies"], *chain.from_iterable(EXTRAS.values())]):
        name = canonicalize_name(each.name)
        if name == PROJECT["name"]:
            continue  # an extra of its own
        assert (name in locked) == (name not in OF_THE_MACHINE), f"{name}: make lock"
        for version in locked.get(name, []):
            assert each.specifier.contains(version), f"lock.txt has {name} {version}, {each} is asked for: make lock"


def test_the_lock_names_no_host_no_path_and_forces_no_build_of_torch():
    text = (ROOT / "lock.txt").read_text()
    assert not [word for word in ("://", "--", " @ ", "file:", "/tmp", "/work", "/opt") if word in text]
    assert not [name for name in locked_versions() if name in OF_THE_MACHINE or name.startswith("nvidia")]


def test_the_lock_takes_no_beta_of_what_has_releases():
    betas = {
        name for name, versions in locked_versions().items() if any(Version(each).is_prerelease for each in versions)
    }
    assert betas <= {"opentelemetry-semantic-conventions"}, "make lock"  # mlflow asks for it, and there is nothing else


def test_what_the_first_tier_installs_has_wheels_and_is_small():
    first = {canonicalize_name(each.name) for each in requirements(EXTRAS["test"])}
    dear = {"torch-scatter", "mypy", "moto", "flask", "selenium", "ogb", "wandb", "tensorboard", "mlflow", "mkdocs"}
    assert not first & dear and "lightning-gnnscale[test]" in EXTRAS["dev"]
    makefile = (ROOT / "Makefile").read_text()
    assert '-e ".[test,ray,metis,kaminpar]"' in makefile and '-e ".[scatter,docs,dev]"' in makefile


def locked_versions() -> dict[str, list[str]]:
    """The versions of each package in lock.txt; several where they depend on Python or the system."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "lock.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            one = Requirement(line)
            (exact,) = one.specifier
            assert exact.operator == "==" and not one.extras, line
            found.setdefault(canonicalize_name(one.name), []).append(exact.version)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel of the files that git tracks, built beside the working tree."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: which files would be released is not known")
    folder = tmp_path_factory.mktemp("build")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0"):
        if name and (ROOT / name).is_file():
            copy = folder / "tree" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=folder / "tree", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_a_wheel_holds_modules_settings_and_types_and_no_measured_rows(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("lightning_gnnscale/") for name in names)
    kinds = {Path(name).suffix or name for name in names}
    assert kinds == {".py", ".pyi", ".yaml", ".html", ".json", ".typed"}
    assert not [name for name in names if "measured" in name or "/tests/" in name]
    for folder in ("conf", "recipes"):
        given = {f"lightning_gnnscale/{each.relative_to(ROOT)}" for each in (ROOT / folder).rglob("*.yaml")}
        assert given <= set(names)
    modules = {str(each.relative_to(ROOT)) for each in (ROOT / "lightning_gnnscale").rglob("*.py")}
    modules |= {f"lightning_gnnscale/{each.relative_to(ROOT)}" for each in (ROOT / "triton_kernels").rglob("*.py")}
    assert modules <= set(names)
    assert {f"lightning_gnnscale/{name}" for name in ("py.typed", "__init__.pyi", "cli/settings.json")} <= set(names)
    assert sum(each.compress_size for each in wheel.infolist()) < 2 << 20


def test_a_wheel_runs_where_the_source_is_not(wheel, tmp_path):
    wheel.extractall(tmp_path)
    ask = (
        "import lightning_gnnscale as gs, importlib.metadata as m; from lightning_gnnscale.cli import program;"
        "print(gs.__file__, gs.__version__ == m.version('lightning-gnnscale')); program()"
    )
    words = ["partition", "recipe=demo", "--cfg", "job"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {ask}", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{tmp_path}/lightning_gnnscale/__init__.py True\n")
    assert "partitioner:" in done.stdout


WITHOUT_LINUX = """
import mmap, os, signal
for module, names in {
    os: "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity memfd_create fdatasync O_DIRECT O_TMPFILE "
        "copy_file_range eventfd pidfd_open splice",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX",
    mmap: "MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import importlib, pkgutil
import lightning as L
import numpy as np
import lightning_gnnscale as gs

for each in pkgutil.walk_packages(gs.__path__, "lightning_gnnscale."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
rng = np.random.default_rng(0)
stream = gs.open_edge_stream(rng.integers(0, 400, (2, 3000)), num_nodes=400, to_undirected=True)
masks = {name: rng.random(400) < 0.4 for name in ("train", "val", "test")}
given = dict(features=rng.random((400, 8), np.float32), labels=rng.integers(0, 3, 400), masks=masks)
sampler = gs.NeighborSampler([4, 4])
dm = gs.PartitionDataModule(root="store", stream=stream, **given, num_parts=4, sampler=sampler, rows="planned")
model = gs.NodeClassifier(gs.model.GraphSAGE(8, 8, 3, num_layers=2))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy="gnnscale", **quiet)
trainer.fit(model, dm)
assert trainer.test(model, dm, verbose=False)[0]["test_acc"] > 0
workers = gs.PartitionDataModule("store", sampler=sampler, source="processes")
try:
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, workers)
except gs.GNNScaleError as error:
    print(error)
"""


@pytest.mark.sweep
def test_it_is_imported_and_trains_where_python_has_no_names_of_linux_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_LINUX], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == (
        "worker processes share memory in a way that only Linux has: use source=threads"
    )
