"""What a summary tells of rows of other machines, and of workers."""

import pytest

from lightning_gnnscale.cli.run_folder import blocked_share, learned_row_counts, owner_counts, worker_counts


def test_rows_of_owners_are_added_up():
    told = {"event": "owner_reads", "rows": 100, "rows_away": 30, "bytes_away": 900, "waiting_share": 0.04}
    log = [told, told | {"rows": 300, "rows_away": 10, "waiting_share": 0.02}, {"event": "stage"}]
    assert owner_counts(log) == {"remote_row_share": 0.1, "remote_bytes": 1800}
    assert owner_counts(log[2:]) == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"event": "owner_reads", "rows": 10, "rows_away": 3, "bytes_away": 9, "waiting_share": 0.5},
        {"event": "learned_rows", "bytes_away": 9, "staleness": 0, "waiting_share": 0.5, "rows_stale": 0}
        | {"greatest_age": 0},
    ],
    ids=lambda asked: asked["event"],
)
def test_the_blocked_share_has_waits_for_batches_and_for_learned_rows(asked):
    """Of the process that waited most, in epochs but the first, without validation and saving."""
    cold = {"event": "epoch_times", "epoch": 0, "rank": 0, "seconds": 9.0, "training": {"wait": 9.0}}
    spent = {"wait": 0.25, "sample": 0.125, "exchange": 0.125, "forward": 3.5, "validation": 4.0, "save": 2.0}
    warm = cold | {"epoch": 1, "seconds": 10.0, "training": spent}
    other = warm | {"rank": 1, "training": {"forward": 10.0}}
    assert blocked_share([cold, warm, other, asked]) == {"fetch_blocked_share": 0.125}
    assert blocked_share([cold, warm, other]) == blocked_share([asked]) == {}


def test_learned_rows_are_added_up_and_the_oldest_is_told():
    told = {"event": "learned_rows", "bytes_away": 900, "staleness": 2, "waiting_share": 0.04}
    log = [told | {"rows_stale": 3, "greatest_age": 1}, told | {"rows_stale": 4, "greatest_age": 2}]
    counts = {"learned_row_bytes": 1800, "learned_rows_blocked_share": 0.04, "stale_rows": 7, "greatest_staleness": 2}
    assert learned_row_counts(log) == counts
    assert learned_row_counts([log[0] | {"bytes_away": 0, "staleness": 0}]) == {}


def test_workers_are_counted_by_what_was_told_last_of_each_machine():
    early = {"event": "preparation", "node": 0, "busy_s": 1.0, "num_workers": 2, "parts_read": 1}
    early |= {"seconds": 5.0, "waited_s": 4.0}
    last = early | {"busy_s": 12.0, "parts_read": 4, "seconds": 10.0, "waited_s": 5.0}
    other = early | {"node": 1, "busy_s": 4.0, "seconds": 10.0, "waited_s": 0.0}
    follower = {"event": "preparation", "node": 0, "rank": 1, "seconds": 10.0, "waited_s": 0.0}
    counts = worker_counts([early, last, other, follower])
    assert counts == {"parts_read": 5, "workers_busy": 0.4, "workers_needed": 3}
    assert worker_counts([follower]) == {}


def test_rows_that_workers_asked_other_machines_for_are_those_told_last():
    told = {"event": "preparation", "node": 0, "busy_s": 1.0, "num_workers": 2, "parts_read": 0, "seconds": 5.0}
    told |= {"waited_s": 0.0, "rows_gathered": 50, "rows_away": 20, "bytes_away": 10}
    log = [told, told | {"rows_gathered": 100, "rows_away": 30, "bytes_away": 900}, told | {"node": 1}]
    counts = worker_counts(log)
    assert counts["remote_row_share"] == pytest.approx(50 / 150) and counts["remote_bytes"] == 910
