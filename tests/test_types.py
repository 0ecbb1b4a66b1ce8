"""What type checkers and `help` see of the public face."""

import ast
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store import StoreMaking, StoreSource

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_gnnscale"

FACE = """
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import lightning_gnnscale as gs
from torch_geometric.data import Data  # type: ignore[import-untyped]

stream = gs.open_edge_stream("edges.npy", num_nodes=10, to_undirected=True)
parts: gs.Partitioning = gs.partition(stream, method="spring", num_parts=8, seed=0)
quality: gs.PartitionQuality = gs.evaluate_partitioning(stream, parts.part_id, parts.num_parts, halo_hops=1)
store = gs.write_partition_store("root", stream, parts, features="f.npy", labels=np.zeros(10), masks={})
store.verify()
plan: gs.Plan = gs.plan(num_nodes=10, num_edges=20, feature_bytes="1GiB", num_devices=2)
print(plan.num_parts + 1, plan.explain(), gs.PartitionStore.open("root").num_nodes + 1)

dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([15, 10]), batch_size=512, source=gs.Threads())
gs.PartitionDataModule(
    root="root", stream=stream, features="f.npy", labels=np.zeros(10), masks={}, partitioner="spring", num_parts="auto",
    evaluation=gs.EvaluationOptions(sample=1), rows=gs.OwnerReads(),
)
full = gs.FullGraphDataModule("root", pack_halo=True)
gs.PartitionDataModule(Data(), num_parts=4)
reads = gs.access_probability(store, np.arange(3), num_layers=2, method="vip", fanouts=[15, 10], batch_size=1024)
placement: gs.Placement = gs.place(reads, num_devices=2, buffer_rows=1000, alpha=0.2)
gs.LayerwiseSampler([512, 512], locality=gs.LocalityBias(placement=placement))
model = gs.NodeClassifier(gs.model.GraphSAGE(dm.num_features, 256, dm.num_classes, num_layers=2), lr=0.01)
gs.GNNScaleStrategy(weights=gs.ModelAveraging(every_n_epochs=1), exchange=gs.NoExchange())
exchange = gs.SkipBroadcast(gs.EpochFixed(1), gs.BroadcastExchange())
strategy = gs.GNNScaleStrategy(weights=gs.GradientAveraging(), exchange=gs.Quantized(bits=4, backward_threshold=1))
trainer = L.Trainer(devices=2, strategy=strategy, callbacks=[gs.PredictionWriter("predictions.parquet")])
trainer.fit(model, dm)
for batch in dm.train_dataloader():
    if batch is not None:
        print(batch.num_nodes + 1)

for source in (gs.Threads(), gs.Processes(), gs.TaskGraphs(), gs.RayWorkers()):
    gs.PartitionDataModule("root", source=source)
for sampler in (gs.SaintSampler("node"), gs.ClusterSampler(3), gs.LinkSampler(), gs.LayerwiseSampler([512])):
    gs.PartitionDataModule("root", sampler=sampler)

class EightBits(gs.strategy.ExchangePolicy):
    def plan(self):
        return None

@dataclass(frozen=True)
class Inline:
    in_process = True
    batches_ahead = 1

    def connect(self, place: Any) -> Any:
        return None

gs.PartitionDataModule("root", source=Inline())
print(gs.__version__.split("."), gs.available_partitioners()[0].upper(), EightBits)
"""
# What a checker must refuse, and the word by which it does. Each passed while the names were `Any`.
WRONG = {
    "gs.NoSuchName": "NoSuchName",
    "gs.model.NoSuchLayer": "NoSuchLayer",
    'gs.PartitionDataModule("root", batchsize=3)': "batchsize",
    'gs.PartitionDataModule("root", mode=3)': "mode",
    'gs.PartitionDataModule(root="root", overwrite="yes")': "overwrite",
    'gs.FullGraphDataModule("root", parts=3)': "parts",
    "gs.PartitionStore.open('root').num_nodes.upper()": "upper",
}


def test_the_stub_says_what_the_table_of_lazy_names_says():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    found, submodules = {}, set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            names = {alias.name for alias in node.names}
            found |= dict.fromkeys(names, node.module) if node.module else {}
            submodules |= names if node.module is None else set()
    assert found == gs._HOME, "lightning_gnnscale/__init__.pyi and _HOME of __init__.py name different things"
    assert submodules == set(gs._SUBMODULES)
    listed = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed) == sorted(gs._HOME)


def test_the_keywords_that_make_a_store_are_typed():
    taken = {**inspect.signature(StoreSource.of).parameters, **inspect.signature(StoreSource).parameters}
    assert set(StoreMaking.__annotations__) == set(taken) - {"options", "seed"}  # the modules name `seed` themselves


def test_the_version_is_that_of_the_build():
    assert gs.__version__ == importlib.metadata.version("lightning-gnnscale")


def mypy_errors(folder: Path, cache: str) -> list[tuple[str, int, str]]:
    """About 30 s the first time, since mypy reads torch and Lightning."""
    words = ["mypy", "--no-error-summary", "--cache-dir", cache, "right.py", "wrong.py"]
    lines = [line.split(":", 3) for line in run_checker(words, folder).splitlines() if ": error:" in line]
    return [(file, int(line), message) for file, line, _, message in lines]


def pyright_errors(folder: Path, cache: str) -> list[tuple[str, int, str]]:
    said = json.loads(run_checker(["pyright", "--outputjson", "--pythonpath", sys.executable, "."], folder))
    found = [each for each in said["generalDiagnostics"] if each["severity"] == "error"]
    return [(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in found]


def run_checker(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # checkers do not follow the import hook of `pip install -e`
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # there are errors, and no others than are read
    return done.stdout


@pytest.fixture(scope="module", params=[mypy_errors, pyright_errors], ids=["mypy", "pyright"])
def checked(request, tmp_path_factory, pytestconfig):
    """The errors that a checker finds in FACE and in WRONG: (file, line, message)."""
    name = request.param.__name__.removesuffix("_errors")
    if find_spec(name) is None:
        pytest.skip(f"pip install {name}: it is not installed" + (", and of the extra dev" if name == "mypy" else ""))
    folder = tmp_path_factory.mktemp("face")
    (folder / "right.py").write_text(FACE)
    (folder / "wrong.py").write_text("\n".join(["import lightning_gnnscale as gs", *WRONG]) + "\n")
    return request.param(folder, str(pytestconfig.cache.mkdir("mypy")))


@pytest.mark.sweep
def test_a_type_checker_accepts_the_public_face_and_refuses_what_is_wrong(checked):
    assert [error for error in checked if error[0] != "wrong.py"] == []
    refused = {line: message for _, line, message in checked}
    assert set(refused) == set(range(2, 2 + len(WRONG))), checked
    for line, word in enumerate(WRONG.values(), start=2):
        assert word in refused[line]


def public_classes() -> list[type]:
    """The classes of the public face and of its submodules that are this package's own."""
    modules = [gs, *(getattr(gs, name) for name in gs._SUBMODULES)]
    names = [(module, name) for module in modules for name in getattr(module, "__all__", vars(module))]
    found = {getattr(module, name) for module, name in names if not name.startswith("_")}
    return sorted((each for each in found if inspect.isclass(each) and is_own(each)), key=lambda each: each.__name__)


def is_own(thing) -> bool:
    return (thing.__module__ or "").startswith("lightning_gnnscale")


def undocumented(cls: type) -> list[str]:
    """Public methods and properties of this package's that have no docstring, or only one of Lightning's or torch's."""
    missing = []
    for home in filter(is_own, cls.__mro__):
        for name, member in vars(home).items():
            member = getattr(member, "__func__", member)  # of class methods and static methods
            is_method = inspect.isfunction(member) or isinstance(member, property | cached_property)
            if name.startswith("_") or not is_method:
                continue
            homes = [each for each in cls.__mro__ if getattr(vars(each).get(name), "__doc__", None)]
            if not homes or not is_own(homes[0]):
                missing.append(f"{home.__module__}.{home.__qualname__}.{name}")
    return missing


def test_every_public_member_has_a_docstring_of_its_own():
    classes = public_classes()
    assert len(classes) > 100
    assert [each.__name__ for each in classes if not each.__doc__ or each.__doc__.startswith(f"{each.__name__}(")] == []
    assert sorted({name for each in classes for name in undocumented(each)}) == []
    functions = [getattr(gs, name) for name in gs.__all__ if inspect.isfunction(getattr(gs, name))]
    assert [each.__name__ for each in functions if not each.__doc__] == []


def test_the_search_for_docstrings_finds_what_has_none():
    class Base:
        def said(self):
            """Said."""

        def unsaid(self): ...

    class Own(Base):
        __module__ = Base.__module__ = "lightning_gnnscale.x"

        def said(self): ...

        def unsaid(self): ...

        @property
        def bare(self): ...

        @classmethod
        def made(cls): ...

    found = [name.rsplit(".", 1)[1] for name in undocumented(Own)]
    assert sorted(found) == ["bare", "made", "unsaid", "unsaid"]


def test_names_of_the_release_before_say_what_they_are_now():
    for old, now in (("TypedGraph", "hetero_graph"), ("KindBuffers", "TypedBuffers")):
        with pytest.raises(AttributeError, match=f"gs.{old} of 0.2 is gs.{now}"):
            getattr(gs, old)
