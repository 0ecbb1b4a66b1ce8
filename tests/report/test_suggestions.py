"""Each rule applies where its data says so, and nowhere else; the one that gains most is reported."""

import pytest

from lightning_gnnscale.report import suggestions
from lightning_gnnscale.report.suggestions import RULES, rises_since, suggest
from tests.report.recorded_runs import CONFIG, PARTS, QUALITY, log_of, recorded, summary_of


def with_parts(log: list[dict], **changed) -> list[dict]:
    return [event | changed if event["event"] == "parts" else event for event in log]


def with_run(log: list[dict], **changed) -> list[dict]:
    return [event | changed if event["event"] == "run" else event for event in log]


def with_counts(log: list[dict], **changed) -> list[dict]:
    return [event | {"counts": event["counts"] | changed} if "counts" in event else event for event in log]


QUIET = {"forward": 0.0, "wait": 0.02, "average": 0.05}
# What makes each rule speak, the words of its setting, and words of its reason.
CASES = {
    "loss_not_finite": (
        {"losses": (2.0, 1.5, float("nan"), float("nan"))},
        "model.lr=0.001",
        ["not finite from epoch 3"],
    ),
    "learns_nothing": (
        {"accuracies": (0.5, 0.61, 0.6, 0.61), "log": log_of()},
        "model.lr=0.001",
        ["61.0% is hardly above the share of the largest class, 60.0%", "scale of the features"],
    ),
    "ended_early": ({"finished": False}, "the same command again", ["ended early", "no checkpoint"]),
    "memory_nearly_full": (
        {"log": with_run(log_of(), memory_bytes=(1 << 30) + (64 << 20))},
        "datamodule.batch_size=256",
        ["train held 1.00 GiB of 1.06 GiB"],
    ),
    "halo_rows_read_separately": (
        {"log": log_of(wait=0.38, beside_read=0.6, beside_sample=0.1)},
        "pack_halo=true overwrite=true",
        ["waited 38% of the epoch", "256 B each", "would take 125 KiB more"],
    ),
    "waits_for_reads": (
        {"log": with_parts(log_of(wait=0.2, beside_read=0.6, beside_sample=0.1), packs_halo=True)},
        "feature_storage=float16",
        ["waited 20% of the epoch", "rows of 256 B"],
    ),
    "waits_for_samples": (
        {"log": log_of(wait=0.3, beside_sample=0.6, beside_read=0.1)},
        "'sampler.fanouts=[5,2]'",
        ["waited 30% of the epoch", "no core is free"],
    ),
    "averages_often": (
        {"log": log_of(average=0.4)},
        "datamodule.batch_size=1024",
        ["10 times took 40% of the epoch"],
    ),
    "exchanges_whole_rows": (
        {
            "log": [
                *log_of(exchange=0.5),
                *(
                    {
                        "event": "exchange",
                        "epoch": epoch,
                        "rank": 0,
                        "bytes": [{"layer": 1, "direction": "forward", "bytes": 10 << 20}],
                        "rows": [],
                        "cache_bytes": 0,
                        "seconds": 1.0,
                        "wait_seconds": 0.5,
                        "compute_seconds": 1.0,
                    }
                    for epoch in range(4)
                ),
            ],
            "config": {"strategy": {"exchange": {"_target_": "lightning_gnnscale.strategy.HaloExchange"}}},
        },
        "strategy/exchange=quantized strategy.exchange.bits=4 strategy.exchange.backward_threshold=1.0",
        ["took 50% of the epoch", "10.0 MiB of it"],
    ),
    "validates_long": (
        {"log": log_of(validation=0.6)},
        "trainer.check_val_every_n_epoch=3",
        ["took 60% of an epoch"],
    ),
    "came_to_rest": (
        {"accuracies": (0.5, *[0.9] * 19), "losses": [1.0] * 20},
        "callbacks=early_stopping",
        ["within 0.002 of its best in epoch 2 of 20", "saves about 3.60 s"],
    ),
    "still_moving": (
        {"accuracies": (0.5, 0.6, 0.7, 0.8)},
        "trainer.max_epochs=8",
        ["Not finished: val_acc was still rising at the end, by 0.1000 in the last of 4 validations."],
    ),
    "few_steps": (
        {"accuracies": (0.5, 0.6, 0.7, 0.8), "log": with_counts(log_of(), batches=4, seeds=1800)},
        "datamodule.batch_size=128",
        ["val_acc was still rising", "an epoch is 4 steps of 450 seeds a process"],
    ),
    "learns_by_heart": (
        {"accuracies": [0.5, 0.7, *[0.76] * 4], "losses": (2.0, 1.5, 1.2, 1.3, 1.4, 1.5)},
        "callbacks=early_stopping callbacks.early_stopping.monitor=val_loss callbacks.early_stopping.mode=min",
        ["val_loss rises since epoch 3: 1.2000 there, 1.5000 at the end."],
    ),
    "cuts_many_edges": (
        {
            "log": [event | ({"method": "spring"} if event["event"] == "partition" else {}) for event in log_of()],
            "summary": summary_of(log_of()) | {"quality": QUALITY | {"edge_cut_ratio": 0.5}},
        },
        "partitioner=streaming_multilevel",
        ["spring left 50% of the edges"],
    ),
    "targets_uneven": (
        {"log": with_parts(log_of(), train=[95, 5])},
        "'partitioner.balance={nodes:1.05,train:1.05}'",
        ["1.90 times the mean"],
    ),
}


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_where_its_data_says_so(tmp_path, name):
    choices, setting, words = CASES[name]
    run = recorded(tmp_path, **choices)
    found = getattr(suggestions, name)(run)
    assert found.setting == setting
    for word in words:
        assert word in found.why, found.why
    assert suggest(run) == found  # nothing else in this run gains as much


@pytest.mark.parametrize("name", CASES)
def test_no_rule_speaks_of_a_run_in_which_nothing_stands_out(tmp_path, name):
    assert getattr(suggestions, name)(recorded(tmp_path)) is None


def test_other_seeds_are_suggested_where_nothing_stands_out(tmp_path):
    assert suggest(recorded(tmp_path)).setting == "--multirun seed=0,1,2"


def test_an_accuracy_of_another_number_is_not_compared_with_the_largest_class(tmp_path):
    low = (0.5, 0.61, 0.6, 0.61)
    for number, (log, config) in enumerate(
        (
            (log_of(), {"model": CONFIG["model"] | {"_target_": "lightning_gnnscale.model.EdgeClassifier"}}),
            (with_parts(log_of(), label_counts=None), {}),
            (with_parts(log_of(), label_counts=[[300] + [1] * 23, [100] + [1] * 23]), {}),
        )
    ):
        assert (
            suggestions.learns_nothing(recorded(tmp_path / str(number), accuracies=low, log=log, config=config)) is None
        )


def test_another_thread_is_suggested_where_a_core_is_free(tmp_path):
    log = with_run(log_of(wait=0.3, beside_sample=0.6, beside_read=0.1), machine={"cores": 16})
    found = suggest(recorded(tmp_path, log=log))
    assert found.setting == "source.num_threads=2"
    assert "16 cores" in found.why


def test_packing_is_not_suggested_where_rows_came_from_memory(tmp_path):
    log = log_of(wait=0.38, beside_read=0.6, beside_sample=0.1)
    log = [event | ({"disk_bytes": 0} if event["event"] == "epoch_times" else {}) for event in log]
    assert suggestions.halo_rows_read_separately(recorded(tmp_path, log=log)) is None


def test_a_run_that_ended_early_goes_on_from_its_last_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    log = [event | ({"failed": True} if event.get("stage") == "train" else {}) for event in log_of()]
    found = suggest(recorded(tmp_path, log=log, finished=False))
    assert found.setting == f"resume={tmp_path / 'checkpoints' / 'last.ckpt'}"
    assert "in the stage train, after 4 epochs" in found.why


def test_what_a_minimised_metric_does_is_said_so(tmp_path):
    config = {"callbacks": {"checkpoint": {"monitor": "val_loss", "mode": "min"}}}
    found = suggestions.still_moving(recorded(tmp_path, config=config, losses=(2.0, 1.5, 1.25, 1.0)))
    assert found.why.startswith("Not finished: val_loss was still falling at the end, by 0.2500")


def test_a_run_whose_loss_still_falls_is_not_finished_though_its_accuracy_rests(tmp_path):
    found = suggest(recorded(tmp_path, losses=(2.0, 1.5, 1.25, 1.0)))
    assert found.why.startswith("Not finished: val_loss was still falling")
    assert found.setting == "trainer.max_epochs=8"


def test_a_loss_that_rises_again_asks_for_weight_decay_where_there_is_none(tmp_path):
    config = {"model": CONFIG["model"] | {"weight_decay": 0.0}}
    found = suggest(recorded(tmp_path, config=config, losses=(1.0, 1.5, 1.6, 1.7)))
    assert found.setting == "model.weight_decay=0.0005"


@pytest.mark.parametrize("losses", [(1.0, 1.01, 1.02, 1.01), (2.0, 1.0, 1.5, 1.4), (1.0, 2.0)])
def test_a_loss_that_wavers_does_not_rise(losses):
    assert rises_since(list(enumerate(losses, start=1))) is None


def test_parts_of_a_store_are_not_balanced_again(tmp_path):
    log = with_parts(log_of(), train=[95, 5])
    assert suggestions.targets_uneven(recorded(tmp_path, log=log, config={"store": "some/store"})) is None
    assert PARTS["train"] == [60, 40] and CONFIG.get("store") is None
