"""The parts' states of model averaging in a checkpoint: joined over ranks, and dealt to other ranks."""

from typing import Any

from .. import averaging

SHARED_KEY = -1
_BY_PART = ("own", "waiting", "controls")


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what `ModelAveraging.state_dict` returned on each rank, in rank order, into one for any number of ranks."""
    states = [state for state in states if state]
    if not states:
        return {}
    same = {name: states[0][name] for name in ("policy", "optimizer_state", "parts")}
    merged = {**same, "optimizers": {}, "steps": [state["steps"] for state in states]}
    merged["start"] = next((state["start"] for state in states if state["start"] is not None), None)
    for name in _BY_PART:
        merged[name] = {part: kept for state in states for part, kept in state[name].items()}
    for rank, state in enumerate(states):
        for part, optimizer in state["optimizers"].items():
            merged["optimizers"][rank if merged["optimizer_state"] == "shared" else part] = optimizer
    return merged


def shared_optimizer(by_rank: dict[int, Any], num_ranks: int) -> dict[int, Any]:
    """Return what this rank goes on from: its own state, or one of those saved where there were other ranks."""
    rank = averaging.rank()
    if num_ranks != averaging.world_size() and by_rank:
        rank = sorted(by_rank)[rank % len(by_rank)]
    return {SHARED_KEY: by_rank[rank]} if rank in by_rank else {}
