"""`--help` lists what each choice takes, also where no file does."""

import pytest

from lightning_gnnscale.cli.main import main


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["train", "--help"],
            ["partitioner=", "  ldg                    passes=", "dataset=NAME", "  files  ", "reader", "label_noise=",
             "model.backbone.", "norm=null", "max_epochs: 30", "logger="],
        ),
        (["train", "model=gat", "model.lr=0.5", "-h"], ["heads=", "lr: 0.5", "_target_: lightning_gnnscale.model.GAT"]),
        (["partition", "--help", "recipe=cora"], ["name: cora", "kaminpar"]),
        (["stores", "--help"], ["unused_days: null", "gnnscale stores: list the partition stores"]),
        (["bench", "partition", "--help"], ["gnnscale bench partition", "methods:"]),
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
