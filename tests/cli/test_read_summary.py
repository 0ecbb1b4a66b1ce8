"""What an epoch has read, in the summary of a run."""

from lightning_gnnscale.cli.run_folder import _read_facts, read_counts

EPOCH = {"event": "rows_read", "rows": 10, "used_bytes": 100, "feature_bytes": 300, "disk_bytes": 350, "passes": 3.0}


def test_the_mean_epoch_of_all_processes_is_told():
    log = [EPOCH | {"epoch": epoch, "predicted_bytes": 290, "pid": pid} for epoch in (0, 1) for pid in (1, 2)]
    assert read_counts(log)["epoch_reads"] == {
        "rows": 20, "used_bytes": 200, "feature_bytes": 600, "disk_bytes": 700, "predicted_bytes": 580,
        "other_bytes": 100, "passes": 3.0,
    }  # fmt: skip
    told = "600 B of features and 100 B of edges and all else, 3.5 times the 200 B of features in batches"
    assert _read_facts(log) == {"read in an epoch": f"{told} (features predicted 580 B)"}


def test_rows_left_to_the_page_cache_are_not_told():
    assert read_counts([{"event": "epoch_times", "epoch": 0}]) == {} == _read_facts([])
