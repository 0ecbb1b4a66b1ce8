"""What environment variables hold is used, and neither written nor printed."""

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_gnnscale.cli.environment import hidden, written
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.recipes import check_no_credentials

SECRET = "s3cr3t-value"


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("OWN_SECRET", SECRET)


def test_a_reference_is_written_as_it_is_and_used_all_the_same():
    config = OmegaConf.create(
        {
            "a": "${oc.env:OWN_SECRET}",
            "b": "${a}/x",
            "c": {"d": ["${b}", "${oc.env:NOT_THERE,1}"]},
            "lr": 0.1,
            "e": "${lr}",
            "f": "${oc.env:NOT_THERE,null}",
        }
    )
    assert (config.a, config.b, config.c.d[1], config.f) == (SECRET, f"{SECRET}/x", "1", None)
    told = written(config)
    assert SECRET not in yaml.safe_dump(told) and SECRET not in OmegaConf.to_yaml(told)
    reference = "${oc.env:OWN_SECRET}"
    assert told["a"] == reference and told["b"] == f"{reference}/x" and told["c"]["d"][0] == f"{reference}/x"
    assert (told["e"], told["lr"]) == (0.1, 0.1)
    assert config.a == SECRET  # it is read again afterwards


def test_what_was_read_is_hidden_in_text():
    assert OmegaConf.create({"a": "x${oc.env:OWN_SECRET}y"}).a == f"x{SECRET}y"
    assert hidden(f"dataset.edges: {SECRET}: no such file") == "dataset.edges: ${oc.env:OWN_SECRET}: no such file"
    told = hidden({"facts": {"store": f"/a/{SECRET}"}, "stages": [{"note": SECRET, "seconds": 1.5}]})
    assert SECRET not in str(told) and told["stages"][0]["seconds"] == 1.5


@pytest.mark.parametrize("word", ["name=${oc.env:OWN_SECRET}", "++dataset.name=a-${oc.env:OWN_SECRET,x}"])
def test_no_folder_is_named_by_a_variable(word):
    with pytest.raises(UsageError, match="name names folders.*name=") as caught:
        check_no_credentials("train", None, [word])
    assert SECRET not in str(caught.value)
