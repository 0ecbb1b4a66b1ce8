"""What a run's summary says of where its feature rows were."""

from lightning_gnnscale.cli.run_folder import _by_rank, _placement_facts

SHARES = {"local": 0.9, "peer": 0.0, "host": 0.1, "disk": 0.0}


def placed(rank: int, device: int) -> dict:
    held = {"device": device, "peer": 0, "pinned": 1 << 20, "host": 0, "disk": 0}
    known = {"method": "rule", "buffer_rows": 9, "buffer_bytes": device, "predicted": SHARES, "alpha": 1.0}
    return {"event": "placement", "rank": rank, "tier_bytes": held, "gpu": f"H200 GPU-{rank}", **known}


def test_bytes_of_tiers_are_told_and_kept_by_rank():
    log = [placed(1, 3 << 20), placed(0, 2 << 20)]
    assert _placement_facts(log)["feature rows"] == "2.00 MiB device, 1.00 MiB pinned"
    assert [held["device"] for held in _by_rank(log, "placement", "tier_bytes")] == [2 << 20, 3 << 20]
    assert _by_rank(log, "placement", "gpu") == ["H200 GPU-0", "H200 GPU-1"]
    assert _by_rank(log, "training_peak", "gpu") == []


def test_why_nothing_was_placed_is_told():
    read = {"event": "row_reads", "rank": 0, "how": "mapped", "why": "1 GiB fits", "not_placed": "no GPU"}
    assert _placement_facts([read]) == {"feature rows": "mapped: 1 GiB fits (no GPU)"}
    assert _placement_facts([read | {"not_placed": ""}]) == {"feature rows": "mapped: 1 GiB fits"}
    assert _placement_facts([]) == {}
