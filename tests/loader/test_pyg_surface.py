"""The table of PyG's arguments and attributes in `docs/howto/pyg_users.md` holds, against the PyG that is installed."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch_geometric import loader as pyg
from torch_geometric.data import Data, HeteroData

import lightning_gnnscale as gs
from tests.says import said

PAGE = Path(__file__).parents[2] / "docs/howto/pyg_users.md"
PYG = (pyg.NodeLoader, pyg.LinkLoader, pyg.NeighborLoader, pyg.LinkNeighborLoader, torch.utils.data.DataLoader)
LOADERS = {"NeighborLoader": gs.NeighborLoader, "LinkNeighborLoader": gs.LinkNeighborLoader}
DATA = Data(x=torch.ones(6, 2), edge_index=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]))
OF_TIMES = {"input_time", "edge_label_time", "time_attr", "temporal_strategy", "weight_attr"}


def table(title: str) -> dict[str, str]:
    """Return the second column by the names in the first, each of which stands once."""
    rows = PAGE.read_text().split(f"| {title} | here | how |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    found = [(name, row.split(" | ")[1]) for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert len(dict(found)) == len(found)
    return dict(found)


ARGUMENTS, ATTRIBUTES = table("argument"), table("attribute")


def named(found: dict[str, str], how: str) -> list[str]:
    return [name for name, told in found.items() if told == how]


def test_every_argument_of_pyg_stands_in_the_table():
    asked = {name for loader in PYG for name in inspect.signature(loader.__init__).parameters}
    assert set(ARGUMENTS) == asked - {"self", "kwargs"}
    assert set(ARGUMENTS.values()) == {"followed", "no effect", "refused"}


def test_every_attribute_of_pyg_stands_in_the_table():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [pyg.NeighborLoader(DATA, [1]), pyg.LinkNeighborLoader(DATA, [1])]
    public = {name for one in made for name in (*dir(type(one)), *vars(one)) if not name.startswith("_")}
    assert set(ATTRIBUTES) == public


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", named(ARGUMENTS, "refused"))
def test_what_is_refused_is_one_line_with_what_to_do(loader, name):
    with pytest.raises(ValueError, match=said(f"{loader} {name}=")) as error:
        LOADERS[loader](DATA, [1], **{name: [1]})
    assert "\n" not in str(error.value) and not str(error.value).endswith(": ")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", named(ARGUMENTS, "no effect"))
def test_what_has_no_effect_changes_no_batch(loader, name):
    given = [next(iter(LOADERS[loader](DATA, [1], batch_size=2, **one))) for one in ({}, {name: 1})]
    assert all(torch.equal(given[0][key], given[1][key]) for key in ("n_id", "e_id", "edge_index"))


def test_what_is_followed_is_an_argument_here_or_has_its_effect():
    named_here = {one for loader in LOADERS.values() for one in inspect.signature(loader.__init__).parameters}
    assert set(named(ARGUMENTS, "followed")) - named_here == {*EFFECTS, "custom_cls"}


TIMED = Data(**DATA.to_dict(), t=torch.tensor([5, 0, 5, 0, 0, 0]), w=torch.tensor([1.0, 0, 1, 1, 1]))
CALLS = []
EFFECTS = {
    "disjoint": ({"disjoint": True}, lambda loader: first(loader).batch[:2].tolist() == [0, 1]),
    "input_id": (
        {"input_nodes": [4, 2], "input_id": torch.tensor([10, 11])},
        lambda loader: first(loader).input_id.tolist() == [10, 11],
    ),
    "transform_sampler_output": (
        {"transform_sampler_output": lambda out: CALLS.append(out) or out},
        lambda loader: first(loader).num_nodes == 2 and len(CALLS) > 0,
    ),
    "drop_last": ({"drop_last": True, "batch_size": 4}, lambda loader: len(list(loader)) == 1),
    "num_workers": ({"num_workers": 2}, lambda loader: loader.num_workers == 2),
    # Node 0 comes after the time of the seed 1, and node 2 after that of the seed 3.
    "time_attr": (
        {"time_attr": "t", "input_nodes": [1, 3], "input_time": [1, 9]},
        lambda loader: first(loader).e_id.tolist() == [2],
    ),
    "input_time": (
        {"time_attr": "t", "input_nodes": [1, 3], "input_time": [9, 9]},
        lambda loader: first(loader).e_id.tolist() == [0, 2],
    ),
    "temporal_strategy": (
        {"time_attr": "t", "input_nodes": [1], "input_time": [9], "temporal_strategy": "last"},
        lambda loader: first(loader).e_id.tolist() == [0],
    ),
    "weight_attr": ({"weight_attr": "w", "input_nodes": [1, 2]}, lambda loader: first(loader).e_id.tolist() == [0]),
}


def first(loader):
    return next(iter(loader))


@pytest.mark.parametrize("name", EFFECTS)
def test_what_is_followed_has_its_effect(name):
    given, has_effect = EFFECTS[name]
    assert has_effect(gs.NeighborLoader(TIMED, [1], **{"batch_size": 2} | given))


def test_batches_of_stores_are_of_the_custom_class():
    class Own(HeteroData):
        pass

    data = HeteroData({"a": {"x": torch.ones(4, 2)}})
    data["a", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    loader = gs.NeighborLoader((data, data), [1], input_nodes=("a", [1, 2]), batch_size=2, custom_cls=Own)
    assert type(first(loader)) is Own


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_there_or_says_why_not(name):
    made = [gs.NeighborLoader(DATA, [1]), gs.LinkNeighborLoader(DATA, [1])]
    if ATTRIBUTES[name] == "there":
        assert any(hasattr(one, name) for one in made)
        return
    assert ATTRIBUTES[name] == "not here"
    for one in made:
        with pytest.raises(AttributeError, match=f"no attribute '{name}': ."):
            getattr(one, name)
