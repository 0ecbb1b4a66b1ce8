"""How fast feature rows are gathered through placements and caches, beside plain copies; and what caches hit."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch

from ..graph import CSC
from ..loader import BufferPool
from ..partition_store.features import DenseFeatures, row_code, to_stored
from ..placement import FeatureBuffer, FeatureCache, Placement, access_probability, place
from ..placement.feature_buffer import TIERS
from ..rng import batch_key, permutation
from ..triton_kernels.sample_neighbors import Workspace, sample_neighbors
from .graphs import power_law_graph
from .present import LEFT, draw_bars, table, tell
from .runner import Case, Runner, digest, machine_line
from .turns import Taken, in_this_process, measure, ratio, speeds

BOUND, PLAIN = "copy in order (bound)", "plain table"
POLICIES = ("lru", "sieve", "belady")
STORAGES = ("float16", "int8", "int4")
WAYS = {
    "device": ("on", LEFT),
    "way": ("way", LEFT),
    "million": ("million\nrows/s", ".2f"),
    "gb_per_s": ("GB/s", ".1f"),
    "share_of_bound": ("share of\nbound", ".0%"),
    "time_over_plain": ("time over\nplain", ".2f"),
    **{tier: (tier, ".0%") for tier in TIERS},
}
CACHES = {
    "policy": ("policy", LEFT),
    "cache_share": ("rows of\nall", ".0%"),
    "hit_rate": ("hits of\nfar reads", ".1%"),
    **{tier: (tier, ".0%") for tier in TIERS},
    "seconds": ("seconds", ".2f"),
}


class _Graph:
    """What `access_probability` asks of a store."""

    def __init__(self, csc: CSC):
        self.csc = csc


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 20_000_000,
    dim: int = 128,
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    num_batches: int = 24,
    num_devices: int = 2,
    buffer_share: float = 0.1,
    cache_shares: Sequence[float] = (0.01, 0.05),
    repeats: int = 5,
    seed: int = 0,
    minutes: float | None = None,
    again: str = "none",
) -> dict[str, list[dict]]:
    """Gather the rows that sampled batches read, in turns, in every way that this machine offers.

    Every way copies into one output that is reused. Rows stored as float16 come as float16, codes as float32; all are
    counted by their size in float32. The bound is a sequential copy of the same number of bytes. With a GPU the same is
    measured on it: rows on the device beside a copy on the device, and rows of the host beside a copy from pinned
    memory.

    Args:
        output_dir: Folder for `gather.csv`, `cache.csv` and `gather.png`.
        num_nodes, num_edges: Number of nodes and edges in the generated graph. The ends of its arcs are drawn in
            proportion to Pareto(1.8) + 1 weights.
        dim: Number of float32 features per node.
        fanouts, batch_size, num_batches: Fan-outs, size and number of the batches; one node in ten is a target.
        num_devices, buffer_share: Number of devices in the placement, and share of the rows in each one's buffer;
            placed by rule with alpha 0.
        cache_shares: Cache sizes, as shares of all rows.
        repeats: Number of measurements of each way, in turns; the median counts.
        seed: Seed of the graph and of the batches.
        minutes, again: See `Runner`; the ways of one device are one case, as they are measured in turns.

    Returns:
        {"gather": rows, "cache": rows}.
    """
    facts = (num_nodes, num_edges, dim, *fanouts, batch_size, num_batches, num_devices, buffer_share, repeats, seed)

    @cache
    def made() -> tuple[DenseFeatures, Placement, list[np.ndarray]]:
        tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
        csc = power_law_graph(num_nodes, num_edges, seed)
        features = DenseFeatures(np.random.default_rng(seed).random((num_nodes, dim), np.float32))
        train_nodes = np.sort(permutation(num_nodes, seed)[: max(1, num_nodes // 10)])
        batches = list(_batches(csc, train_nodes, tuple(fanouts), batch_size, num_batches, seed))
        prob = access_probability(_Graph(csc), train_nodes, fanouts=fanouts, batch_size=batch_size)
        return features, place(prob, num_devices, max(1, round(buffer_share * num_nodes)), alpha=0), batches

    ways = [
        Case(
            {"device": "cpu", "settings": digest(*facts, *cache_shares)},
            lambda: _speeds(*made(), cache_shares, repeats),
            contenders=None,
        )
    ]
    if torch.cuda.is_available():
        key = {"device": "cuda", "settings": digest(*facts, torch.cuda.get_device_name(0))}
        ways.append(Case(key, lambda: _cuda_speeds(*made(), repeats), contenders=None))
    else:
        tell("no GPU is at hand: the ways that need one are left out")
    caches = [
        Case({"policy": policy, "cache_share": share, "settings": digest(*facts)}, partial(_hits, made, share, policy))
        for share in cache_shares
        for policy in POLICIES
    ]
    with Runner(output_dir, minutes, again) as runner:
        rows = runner.rows(ways, "gather.csv")
        title = "Gathering the rows of batches: medians of runs in turns"
        tell(table([row | {"million": row["rows_per_s"] / 1e6} for row in rows], WAYS, title, machine_line()))
        labels = [f"{row['device']}: {row['way']}" for row in rows]
        gb_per_s = [row["gb_per_s"] for row in rows]
        draw_bars(runner.folder / "gather.png", labels, gb_per_s, "GB of feature rows a second", form="{:.1f}")
        hits = runner.rows(caches, "cache.csv")
        tell(table(hits, CACHES, "Caches of rows that lie on no device"))
    return {"gather": rows, "cache": hits}


def _batches(csc, train_nodes, fanouts, batch_size, num_batches, seed) -> Iterator[np.ndarray]:
    """Yield the nodes of sampled batches, epoch after epoch."""
    space = Workspace(csc.num_rows, csc.indices.dtype)
    for batch in range(num_batches):
        epoch, place_in = divmod(batch, -(-len(train_nodes) // batch_size))
        order = train_nodes[permutation(len(train_nodes), batch_key(seed, epoch, 0, 0))]
        seeds = order[place_in * batch_size : (place_in + 1) * batch_size]
        yield sample_neighbors(csc, seeds, fanouts, batch_key(seed, epoch, 0, batch), workspace=space).n_id


def _speeds(features, placement: Placement, batches, cache_shares, repeats: int) -> list[dict]:
    """Measure the ways of the CPU."""
    pool, most = BufferPool(), max(len(nodes) for nodes in batches)
    out = pool.take((most, features.dim), features.dtype)
    target, source = torch.from_numpy(out), torch.from_numpy(features.array)
    ids = [torch.from_numpy(nodes) for nodes in batches]
    ways: dict[str, Callable[[int], object]] = {
        BOUND: lambda i: np.copyto(out[: len(batches[i])], features.array[: len(batches[i])]),
        PLAIN: lambda i: features.gather(batches[i], out[: len(batches[i])]),
        "torch.index_select": lambda i: torch.index_select(source, 0, ids[i], out=target[: len(ids[i])]),
        "numpy.take": lambda i: np.take(features.array, batches[i], 0, out=out[: len(batches[i])], mode="clip"),
    }
    for storage in STORAGES:
        table = DenseFeatures(to_stored(features.array, storage), row_code(storage, features.dim))
        rows = pool.take((most, table.dim), table.dtype)
        ways[f"plain table of {storage}"] = lambda i, table=table, rows=rows: table.gather(
            batches[i], rows[: len(batches[i])]
        )
    buffers = {f"placement, {len(placement.rows)} devices": FeatureBuffer(placement, features)}
    for share in cache_shares:
        lru = FeatureCache(max(1, round(share * features.num_rows)), "lru")
        buffers[f"placement, LRU cache of {share:.0%}"] = FeatureBuffer(placement, features, cache=lru)
    for name, buffer in buffers.items():
        ways[name] = lambda i, buffer=buffer: buffer.gather(batches[i], out[: len(batches[i])])
    found = measure({name: in_this_process(_all(way, batches)) for name, way in ways.items()}, repeats)
    rows = _rows("cpu", found, features, BOUND, {name: buffer.hits for name, buffer in buffers.items()})
    for buffer in buffers.values():
        buffer.close()
    return rows


def _cuda_speeds(features, placement: Placement, batches, repeats: int) -> list[dict]:
    """Measure the ways of the first GPU: all rows on it, none on it, and those of the placement."""
    device = torch.device("cuda", 0)
    num, most = features.num_rows, max(len(nodes) for nodes in batches)
    out = torch.empty((most, features.dim), dtype=torch.float32, device=device)
    ids = [torch.from_numpy(nodes).to(device) for nodes in batches]
    resident = torch.from_numpy(features.array).to(device)
    pinned = torch.empty((most, features.dim), dtype=torch.float32, pin_memory=True)
    everywhere = Placement((np.arange(num),), ((0,),), num, None, {}, ({},), "all")
    nowhere = Placement((np.arange(1),), ((0,),), num, None, {}, ({},), "one row")
    alone = Placement((placement.rows[0],), ((0,),), num, None, {}, ({},), placement.method)
    buffers = {
        "rows on the device": FeatureBuffer(everywhere, features, on="cuda:0"),
        "rows of the host": FeatureBuffer(nowhere, features, on="cuda:0"),
        "placement": FeatureBuffer(alone, features, on="cuda:0"),
    }
    ways: dict[str, Callable[[int], object]] = {
        "copy on the device (bound)": lambda i: out[: len(ids[i])].copy_(resident[: len(ids[i])]),
        "copy from pinned memory (bound)": lambda i: out[: len(ids[i])].copy_(pinned[: len(ids[i])], non_blocking=True),
        "torch.index_select": lambda i: torch.index_select(resident, 0, ids[i], out=out[: len(ids[i])]),
    }
    for name, buffer in buffers.items():
        ways[name] = lambda i, buffer=buffer: buffer.gather(ids[i], out[: len(ids[i])])
    found = measure({name: _on_device(_all(way, batches)) for name, way in ways.items()}, repeats)
    bound = {"rows of the host": "copy from pinned memory (bound)"}
    hits = {name: buffer.hits for name, buffer in buffers.items()}
    rows = [
        row
        for name in found
        for row in _rows("cuda", found, features, bound.get(name, "copy on the device (bound)"), hits)
        if row["way"] == name
    ]
    for buffer in buffers.values():
        buffer.close()
    return rows


def _all(way: Callable[[int], object], batches) -> Callable[[], int]:
    def gather() -> int:
        for i in range(len(batches)):
            way(i)
        return sum(len(nodes) for nodes in batches)

    return gather


def _on_device(gather: Callable[[], int]) -> Callable[[], Taken]:
    """Wait for the device before and after, and take the time between as both clocks."""

    def contender() -> Taken:
        torch.cuda.synchronize()
        start = time.perf_counter()
        rows = gather()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        return Taken(rows, taken, taken)

    return contender


def _rows(device: str, found: dict[str, list[Taken]], features, bound: str, hits: dict[str, dict]) -> list[dict]:
    row_bytes = features.dim * features.dtype.itemsize
    rows = []
    for name, runs in found.items():
        counts = hits.get(name, {})
        total = sum(counts.values())
        rows.append(
            {
                "device": device,
                "way": name,
                "rows_per_s": round(speeds(runs)["seeds_per_s"]),
                "gb_per_s": round(speeds(runs)["seeds_per_s"] * row_bytes / 1e9, 3),
                "share_of_bound": ratio(runs, found[bound], "wall_s"),
                "time_over_plain": 1 / ratio(runs, found[PLAIN], "wall_s") if PLAIN in found else None,
                **{tier: round(counts[tier] / total, 4) if total else None for tier in TIERS if counts},
            }
        )
    return rows


def _hits(made: Callable, share: float, policy: str) -> dict:
    """Count what a policy hits of the reads that the placement leaves to the host."""
    features, placement, batches = made()
    capacity = max(1, round(share * features.num_rows))
    buffer = FeatureBuffer(placement, features, cache=FeatureCache(capacity, policy))
    buffer.expect(batches)
    out = np.empty((max(len(nodes) for nodes in batches), features.dim), features.dtype)
    start = time.perf_counter()
    for nodes in batches:
        buffer.gather(nodes, out[: len(nodes)])
    seconds = time.perf_counter() - start
    hits, total = buffer.hits, sum(buffer.hits.values())
    buffer.close()
    return {
        "hit_rate": round(hits["cache"] / max(1, hits["cache"] + hits["host"] + hits["disk"]), 4),
        **{tier: round(hits[tier] / total, 4) for tier in TIERS},
        "seconds": round(seconds, 3),
    }
