"""`NeighborLoader` against PyG's and GraphBolt's: seeds per CPU-second of all processes, in turns in one run."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from lightning_gnnscale.dataset import load_pyg
from lightning_gnnscale.dataset.feature_storage import row_code
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.loader import BufferPool, LoaderOptions, NeighborLoader, PartData, PartLoader
from lightning_gnnscale.partition_store import WholeGraph, write_partition_store
from lightning_gnnscale.partition_store.features import DenseFeatures, to_stored
from lightning_gnnscale.partition_store.part_graph import load_part_graph
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.placement import Placement
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import LocalityBias, NeighborSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace

from .graphs import NUM_CLASSES, power_law_input, some_seeds, typed_power_law
from .loader import epochs_of, whole_graph_loader
from .present import LEFT, draw_bars, show, tell
from .runner import Case, Runner, benchmark, digest, machine_line
from .turns import (
    Contender,
    Peer,
    Taken,
    batches_title,
    in_this_process,
    measure,
    ratio,
    row_copies,
    speeds,
    write_graph,
)

LOADER, SAMPLING, COPIES = "NeighborLoader", "sampling alone", "row copy alone (bound)"
STORED, INT8, ONE_NODE_TYPE = "PartLoader", "PartLoader, int8 rows", "sampling alone, edge types unseen"
PEERS = {"pyg": "PyG NeighborLoader", "graphbolt": "GraphBolt"}
INSTALL = {
    "pyg": "bench.pyg_python=VENV/bin/python of an environment with torch, torch-geometric and torch-sparse "
    "(pip install --no-build-isolation torch-sparse), or install torch-sparse here",
    "graphbolt": "bench.graphbolt_python=VENV/bin/python of an environment of its own: pip install torch==2.2.1 "
    "torchdata==0.7.1 dgl==2.1.0 'numpy<2' pandas pyyaml pydantic",
}
COLUMNS = {
    "label": ("what", LEFT),
    "seeds_per_cpu_s": ("seeds per\nCPU-second", ",.0f"),
    "seeds_per_cpu_s_best": ("best", ",.0f"),
    "seeds_per_s": ("seeds per\nsecond", ",.0f"),
    "rows_a_seed": ("rows\na seed", ".0f"),
    "ns_per_edge": ("CPU ns\nan edge", ".1f"),
    "edge_rate_over_one_node_type": ("edges over\none node type's", ".2f"),
    "share_of_copy_bound": ("share of\ncopy bound", ".0%"),
    "times_one_thread": ("times one\nthread", ".2f"),
    "batch_time_over_uniform": ("time over\nuniform", ".2f"),
    "edge_time_over_uniform": ("same,\nan edge", ".2f"),
    "times_pyg": ("times\nPyG", ".1f"),
    "times_pyg_workers": ("times PyG,\nworkers", ".1f"),
    "times_graphbolt": ("times\nGraphBolt", ".1f"),
}


class Name(NamedTuple):
    """A contender: what runs, how much its samples prefer close rows, threads, worker processes."""

    what: str
    scale: float = 1.0
    threads: int = 1
    workers: int = 0


@dataclass(frozen=True)
class SampleBench:
    """Measure whole batches and sampling alone, uniform and locality-biased, the copy bound, and the peers, in turns.

    A DataModule's batches from rows that are stored in 8 bits, decoded to float32 as they are copied, run beside them.

    The copy bound is the time in which the feature rows of uniform batches alone are copied from random places into a
    reused buffer. The preferred rows are those of the nodes of highest degree. Writes `sample.csv` and `sample.png`;
    all is one case, as it is measured in turns.

    Attributes:
        heterogeneous: Whether the graph has 3 node types and 6 edge types, in MAG240M's proportions; seeds are papers,
            which alone have features. Then these are measured: a DataModule's batches from a store, those of
            `NeighborLoader` from the same `HeteroData`, sampling alone by edge type and regardless of edge types (as
            many neighbours a node as all edge types together allow), and PyG's loader.
        fanouts, batch_size: Fan-outs of all samplers, of each edge type if heterogeneous, and seeds per batch.
        threads: Numbers of threads of `NeighborLoader` and of the copies; the others are compared with the first
            number.
        locality_scale: The factor s of the locality-biased samples, > 1.
        buffer_share: Share of the nodes whose rows are preferred, in (0, 1].
        num_batches, peer_batches: Number of batches in a measurement of this package, and of a peer.
        peer_workers: Numbers of worker processes of PyG's loader; GraphBolt runs without. Without worker processes a
            peer runs with one thread and with all; ratios take the setting that needs less CPU time a seed.
        pyg_python: Interpreter with torch-geometric and torch-sparse or pyg-lib; None: this one, if it has them. It is
            refused with ValueError if it cannot run its peer.
        graphbolt_python: Interpreter with dgl, likewise; None leaves GraphBolt out.
    """

    heterogeneous: bool = False
    num_nodes: int = 1_000_000
    num_edges: int = 20_000_000
    dim: int = 128
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 1024
    threads: Sequence[int] = (1, 2)
    locality_scale: float = 8.0
    buffer_share: float = 0.1
    num_batches: int = 40
    peer_batches: int = 4
    repeats: int = 5
    peer_workers: Sequence[int] = (0, 2)
    pyg_python: str | None = None
    graphbolt_python: str | None = None
    seed: int = 0

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"sample": rows}."""
        pythons = {"pyg": self.pyg_python or _this_python(), "graphbolt": self.graphbolt_python}
        if self.heterogeneous and pythons.pop("graphbolt"):
            raise ValueError("bench.heterogeneous=true compares with PyG alone: leave bench.graphbolt_python=null")
        facts = (
            self.heterogeneous,
            self.num_nodes,
            self.num_edges,
            self.dim,
            *self.fanouts,
            self.batch_size,
            *self.threads,
        )
        facts += (self.locality_scale, self.buffer_share, self.num_batches, self.peer_batches, self.repeats)
        key = {"settings": digest(*facts, *self.peer_workers, *pythons.values(), self.seed)}
        rows = runner.rows([Case(key, partial(self._turns, pythons), None)], "sample.csv")
        shown = [row | {"label": _label(row)} for row in rows]
        columns = {name: spec for name, spec in COLUMNS.items() if any(row.get(name) is not None for row in shown)}
        names = {kind: f"{kind}_versions" for kind in PEERS}
        versions = {f"{PEERS[kind]}: {row[name]}" for kind, name in names.items() for row in rows if row.get(name)}
        caption = "; ".join([machine_line(), *sorted(versions)])
        fanouts = [*self.fanouts[:-1], f"{self.fanouts[-1]} of each edge type"] if self.heterogeneous else self.fanouts
        show(shown, columns, batches_title(self.batch_size, fanouts), caption)
        xlabel = "seeds per CPU-second of all processes"
        draw_bars(runner.folder / "sample.png", shown, "{label}", "seeds_per_cpu_s", xlabel)
        return {"sample": rows}

    def _turns(self, pythons: Mapping[str, str | None]) -> list[dict]:
        with TemporaryDirectory(prefix="gnnscale-sample-") as folder, ExitStack() as stack:
            contenders, counts = (self._by_node_type if self.heterogeneous else self._of_one_node_type)(Path(folder))
            peers: dict[str, Peer] = {}
            for kind, python in pythons.items():
                if python is None:
                    tell(f"{PEERS[kind]} is left out: pass {INSTALL[kind]}", soft_wrap=True)
                else:
                    options = {"fanouts": list(self.fanouts), "batch_size": self.batch_size}
                    peers[kind] = stack.enter_context(Peer(kind, os.path.expanduser(python), folder, options))
            peer_of: dict[Name, Peer] = {}
            for kind, peer in peers.items():
                for workers in self.peer_workers if kind == "pyg" else (0,):
                    for threads in sorted({1, os.cpu_count() or 1}) if workers == 0 else (1,):
                        name = Name(PEERS[kind], threads=threads, workers=workers)
                        contenders[name], peer_of[name] = peer.contender(workers, threads), peer
            found = measure(contenders, self.repeats)
        counts |= {name: (peer.rows_a_seed, None) for name, peer in peer_of.items()}
        told = {kind: [f"{name} {version}" for name, version in peer.versions.items()] for kind, peer in peers.items()}
        versions = {f"{kind}_versions": ", ".join(words) for kind, words in told.items()}
        return [row | versions for row in rows_of(found, counts, self.threads[0])]

    def _of_one_node_type(self, folder: Path) -> tuple[dict[Name, Contender], dict]:
        """Return what `_ours` does, and the copies beside it; write the peers' graph."""
        csc, features = power_law_input(self.num_nodes, self.num_edges, self.dim, self.seed)
        seeds = some_seeds(self.num_nodes, self.num_batches * self.batch_size, self.seed)
        contenders, counts = self._ours(csc, features, seeds)
        uniform = counts[Name(LOADER, threads=self.threads[0])][0]
        for count in self.threads:
            copies = row_copies(features, uniform, self.batch_size, self.num_batches, count)
            contenders[Name(COPIES, threads=count)] = in_this_process(copies)
        write_graph(folder, csc, features, seeds[: self.peer_batches * self.batch_size])
        return contenders, counts

    def _by_node_type(self, folder: Path) -> tuple[dict[Name, Contender], dict]:
        """Return our contenders on a heterogeneous graph, and their counts; write PyG's graph."""
        data = typed_power_law(self.num_nodes, self.num_edges, self.dim, self.seed)
        papers = data["paper"].num_nodes
        seeds = some_seeds(papers, min(papers, self.num_batches * self.batch_size), self.seed)
        dataset = load_pyg(data)
        store = write_partition_store(
            folder / "store", dataset.stream, partition(dataset.stream, "range", num_parts=1), dataset
        )
        part, fanouts = load_part_graph(store, len(self.fanouts), 0), {"*": self.fanouts}
        targets = np.sort(store.store_nid[seeds])  # papers are the first node type
        contenders, counts, first = {}, {}, self.threads[0]
        for count in self.threads:
            options = LoaderOptions(self.batch_size, self.seed, num_threads=count)
            sampler, made = NeighborSampler(fanouts), PartData(lambda part_id: part, store.features)
            loader = PartLoader([0], made, {0: targets}, sampler, options)
            name = Name(STORED, threads=count)
            contenders[name] = in_this_process(epochs_of(loader))
            counts[name] = counts.get(Name(STORED, threads=first)) or _rows_and_edges(loader, len(seeds))
        shared = {"batch_size": self.batch_size, "shuffle": True, "seed": self.seed, "is_sorted": True}
        loader = NeighborLoader(data, list(self.fanouts), ("paper", torch.from_numpy(seeds)), **shared)
        contenders[Name(LOADER)] = in_this_process(lambda: sum(batch["paper"].batch_size for batch in loader))
        together = [-1 if fanout < 0 else fanout * len(data.edge_types) for fanout in self.fanouts]
        for what, sampler in ((SAMPLING, NeighborSampler(fanouts)), (ONE_NODE_TYPE, NeighborSampler(together))):
            contenders[Name(what)] = in_this_process(self._samples(sampler, part, targets))
            seen = PartLoader(
                [0], PartData(lambda part_id: part), {0: targets}, sampler, LoaderOptions(self.batch_size)
            )
            counts[Name(what)] = (None, _rows_and_edges(seen, len(seeds))[1])
        _write_typed(folder, data, seeds[: self.peer_batches * self.batch_size])
        return contenders, counts

    def _ours(self, csc: CSC, features: np.ndarray, seeds: np.ndarray) -> tuple[dict[Name, Contender], dict]:
        """Return our contenders, and the feature rows and edges a seed of each, None where it reads none."""
        from torch_geometric.data import Data

        target = torch.repeat_interleave(torch.arange(csc.num_rows), torch.from_numpy(csc.in_degree))
        data = Data(
            x=torch.from_numpy(features),
            edge_index=torch.stack([torch.from_numpy(csc.indices).long(), target]),
            y=torch.arange(csc.num_rows) % NUM_CLASSES,
            train_mask=torch.ones(csc.num_rows, dtype=torch.bool),
        )
        biased = LocalityBias(_best_connected(csc, self.buffer_share), self.locality_scale)
        shared = {"batch_size": self.batch_size, "shuffle": True, "seed": self.seed, "is_sorted": True}
        contenders, counts, first = {}, {}, self.threads[0]
        for scale, bias in ((1.0, None), (self.locality_scale, biased)):
            options = {} if bias is None else {"locality": bias}
            for count in self.threads if bias is None else [first]:
                name, given = Name(LOADER, scale, count), {"num_threads": count, **shared, **options}
                loader = NeighborLoader(data, self.fanouts, torch.from_numpy(seeds), **given)
                contenders[name] = in_this_process(partial(_epoch, loader))
                counts[name] = counts.get(Name(LOADER, scale, first)) or _rows_and_edges(loader, len(seeds))
            samples = self._samples(NeighborSampler(self.fanouts, **options), WholeGraph.of(csc, 0), seeds)
            contenders[Name(SAMPLING, scale)] = in_this_process(samples)
            counts[Name(SAMPLING, scale)] = (None, counts[Name(LOADER, scale, first)][1])
        table = DenseFeatures(to_stored(features, "int8"), row_code("int8", features.shape[1]))
        for count in self.threads:
            name, given = Name(INT8, threads=count), LoaderOptions(self.batch_size, self.seed, num_threads=count)
            loader = whole_graph_loader(csc, table, seeds, self.fanouts, given)
            contenders[name], counts[name] = in_this_process(epochs_of(loader)), counts[Name(LOADER, threads=first)]
        return contenders, counts

    def _samples(self, sampler: NeighborSampler, graph: WholeGraph, seeds: np.ndarray) -> Callable[[], int]:
        """Sample n_id and edges of every batch, in one thread, and gather nothing."""
        pool, epochs, seed = BufferPool(), itertools.count(), self.seed
        state = sampler.prepare(graph, seeds, seed)
        space = Workspace(graph.num_local, graph.csc.indices.dtype)

        def samples() -> int:
            epoch = next(epochs)
            for number, items in enumerate(sampler.items(state, self.batch_size, False, batch_key(seed, epoch, 0, 0))):
                sampler.sample(state, items, batch_key(seed, epoch, 0, number), space, pool.take, False)
            return len(seeds)

        return samples


run = benchmark(SampleBench)


def _best_connected(csc: CSC, share: float) -> Placement:
    """Place the rows of the nodes of highest degree on the one device; ties to the lowest id."""
    rows = np.argsort(-csc.in_degree, kind="stable")[: max(round(share * csc.num_rows), 1)]
    return Placement((rows,), ((0,),), csc.num_rows, None, {}, ({},), "degree")


def _write_typed(folder: Path, data, seeds: np.ndarray) -> None:
    """Write what `peer_worker.py` reads of a heterogeneous graph; `seeds` are papers."""
    np.save(folder / "seeds.npy", seeds)
    np.save(folder / "features.npy", data["paper"].x.numpy())
    for number, edge_type in enumerate(data.edge_types):
        np.save(folder / f"edges-{number}.npy", data[edge_type].edge_index.numpy())
    counts = {kind: data[kind].num_nodes for kind in data.node_types}
    (folder / "kinds.json").write_text(json.dumps({"counts": counts, "edge_types": data.edge_types}))


def _epoch(loader: NeighborLoader) -> int:
    return sum(batch.batch_size for batch in loader)


def _rows_and_edges(loader: PartLoader, num_seeds: int) -> tuple[float, float]:
    counts = np.array([(len(batch.n_id), batch.num_edges) for batch in loader])
    rows, edges = counts.sum(0) / num_seeds
    return float(rows), float(edges)


def _this_python() -> str | None:
    return sys.executable if any(find_spec(name) for name in ("torch_sparse", "pyg_lib")) else None


def rows_of(found: Mapping[tuple, list[Taken]], counts: Mapping[tuple, tuple], threads: int) -> list[dict]:
    """Return a row for each contender; ratios are taken within each turn.

    Args:
        found: Runs by `Name`.
        counts: feature rows and edges a seed by `Name`, None where they are not known.
        threads: those of the loader that ratios are taken from.
    """
    peer_of = {name.what: [other for other in found if other.what == name.what and other.workers] for name in found}
    pyg, graphbolt = (_faster(found, PEERS[kind]) for kind in ("pyg", "graphbolt"))
    rows = []
    for name, runs in found.items():
        plain = name._replace(scale=1.0)
        rows_a_seed, edges = counts.get(name, (None, None))
        speed = speeds(runs)
        workers = next(iter(peer_of.get(PEERS["pyg"], [])), None)
        row = {
            "what": name.what,
            "locality_scale": name.scale,
            "threads": name.threads,
            "workers": name.workers,
            **speed,
            "rows_a_seed": rows_a_seed,
            "edges_a_seed": edges,
            "ns_per_edge": 1e9 / speed["seeds_per_cpu_s"] / edges if edges and name.what == SAMPLING else None,
            "share_of_copy_bound": ratio(runs, _runs(found, COPIES, name.threads)),
            "edge_rate_over_one_node_type": None,
            "times_one_thread": None,
            "batch_time_over_uniform": None,
            "edge_time_over_uniform": None,
            "times_pyg": ratio(runs, pyg),
            "times_pyg_workers": ratio(runs, found.get(workers)),
            "times_graphbolt": ratio(runs, graphbolt),
        }
        if name.threads != threads and (one := found.get(name._replace(threads=threads))):
            row["times_one_thread"] = ratio(runs, one, "wall_s")
        if name.what == SAMPLING and (one := _runs(found, ONE_NODE_TYPE)):
            row["edge_rate_over_one_node_type"] = ratio(runs, one) * edges / counts[Name(ONE_NODE_TYPE)][1]
        if name != plain:
            row["batch_time_over_uniform"] = 1 / ratio(runs, found[plain])
            row["edge_time_over_uniform"] = row["batch_time_over_uniform"] * counts[plain][1] / edges
        rows.append(row)
    return rows


def _runs(found: Mapping[tuple, list[Taken]], what: str, threads: int = 1) -> list[Taken] | None:
    same = (r for name, r in found.items() if name.what == what and name.threads == threads and not name.workers)
    return next(same, None)


def _faster(found: Mapping[tuple, list[Taken]], what: str) -> list[Taken] | None:
    """Return a peer's runs without worker processes, with one thread or all, whichever take less CPU time a seed."""
    runs = [runs for name, runs in found.items() if name.what == what and not name.workers]
    return max(runs, key=lambda runs: speeds(runs)["seeds_per_cpu_s"], default=None)


def _label(row: Mapping) -> str:
    locality = f", s = {row['locality_scale']:g}" if row["locality_scale"] > 1 else ""
    threads = f", {row['threads']} threads" if row["threads"] > 1 else ""
    workers = f", {row['workers']} workers" if row["workers"] else ""
    return row["what"] + locality + threads + workers
