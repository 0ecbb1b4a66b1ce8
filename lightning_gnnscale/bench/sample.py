"""`NeighborLoader` beside PyG's and GraphBolt's: seeds per CPU-second of all processes, in turns in one run."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from ..graph import CSC
from ..loader import BufferPool, NeighborLoader
from ..partition_store import WholeGraph
from ..placement import Placement
from ..rng import batch_key
from ..sampler import LocalityBias, NeighborSampler
from ..triton_kernels.sample_neighbors import Workspace
from .graphs import power_law_graph
from .present import LEFT, draw_bars, table, tell
from .runner import Case, Runner, digest, machine_line
from .turns import Contender, Peer, Taken, in_this_process, measure, ratio, row_copies, speeds, write_graph

LOADER, SAMPLING, COPIES = "NeighborLoader", "sampling alone", "row copy alone (bound)"
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
    "share_of_copy_bound": ("share of\ncopy bound", ".0%"),
    "times_one_thread": ("times one\nthread", ".2f"),
    "batch_time_over_uniform": ("time over\nuniform", ".2f"),
    "edge_time_over_uniform": ("same,\nan edge", ".2f"),
    "times_pyg": ("times\nPyG", ".1f"),
    "times_pyg_workers": ("times PyG,\nworkers", ".1f"),
    "times_graphbolt": ("times\nGraphBolt", ".1f"),
}


class Name(NamedTuple):
    """A contender: what runs, how much of a kind its draws prefer close rows, threads, worker processes."""

    what: str
    scale: float = 1.0
    threads: int = 1
    workers: int = 0


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 20_000_000,
    dim: int = 128,
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    threads: Sequence[int] = (1, 2),
    locality_scale: float = 8.0,
    buffer_share: float = 0.1,
    num_batches: int = 40,
    peer_batches: int = 4,
    repeats: int = 5,
    peer_workers: Sequence[int] = (0, 2),
    pyg_python: str | None = None,
    graphbolt_python: str | None = None,
    seed: int = 0,
    minutes: float | None = None,
    again: str = "none",
) -> dict[str, list[dict]]:
    """Measure whole batches and sampling alone, uniform and locality-biased, the copy bound, and the peers, in turns.

    The ends of the graph's arcs are drawn independently, in proportion to Pareto(1.8) + 1 weights. The copy bound is
    the time in which the feature rows of uniform batches alone are copied from random places into a reused buffer. The
    preferred rows are those of the nodes of highest degree.

    Args:
        output_dir: Folder for `sample.csv` and `sample.png`.
        num_nodes, num_edges: Number of nodes and edges in the generated graph.
        dim: Number of float32 features per node.
        fanouts, batch_size: Fan-outs of all samplers, and seeds per batch.
        threads: Numbers of threads of `NeighborLoader` and of the copies; the others are compared with the first
            number.
        locality_scale: The factor s of the locality-biased draws, > 1.
        buffer_share: Share of the nodes whose rows are preferred, in (0, 1].
        num_batches, peer_batches: Number of batches in a measurement of this package, and of a peer.
        repeats: Number of measurements of each kind, in turns; the median counts.
        peer_workers: Numbers of worker processes of PyG's loader; GraphBolt runs without worker processes.
        pyg_python: Interpreter with torch-geometric and torch-sparse or pyg-lib; None: this one, if it has them.
        graphbolt_python: Interpreter with dgl; None leaves GraphBolt out.
        seed: Seed of the graph and of the batches.
        minutes, again: See `Runner`; all is one case, as it is measured in turns.

    Returns:
        {"sample": rows}.

    Raises:
        ValueError: a given interpreter cannot run its peer.
    """
    pythons = {"pyg": pyg_python or _this_python(), "graphbolt": graphbolt_python}

    def measured() -> list[dict]:
        tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
        csc = power_law_graph(num_nodes, num_edges, seed)
        features = np.random.default_rng(seed).random((num_nodes, dim), np.float32)
        seeds = np.sort(np.random.default_rng(seed + 1).permutation(num_nodes)[: num_batches * batch_size])
        bias = LocalityBias(_best_connected(csc, buffer_share), locality_scale)
        contenders, counts = _ours(csc, features, seeds, fanouts, batch_size, threads, bias, seed)
        uniform = counts[Name(LOADER, threads=threads[0])][0]
        for count in threads:
            copies = row_copies(features, uniform, batch_size, num_batches, count)
            contenders[Name(COPIES, threads=count)] = in_this_process(copies)
        with TemporaryDirectory(prefix="gnnscale-sample-") as folder:
            write_graph(Path(folder), csc, features, seeds[: peer_batches * batch_size])
            peers = _peers(pythons, folder, {"fanouts": list(fanouts), "batch_size": batch_size})
            try:
                for kind, peer in peers.items():
                    for workers in peer_workers if kind == "pyg" else (0,):
                        contenders[Name(PEERS[kind], workers=workers)] = peer.contender(workers)
                found = measure(contenders, repeats)
                counts |= {Name(PEERS[kind]): (peer.rows_a_seed, None) for kind, peer in peers.items()}
            finally:
                for peer in peers.values():
                    peer.close()
        versions = {f"{kind}_versions": _versions(peer) for kind, peer in peers.items()}
        return [row | versions for row in rows_of(found, counts, threads[0])]

    facts = (num_nodes, num_edges, dim, *fanouts, batch_size, *threads, locality_scale, buffer_share, num_batches,
             peer_batches, repeats, *peer_workers, *pythons.values(), seed)  # fmt: skip
    with Runner(output_dir, minutes, again) as runner:
        rows = runner.rows([Case({"settings": digest(*facts)}, measured, None)], "sample.csv")
        shown = [row | {"label": _label(row)} for row in rows]
        columns = {name: spec for name, spec in COLUMNS.items() if any(row.get(name) is not None for row in shown)}
        title = f"Batches of {batch_size} seeds, fan-outs {', '.join(map(str, fanouts))}: medians of runs in turns"
        versions = {
            f"{PEERS[kind]}: {row[f'{kind}_versions']}" for kind in PEERS for row in rows if row.get(f"{kind}_versions")
        }
        tell(table(shown, columns, title, "; ".join([machine_line(), *sorted(versions)])))
        labels, speed = [row["label"] for row in shown], [row["seeds_per_cpu_s"] for row in shown]
        draw_bars(runner.folder / "sample.png", labels, speed, "seeds per CPU-second of all processes")
    return {"sample": rows}


def _best_connected(csc: CSC, share: float) -> Placement:
    """Place the rows of the nodes of highest degree on the one device; ties to the lowest id."""
    rows = np.argsort(-csc.in_degree, kind="stable")[: max(round(share * csc.num_rows), 1)]
    return Placement((rows,), ((0,),), csc.num_rows, None, {}, ({},), "degree")


def _ours(csc, features, seeds, fanouts, batch_size, threads, bias, seed) -> tuple[dict[Name, Contender], dict]:
    """Return our contenders, and the feature rows and edges a seed of each, None where it reads none."""
    from torch_geometric.data import Data

    target = torch.repeat_interleave(torch.arange(csc.num_rows), torch.from_numpy(csc.in_degree))
    data = Data(
        x=torch.from_numpy(features),
        edge_index=torch.stack([torch.from_numpy(csc.indices).long(), target]),
        y=torch.arange(csc.num_rows) % 47,
        train_mask=torch.ones(csc.num_rows, dtype=torch.bool),
    )
    contenders, counts = {}, {}
    for scale in (1.0, bias.scale):
        locality = bias if scale > 1 else None
        options = {"batch_size": batch_size, "shuffle": True, "seed": seed, "locality": locality, "is_sorted": True}
        for count in threads if scale == 1 else threads[:1]:
            name = Name(LOADER, scale, count)
            loader = NeighborLoader(data, fanouts, torch.from_numpy(seeds), num_threads=count, **options)
            contenders[name] = in_this_process(_epochs(loader))
            counts[name] = counts.get(Name(LOADER, scale, threads[0])) or _rows_and_edges(loader, len(seeds))
        sampler = NeighborSampler(fanouts) if locality is None else NeighborSampler(fanouts, locality=locality)
        name = Name(SAMPLING, scale, 1)
        contenders[name] = in_this_process(_draws(sampler, csc, seeds, batch_size, seed))
        counts[name] = (None, counts[Name(LOADER, scale, threads[0])][1])
    return contenders, counts


def _epochs(loader: NeighborLoader) -> Callable[[], int]:
    return lambda: sum(batch.batch_size for batch in loader)


def _rows_and_edges(loader: NeighborLoader, num_seeds: int) -> tuple[float, float]:
    counts = np.array([(len(batch.n_id), batch.num_edges) for batch in loader])
    rows, edges = counts.sum(0) / num_seeds
    return float(rows), float(edges)


def _draws(sampler: NeighborSampler, csc: CSC, seeds: np.ndarray, batch_size: int, seed: int) -> Callable[[], int]:
    """Draw n_id and edges of every batch, in one thread, and gather nothing."""
    graph, pool, epochs = WholeGraph.of(csc, 0), BufferPool(), iter(range(1 << 62))
    state, space = sampler.prepare(graph, seeds, seed), Workspace(csc.num_rows, csc.indices.dtype)

    def draws() -> int:
        epoch = next(epochs)
        for number, items in enumerate(sampler.items(state, batch_size, False, batch_key(seed, epoch, 0, 0))):
            sampler.draw(state, items, batch_key(seed, epoch, 0, number), space, pool.take, False)
        return len(seeds)

    return draws


def _this_python() -> str | None:
    return sys.executable if any(find_spec(name) for name in ("torch_sparse", "pyg_lib")) else None


def _peers(pythons: Mapping, folder: str, options: Mapping) -> dict[str, Peer]:
    """Start the peers that there is an interpreter for, and say in one line how to have the others."""
    peers: dict[str, Peer] = {}
    try:
        for kind, python in pythons.items():
            if python is None:
                tell(f"{PEERS[kind]} is left out: pass {INSTALL[kind]}", soft_wrap=True)
            else:
                peers[kind] = Peer(kind, os.path.expanduser(python), folder, options)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return peers


def _versions(peer: Peer) -> str:
    return ", ".join(f"{name} {version}" for name, version in peer.versions.items())


def rows_of(found: Mapping[tuple, list[Taken]], counts: Mapping[tuple, tuple], threads: int) -> list[dict]:
    """Return a row for each contender; ratios are taken within each turn.

    Args:
        found: Runs by `Name`.
        counts: feature rows and edges a seed by `Name`, None where they are not known.
        threads: those of the loader that ratios are taken from.
    """
    peer_of = {name.what: [other for other in found if other.what == name.what and other.workers] for name in found}
    rows = []
    for name, runs in found.items():
        plain = name._replace(scale=1.0)
        rows_a_seed, edges = counts.get(name._replace(workers=0), (None, None))
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
            "times_one_thread": None,
            "batch_time_over_uniform": None,
            "edge_time_over_uniform": None,
            "times_pyg": ratio(runs, _runs(found, PEERS["pyg"])),
            "times_pyg_workers": ratio(runs, found.get(workers)),
            "times_graphbolt": ratio(runs, _runs(found, PEERS["graphbolt"])),
        }
        if name.threads != threads and (one := found.get(name._replace(threads=threads))):
            row["times_one_thread"] = ratio(runs, one, "wall_s")
        if name != plain:
            row["batch_time_over_uniform"] = 1 / ratio(runs, found[plain])
            row["edge_time_over_uniform"] = row["batch_time_over_uniform"] * counts[plain][1] / edges
        rows.append(row)
    return rows


def _runs(found: Mapping[tuple, list[Taken]], what: str, threads: int = 1) -> list[Taken] | None:
    same = (r for name, r in found.items() if name.what == what and name.threads == threads and not name.workers)
    return next(same, None)


def _label(row: Mapping) -> str:
    locality = f", s = {row['locality_scale']:g}" if row["locality_scale"] > 1 else ""
    threads = f", {row['threads']} threads" if row["threads"] > 1 else ""
    workers = f", {row['workers']} workers" if row["workers"] else ""
    return row["what"] + locality + threads + workers
