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
from rich.console import Console

from ..graph import CSC
from ..loader import BufferPool, NeighborLoader
from ..partition_store import WholeGraph
from ..placement import Placement
from ..rng import batch_key
from ..sampler import LocalityBias, NeighborSampler
from ..triton_kernels.sample_neighbors import Workspace
from .peer import Peer, write_graph
from .power_law import power_law_graph
from .results import machine, machine_line, write_csv
from .sample_rows import draw_rows, rows_of, table_of
from .turns import Contender, in_this_process, measure, row_copies

LOADER, SAMPLING, COPIES = "NeighborLoader", "sampling alone", "row copy alone (bound)"
PEERS = {"pyg": "PyG NeighborLoader", "graphbolt": "GraphBolt"}
INSTALL = {
    "pyg": "bench.pyg_python=VENV/bin/python of an environment with torch, torch-geometric and torch-sparse "
    "(pip install --no-build-isolation torch-sparse), or install torch-sparse here",
    "graphbolt": "bench.graphbolt_python=VENV/bin/python of an environment of its own: pip install torch==2.2.1 "
    "torchdata==0.7.1 dgl==2.1.0 'numpy<2' pandas pyyaml pydantic",
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

    Returns:
        {"sample": rows}.

    Raises:
        ValueError: a given interpreter cannot run its peer.
    """
    console = Console(width=max(Console().width, 150))
    console.print(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
    csc = power_law_graph(num_nodes, num_edges, seed)
    features = np.random.default_rng(seed).random((num_nodes, dim), np.float32)
    seeds = np.sort(np.random.default_rng(seed + 1).permutation(num_nodes)[: num_batches * batch_size])
    bias = LocalityBias(_best_connected(csc, buffer_share), locality_scale)
    contenders, counts = _ours(csc, features, seeds, fanouts, batch_size, threads, bias, seed)
    uniform = counts[Name(LOADER, threads=threads[0])][0]
    for count in threads:
        copies = row_copies(features, uniform, batch_size, num_batches, count)
        contenders[Name(COPIES, threads=count)] = in_this_process(copies)
    pythons = {"pyg": pyg_python or _this_python(), "graphbolt": graphbolt_python}
    with TemporaryDirectory(prefix="gnnscale-sample-") as folder:
        write_graph(Path(folder), csc, features, seeds[: peer_batches * batch_size])
        options = {"fanouts": list(fanouts), "batch_size": batch_size}
        peers = _peers(pythons, folder, options, console.print)
        try:
            for kind, peer in peers.items():
                for workers in peer_workers if kind == "pyg" else (0,):
                    contenders[Name(PEERS[kind], workers=workers)] = peer.contender(workers)
            found = measure(contenders, repeats)
            counts |= {Name(PEERS[kind]): (peer.rows_a_seed, None) for kind, peer in peers.items()}
        finally:
            for peer in peers.values():
                peer.close()
    facts = machine() | {f"{kind}_versions": _versions(peer) for kind, peer in peers.items()}
    rows, output = rows_of(found, counts, threads[0]), Path(output_dir)
    write_csv(output / "sample.csv", rows, facts)
    caption = "; ".join([machine_line(facts), *(f"{PEERS[kind]}: {_versions(peer)}" for kind, peer in peers.items())])
    console.print(table_of(rows, fanouts, batch_size, caption))
    draw_rows(output / "sample.png", rows)
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


def _peers(pythons: Mapping, folder: str, options: Mapping, tell: Callable[[str], None]) -> dict[str, Peer]:
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
