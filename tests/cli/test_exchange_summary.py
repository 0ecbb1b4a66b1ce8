"""What a run's summary says of full-graph training: what its events tell, evaluation and what is sent once included."""

from lightning_gnnscale.cli.run_folder import _exchange_facts


def exchange(rank, cache_bytes, **counts):
    parts = [{"layer": 1, "direction": direction, "bytes": num_bytes} for direction, num_bytes in counts.items()]
    rows = [{"layer": 1, "sent": 3, "skipped": 1}]
    return {"event": "exchange", "rank": rank, "bytes": parts, "rows": rows, "cache_bytes": cache_bytes}


def test_all_bytes_are_told():
    log = [
        exchange(0, 1 << 20, forward=1 << 20, backward=2 << 20, static=3 << 20),
        exchange(1, 2 << 20, forward=1 << 20, evaluation=1 << 20),
        {"event": "exchange_evaluation", "rank": 0, "bytes": 4 << 20},
        {"event": "average", "bytes": 1 << 30},
    ]
    facts = _exchange_facts(log)
    assert facts["exchanged"] == "5.00 MiB forward, 2.00 MiB backward, 5.00 MiB to evaluate (all processes)"
    assert facts["rows skipped"] == "25.0%"
    assert facts["exchange caches"] == "2.00 MiB on the fullest process"


def test_a_run_without_exchange_says_nothing():
    assert _exchange_facts([{"event": "average", "bytes": 1}]) == {}
