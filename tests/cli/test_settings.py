"""The description of settings: it says of all that ships what an import tells, and knows where it does not."""

import json
import sys

import pytest

from lightning_gnnscale.cli import settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.settings import Setting, described, elsewhere, keys_of_choices, known_taker, taker_of, walk
from tests.describe_settings import describe, text_of


def test_the_file_says_what_an_import_tells():
    made, kept = json.loads(text_of(describe())), described()
    other = {name for name, version in made["versions"].items() if kept["versions"][name] != version}
    for name, found in made["targets"].items():
        if name.partition(".")[0] not in other:
            assert kept["targets"][name] == found, f"{name}: make settings"
    for key in ("commands", "told", "choices", "partitioners"):
        assert kept[key] == made[key], f"{key}: make settings"
    assert set(kept["targets"]) == set(made["targets"]), "make settings"


@pytest.mark.parametrize(
    "target", ["no_such_package.Thing", "lightning_gnnscale.model.NoSuch", "os", "torch.nn.Linear"]
)
def test_what_is_not_described_is_left_to_an_import(target):
    assert known_taker(target) is None


def test_what_an_other_version_takes_is_left_to_an_import(monkeypatch):
    monkeypatch.setitem(described()["versions"], "lightning", "0")
    known_taker.cache_clear()
    assert known_taker("lightning.Trainer") is None
    assert known_taker("lightning_gnnscale.NodeClassifier") == known_taker("lightning_gnnscale.model.NodeClassifier")
    known_taker.cache_clear()


def test_types_defaults_and_words_of_a_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "described_here.py").write_text(
        "from collections.abc import Mapping, Sequence\n"
        "from lightning_gnnscale.sampler import NeighborSampler\n"
        "def keep(a, b: int | None = 2, c: Sequence[int] = (1, 2), d: Mapping = None, e: float = .5, *, f: set):\n"
        "    '''Do.\n\n    Args:\n        a, b: Two\n            lines.\n        f: One.\n    '''\n"
        "class Own(NeighborSampler):\n    def __init__(self, length: int, **rest): pass\n"
    )
    assert taker_of("described_here.keep").settings == {
        "a": Setting("", None, "Two lines."),
        "b": Setting("int|null", "2", "Two lines."),
        "c": Setting("list", "[1,2]", ""),
        "d": Setting("dict|null", "null", ""),
        "e": Setting("float", "0.5", ""),
        "f": Setting("other", None, "One."),
    }
    own = taker_of("described_here.Own")
    assert list(own.settings)[-1] == "length" and "fanouts" in own.settings and not own.takes_more
    del sys.modules["described_here"]


def test_lines_on_arguments_come_from_the_docstring_of_whoever_takes_them():
    told = known_taker("lightning_gnnscale.dataset.generate").settings
    assert told["homophily"].told and told["relabel"].told
    assert known_taker("lightning_gnnscale.sampler.NeighborSampler").settings["fanouts"].told
    assert "Number of" in known_taker("lightning_gnnscale.datamodule.EvaluationOptions").settings["negatives"].told


def test_a_walk_meets_what_is_given_and_what_else_is_taken():
    config = {
        "model": {"_target_": "lightning_gnnscale.model.NodeClassifier", "lr": 1, "backbone": {"x": 2}},
        "seed": 3,
    }
    found = {place.key: place.value for place in walk(config)}
    assert found["model.lr"] == 1 and found["model.backbone.x"] == 2 and found["seed"] == 3
    assert found["model.optimizer"] == settings.UNSET and "model.multilabel" not in found
    options = walk({"partitioner": {"_target_": "lightning_gnnscale.partitioner.partition", "method": "ldg"}})
    assert {"partitioner.passes", "partitioner.balance"} <= {place.key for place in options}


def test_a_name_alone_is_found_where_it_is_a_setting():
    assert elsewhere("lr") == "model.lr" and elsewhere("max_epoch") == "trainer.max_epochs"
    assert elsewhere("batch_size") == "datamodule.batch_size" and elsewhere("xyzzy") is None
    assert keys_of_choices()["partitioner.gamma"] == ["partitioner=fennel"]


def test_choices_of_the_code_are_their_files_with_what_the_name_says():
    made, base = (compose_config("train", [f"model={name}"]).model for name in ("link_gat", "link_predictor"))
    assert made.backbone._target_ == "lightning_gnnscale.model.GAT" and made.lr == base.lr
    assert made.backbone.hidden_channels == base.backbone.hidden_channels
