"""How fast feature rows are gathered through placements and caches, compared with plain copies; cache hits."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch

from lightning_gnnscale.dataset.feature_storage import row_code
from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.partition_store.features import DenseFeatures, to_stored
from lightning_gnnscale.placement import FeatureBuffer, FeatureCache, Placement, access_probability, place
from lightning_gnnscale.placement.feature_buffer import TIERS
from lightning_gnnscale.placement.link_cost import gpu_name
from lightning_gnnscale.rng import batch_key, permutation
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace, sample_neighbors

from .graphs import power_law_input
from .present import LEFT, draw_bars, show, tell
from .runner import Case, Runner, benchmark, digest, machine_line
from .turns import Contender, Taken, in_this_process, measure, ratio, speeds

BOUND, PLAIN = "copy in order (bound)", "plain table"
DEVICE_BOUND, PINNED_BOUND = "copy on the device (bound)", "copy from pinned memory (bound)"
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
Way = Callable[[int], object]  # gathers the rows of the batch of this number


@dataclass(frozen=True)
class GatherBench:
    """Gather the rows that sampled batches read, in turns, in every way that this machine offers.

    Every way copies into one output that is reused. Rows stored as float16 come as float16, quantised ones as float32.
    All are counted by their size in float32. The bound is a sequential copy of as many bytes. With a GPU the same is
    measured on it: rows on the device and a copy on the device, rows of the host and a copy from pinned
    memory. Writes `gather.csv`, `cache.csv` and `gather.png`; the ways of one device are one case, as they are measured
    in turns.

    Attributes:
        fanouts, batch_size, num_batches: Fan-outs, size and number of the batches; one node in ten is a target.
        num_devices, buffer_share: Number of devices in the placement, and share of the rows in each one's buffer;
            placed by rule with alpha 0.
        cache_shares: Cache sizes, as shares of all rows.
    """

    num_nodes: int = 1_000_000
    num_edges: int = 20_000_000
    dim: int = 128
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 1024
    num_batches: int = 24
    num_devices: int = 2
    buffer_share: float = 0.1
    cache_shares: Sequence[float] = (0.01, 0.05)
    repeats: int = 5
    seed: int = 0

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"gather": rows, "cache": rows}."""
        facts = (self.num_nodes, self.num_edges, self.dim, *self.fanouts, self.batch_size, self.num_batches)
        facts += (self.num_devices, self.buffer_share, self.repeats, self.seed)
        made = cache(self._made)
        key = {"device": "cpu", "settings": digest(*facts, *self.cache_shares)}
        ways = [Case(key, lambda: self._turns(*made(), self.cache_shares), None)]
        if torch.cuda.is_available():
            key = {"device": "cuda", "settings": digest(*facts, gpu_name(torch.device("cuda", 0)))}
            ways.append(Case(key, lambda: self._cuda_turns(*made()), None))
        else:
            tell("there is no GPU: the ways that need one are left out")
        rows = runner.rows(ways, "gather.csv")
        shown = [row | {"million": row["rows_per_s"] / 1e6} for row in rows]
        show(shown, WAYS, "Gathering the rows of batches: medians of runs in turns", machine_line())
        xlabel = "GB of feature rows a second"
        draw_bars(runner.folder / "gather.png", rows, "{device}: {way}", "gb_per_s", xlabel, form="{:.1f}")
        settings = {"settings": digest(*facts)}
        caches = [
            Case({"policy": policy, "cache_share": share, **settings}, partial(_hits, made, share, policy))
            for share, policy in product(self.cache_shares, POLICIES)
        ]
        hits = runner.rows(caches, "cache.csv")
        show(hits, CACHES, "Caches of rows that are on no device")
        return {"gather": rows, "cache": hits}

    def _made(self) -> tuple[DenseFeatures, Placement, list[np.ndarray]]:
        csc, features = power_law_input(self.num_nodes, self.num_edges, self.dim, self.seed)
        train_nodes = np.sort(permutation(self.num_nodes, self.seed)[: max(1, self.num_nodes // 10)])
        options = {"fanouts": self.fanouts, "batch_size": self.batch_size}
        prob = access_probability(SimpleNamespace(csc=csc), train_nodes, **options)
        placement = place(prob, self.num_devices, max(1, round(self.buffer_share * self.num_nodes)), alpha=0)
        return DenseFeatures(features), placement, list(self._batches(csc, train_nodes))

    def _batches(self, csc, train_nodes) -> Iterator[np.ndarray]:
        """Yield the nodes of sampled batches, epoch after epoch."""
        space, fanouts, size = Workspace(csc.num_rows, csc.indices.dtype), tuple(self.fanouts), self.batch_size
        for batch in range(self.num_batches):
            epoch, turn = divmod(batch, -(-len(train_nodes) // size))
            order = train_nodes[permutation(len(train_nodes), batch_key(self.seed, epoch, 0, 0))]
            key = batch_key(self.seed, epoch, 0, batch)
            yield sample_neighbors(csc, order[turn * size : (turn + 1) * size], fanouts, key, workspace=space).n_id

    def _turns(self, features, placement: Placement, batches, cache_shares) -> list[dict]:
        """Measure the ways of the CPU."""
        pool, most = BufferPool(), max(map(len, batches))
        out = pool.take((most, features.dim), features.dtype)
        target, source = torch.from_numpy(out), torch.from_numpy(features.array)
        ids = [torch.from_numpy(nodes) for nodes in batches]
        ways: dict[str, Way] = {
            BOUND: lambda i: np.copyto(out[: len(ids[i])], features.array[: len(ids[i])]),
            PLAIN: lambda i: features.read(batches[i], out[: len(ids[i])]),
            "torch.index_select": lambda i: torch.index_select(source, 0, ids[i], out=target[: len(ids[i])]),
            "numpy.take": lambda i: np.take(features.array, batches[i], 0, out=out[: len(ids[i])], mode="clip"),
        }
        for storage in STORAGES:
            table = DenseFeatures(to_stored(features.array, storage), row_code(storage, features.dim))
            ways[f"plain table of {storage}"] = _through(table, batches, pool.take((most, table.dim), table.dtype))
        buffers = {f"placement, {len(placement.rows)} devices": FeatureBuffer(placement, features)}
        for share in cache_shares:
            lru = FeatureCache(max(1, round(share * features.num_rows)), "lru")
            buffers[f"placement, LRU cache of {share:.0%}"] = FeatureBuffer(placement, features, cache=lru)
        ways |= {name: _through(buffer, batches, out) for name, buffer in buffers.items()}
        found = measure({name: in_this_process(_all(way, batches)) for name, way in ways.items()}, self.repeats)
        return _rows("cpu", found, features, buffers, lambda name: BOUND)

    def _cuda_turns(self, features, placement: Placement, batches) -> list[dict]:
        """Measure the ways of the first GPU: all rows on it, none on it, and those of the placement."""
        device, num = torch.device("cuda", 0), features.num_rows
        shape = (max(map(len, batches)), features.dim)
        out = torch.empty(shape, dtype=torch.float32, device=device)
        ids = [torch.from_numpy(nodes).to(device) for nodes in batches]
        resident = torch.from_numpy(features.array).to(device)
        pinned = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        on_device = {
            "rows on the device": np.arange(num),
            "rows of the host": np.arange(1),
            "placement": placement.rows[0],
        }
        buffers = {
            name: FeatureBuffer(Placement((rows,), ((0,),), num, None, {}, ({},), name), features, on="cuda:0")
            for name, rows in on_device.items()
        }
        ways: dict[str, Way] = {
            DEVICE_BOUND: lambda i: out[: len(ids[i])].copy_(resident[: len(ids[i])]),
            PINNED_BOUND: lambda i: out[: len(ids[i])].copy_(pinned[: len(ids[i])], non_blocking=True),
            "torch.index_select": lambda i: torch.index_select(resident, 0, ids[i], out=out[: len(ids[i])]),
        }
        ways |= {name: _through(buffer, ids, out) for name, buffer in buffers.items()}
        found = measure({name: _on_device(_all(way, batches)) for name, way in ways.items()}, self.repeats)
        bound = {"rows of the host": PINNED_BOUND}
        return _rows("cuda", found, features, buffers, lambda name: bound.get(name, DEVICE_BOUND))


run = benchmark(GatherBench)


def _through(table, ids: Sequence, out) -> Way:
    return lambda i: table.read(ids[i], out[: len(ids[i])])


def _all(way: Way, batches) -> Callable[[], int]:
    def gather() -> int:
        for i in range(len(batches)):
            way(i)
        return sum(map(len, batches))

    return gather


def _on_device(gather: Callable[[], int]) -> Contender:
    """Wait for the device before and after, and take the time between as both clocks."""

    def contender() -> Taken:
        torch.cuda.synchronize()
        start = time.perf_counter()
        rows = gather()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        return Taken(rows, taken, taken)

    return contender


def _rows(device: str, found: dict[str, list[Taken]], features, buffers: Mapping, bound: Callable) -> list[dict]:
    """Return a row for each way, with the tiers that its buffer read from; the buffers are closed."""
    rows = []
    for name, runs in found.items():
        speed = speeds(runs)["seeds_per_s"]
        row = {"device": device, "way": name, "rows_per_s": round(speed)}
        row["gb_per_s"] = round(speed * features.dim * features.dtype.itemsize / 1e9, 3)
        row["share_of_bound"] = ratio(runs, found[bound(name)], "wall_s")
        row["time_over_plain"] = 1 / ratio(runs, found[PLAIN], "wall_s") if PLAIN in found else None
        rows.append(row | (_tiers(buffers[name].hits) if name in buffers else {}))
    for buffer in buffers.values():
        buffer.close()
    return rows


def _tiers(hits: Mapping[str, int]) -> dict[str, float | None]:
    total = sum(hits.values())
    return {tier: round(hits[tier] / total, 4) if total else None for tier in TIERS}


def _hits(made: Callable, share: float, policy: str) -> dict:
    """Count what a policy hits of the reads that the placement leaves to the host."""
    features, placement, batches = made()
    buffer = FeatureBuffer(placement, features, cache=FeatureCache(max(1, round(share * features.num_rows)), policy))
    buffer.expect(batches)
    out = np.empty((max(map(len, batches)), features.dim), features.dtype)
    start = time.perf_counter()
    for nodes in batches:
        buffer.read(nodes, out[: len(nodes)])
    seconds, hits = time.perf_counter() - start, buffer.hits
    buffer.close()
    rate = hits["cache"] / max(1, hits["cache"] + hits["host"] + hits["disk"])
    return {"hit_rate": round(rate, 4), **_tiers(hits), "seconds": round(seconds, 3)}
