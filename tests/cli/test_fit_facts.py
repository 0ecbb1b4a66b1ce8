"""What a run says of its training, from the metrics that were logged."""

from types import SimpleNamespace

import pytest

from lightning_gnnscale.cli.run_folder import fit_facts

HEAD = "epoch,train_loss,val_acc,val_loss"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["0,,0.5,2.0", "0,1.5,,", "1,,0.75,3.0", "1,1.0,,"], {"epochs": 2, "best val_loss": 2.0}),
        (
            ["0,,0.5,2.0", "0,1.5,,", "1,,0.25,nan", "1,nan,,", "2,inf,,"],
            {"epochs": 3, "best val_loss": 2.0, "train_loss": "not finite from epoch 2 on: say a lower model.lr"},
        ),
        ([], {"epochs": 0}),
    ],
)
def test_losses_that_are_no_numbers_are_told(tmp_path, lines, expected):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.csv").write_text("\n".join([HEAD, *lines]))
    assert fit_facts(tmp_path, SimpleNamespace(monitor="val_loss", mode="min")) == expected
