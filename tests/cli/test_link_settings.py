"""Settings of runs on links, judged before anything is partitioned."""

from types import SimpleNamespace

import pytest

from lightning_gnnscale.cli.checks import check_dataset, check_settings, trains_on_links
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from tests.says import said

LINKS = ["sampler=links", "model=link_gcn"]
DATASET = SimpleNamespace(name="x", features=1, labels=None, masks={}, links={"val": None})


@pytest.mark.parametrize("words", [[], ["sampler=saint"], ["datamodule=full_graph"]])
def test_other_runs_are_not_on_links(words):
    assert not trains_on_links(compose_config("train", words))


def test_a_run_on_links_needs_no_labels():
    check_dataset(compose_config("train", [*LINKS, "callbacks=links", "test=false"]), DATASET)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampler=links"], "sampler model=link_predictor"),
        (["model=link_gcn"], "model sampler=links"),
        ([*LINKS, "callbacks=links"], "out dataset.hold_out.test=0.05 test=false"),
        ([*LINKS, "callbacks=links", "datamodule=full_graph"], "links needs mini-batches"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(words, message):
    with pytest.raises(UsageError, match=said(message)) as error:
        check_dataset(compose_config("train", words), DATASET)
    assert "\n" not in str(error.value)


ALONE = ["sampler=links", "callbacks=links", "sampler.positives=edge"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*ALONE, "model=embedding"],
            "sampler sampler.neighborhoods=false",
        ),
        (
            [*ALONE, "model=link_gcn", "sampler.neighborhoods=false"],
            "neighborhoods=false 2",
        ),
    ],
)
def test_a_model_without_layers_goes_with_links_alone(words, message):
    check_settings(compose_config("train", [*ALONE, "model=embedding", "sampler.neighborhoods=false"]))
    with pytest.raises(UsageError, match=said(message)) as error:
        check_settings(compose_config("train", words))
    assert "\n" not in str(error.value)
