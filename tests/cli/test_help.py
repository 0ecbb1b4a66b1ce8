"""`--help` is short, `--help GROUP` lists what each choice takes, also where no file does."""

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.main import main


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "--help"], ["partitioner=", "backbone.num_layers=2", "max_epochs=30", "logger=", "verify=true  "]),
        (["train", "--help", "partitioner"], ["  ldg                    passes=", "partitioner.balance=null"]),
        (["train", "--help", "dataset"], ["dataset=NAME", "  files  ", "reader", "label_noise=", "dataset.homophily="]),
        (["train", "--help", "model.backbone"], ["model.backbone.norm=null", "model.backbone.num_layers=2"]),
        (["train", "--help", "strategy/exchange"], ["strategy/exchange=", "skip_epoch_fixed"]),
        (["train", "model=gat", "model.lr=0.5", "-h", "model"], ["heads=", "model.lr=0.5", "model=  ", "link_gat"]),
        (["--help", "sampler", "sampler=links"], ["sampler.fanouts=", "sampler.negatives"]),
        (["help", "partition"], ["gnnscale partition: partition a graph"]),
        (["partition", "--help", "recipe=cora"], ["name=cora", "kaminpar"]),
        (["stores", "--help"], ["unused_days=null", "gnnscale stores: list the partition stores"]),
        (["bench", "partition", "--help"], ["gnnscale bench partition", "methods="]),
    ],
)  # fmt: skip
def test_help_names_the_settings(capsys, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    main(words)
    out = capsys.readouterr().out
    for part in parts:
        assert part in out
    assert max(map(len, out.splitlines())) < 200
    assert not list(tmp_path.iterdir())


def test_help_is_short_and_says_nothing_twice(capsys):
    main(["train", "--help"])
    assert len(capsys.readouterr().out.splitlines()) < 90
    main(["train", "--help", "callbacks"])
    out = capsys.readouterr().out
    assert out.count("When ``True``, saves a `last.ckpt` copy") == 1 and "see callbacks.checkpoint.save_last" in out


def test_help_on_what_is_no_group(capsys):
    assert "--help samler: no setting or group (did you mean sampler?)" in refused(capsys, "train", "--help", "samler")
