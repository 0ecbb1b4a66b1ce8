"""What targets take, read from their source: the same as an import tells, for everything that ships."""

import inspect
import re
from pathlib import Path

import pytest

from lightning_gnnscale.cli.compose import _parameters, recipes_folder
from lightning_gnnscale.cli.declared import constant, declared
from lightning_gnnscale.placement.place import METHODS
from lightning_gnnscale.strategy.exchange import BOUNDS

CONF = Path(__file__).parents[2] / "conf"
FILES = [*CONF.rglob("*.yaml"), *recipes_folder().rglob("*.yaml")]
TARGETS = {found for path in FILES for found in re.findall(r"_target_: *([\w.]+)", path.read_text())}
TARGETS = {target for target in TARGETS if not target.startswith("benchmarks.")}  # which are partials of a runner
TARGETS |= {f"lightning_gnnscale.model.{name}" for name in ("GAT", "GCN", "NGNN")}
TARGETS |= {"lightning_gnnscale.NodeClassifier", "lightning.pytorch.callbacks.LearningRateMonitor"}
LOGGERS = ("WandbLogger", "MLFlowLogger", "TensorBoardLogger")


@pytest.mark.parametrize("target", sorted(target for target in TARGETS if not target.endswith(LOGGERS)))
def test_the_source_says_what_an_import_tells(target):
    found, (live, takes_more) = declared(target), _parameters(target, "")
    assert found is not None and set(found.parameters) == set(live) and found.takes_more == takes_more
    for name, one in found.parameters.items():
        told = live[name]
        assert (one.default is inspect.Parameter.empty) == (told.default is inspect.Parameter.empty), name
        if isinstance(told.default, bool | int | float | str | None):
            assert one.default == told.default, name
        if one.annotation is not inspect.Parameter.empty and not isinstance(told.annotation, str):
            # PyG writes typing's Callable, which is that of collections.abc.
            assert str(one.annotation).replace("collections.abc.", "typing.") == str(told.annotation).replace(
                "collections.abc.", "typing."
            ), name


def test_names_of_the_code_are_those_of_its_tables():
    assert constant("lightning_gnnscale.placement.place.METHODS") == METHODS
    names = constant("lightning_gnnscale.strategy.exchange.bounds.BOUNDS")
    assert names == {name: bound.__name__ for name, bound in BOUNDS.items()}


@pytest.mark.parametrize(
    "target", ["no_such_package.Thing", "lightning_gnnscale.model.NoSuch", "os", "torch.nn.Linear.x"]
)
def test_what_cannot_be_told_is_left_to_an_import(target):
    assert declared(target) is None


def test_lines_on_arguments_come_from_the_docstring():
    assert declared("lightning_gnnscale.sampler.NeighborSampler").told["fanouts"]
    assert "Number of" in declared("lightning_gnnscale.datamodule.EvaluationOptions").told["negatives"]
