"""SPRING beside METIS: speed and memory on a generated graph, cuts on real graphs beside the published code's."""

import importlib.util
import math
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..dataset.npz import data_root as find_data_root
from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..partitioner import partition
from .partition_process import measure
from .results import machine, machine_line, write_csv

# Cut ratios of the published code (github.com/xhuang2016/SDT-GNN) at 4, 8 and 16 parts, both directions listed and
# sorted by source.
PUBLISHED_PARTS = (4, 8, 16)
PUBLISHED_CUTS = {
    "coauthor_cs": (0.454, 0.535, 0.593),
    "coauthor_physics": (0.490, 0.602, 0.660),
    "amazon_computers": (0.583, 0.714, 0.809),
    "facebook_pages": (0.468, 0.546, 0.604),
    "uk2007_100k": (0.280, 0.443, 0.589),
    "cnr2000": (0.046, 0.080, 0.081),
}
PUBLISHED_MILLION_EDGES_PER_S, PUBLISHED_BYTES_A_NODE = 0.17, 580


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 10_000_000,
    num_parts: int = 8,
    data_root: str | os.PathLike | None = None,
    graphs: list[str] = tuple(PUBLISHED_CUTS),
    methods: list[str] = ("spring", "metis"),
    chunk_edges: int = 1 << 22,
    repeats: int = 3,
    seed: int = 0,
    scratch: str | os.PathLike | None = None,
) -> dict[str, list[dict]]:
    """Measure speed and memory on a generated file, and cuts on real graphs; write tables, CSV and a plot.

    Args:
        output_dir: Folder for `speed.csv`, `cuts.csv` and `spring.png`.
        num_nodes, num_edges: Number of nodes and edges in the generated graph, written as raw int32 pairs; num_edges =
            0 leaves it out.
        num_parts: Number of parts of the generated graph.
        data_root: Folder of public graphs; None: it is searched for. If there is none, the table of cuts is left out,
            with a message.
        graphs: Graphs out of `PUBLISHED_CUTS`; an empty list leaves the table of cuts out.
        methods: Partitioners to compare; "metis" is left out if pymetis is not installed.
        chunk_edges: Edges per chunk.
        repeats: Number of runs after the first; the best counts.
        seed: Seed of the generated graph and of the methods.
        scratch: Folder for the generated file; None: the system's folder for temporary files.

    Returns:
        {"speed": rows, "cuts": rows}.
    """
    console = Console(width=max(Console().width, 120))
    if "metis" in methods and importlib.util.find_spec("pymetis") is None:
        console.print("METIS is left out: pymetis is not installed (extra \\[metis])")
        methods = [method for method in methods if method != "metis"]
    facts, output = machine(), Path(output_dir)
    speed = _speed_rows(console, num_nodes, num_edges, num_parts, methods, chunk_edges, repeats, seed, scratch)
    if speed:
        write_csv(output / "speed.csv", speed, facts)
        console.print(_speed_table(speed, machine_line(facts)))
    cuts = _cut_rows(console, data_root, graphs, methods, seed)
    if cuts:
        write_csv(output / "cuts.csv", cuts, facts)
        console.print(_cut_table(cuts, machine_line(facts)))
        console.print(f"cut / published, geometric mean: {cut_ratio_mean(cuts):.3f}")
    if speed or cuts:
        output.mkdir(parents=True, exist_ok=True)
        _draw(output / "spring.png", speed, cuts)
    return {"speed": speed, "cuts": cuts}


def symmetric_edges(edge_index: np.ndarray) -> np.ndarray:
    """List every undirected edge in both directions, sorted by source, without repeats and self-loops.

    Args:
        edge_index: (2, num_arcs) integers.

    Returns:
        (2, 2 * num_edges) int32.
    """
    src, dst = edge_index.astype(np.int64)
    num_nodes = int(edge_index.max()) + 1
    keys = np.sort(np.concatenate([src * num_nodes + dst, dst * num_nodes + src])[np.tile(src != dst, 2)])
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    return np.stack(np.divmod(keys, num_nodes)).astype(np.int32)


def cut_ratio_mean(rows: list[dict]) -> float:
    """Return the geometric mean of SPRING's cut over the published code's."""
    ratios = [row["cut_over_published"] for row in rows if row["method"] == "spring"]
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def _speed_rows(console, num_nodes, num_edges, num_parts, methods, chunk_edges, repeats, seed, scratch) -> list[dict]:
    if not num_edges:
        return []
    rows = []
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        console.print(f"generating {num_edges:,} edges of {num_nodes:,} nodes")
        graph = SyntheticGraph(num_nodes, num_edges, seed=seed)
        path = write_edges(graph.stream(), Path(folder) / "edges.bin", dtype="int32")
        for method in methods:
            console.print(f"partitioning by {method}")
            found = measure(path, num_nodes, method, num_parts, chunk_edges=chunk_edges, repeats=repeats, seed=seed)
            two_chunks = 2 * chunk_edges * 8
            phases = {f"{name}_s": seconds for name, seconds in found.pop("phases").items() if name != "total"}
            notes = found.pop("notes")
            rows.append(
                {
                    "method": method,
                    "num_nodes": num_nodes,
                    "listed_edges": num_edges,
                    "num_parts": num_parts,
                    "chunk_edges": chunk_edges,
                    "million_edges_per_s": num_edges / found["seconds"] / 1e6,
                    "million_edges_per_cpu_s": num_edges / found["cpu_seconds"] / 1e6,
                    "bytes_a_node": found["peak_bytes"] / num_nodes,
                    "bytes_a_node_beyond_two_chunks": max(0.0, (found["peak_bytes"] - two_chunks) / num_nodes),
                    "layout": notes.get("layout", ""),
                    **found,
                    **phases,
                }
            )
    return rows


def _cut_rows(console, data_root, graphs, methods, seed) -> list[dict]:
    root = find_data_root() if data_root is None else Path(data_root)
    rows = []
    for name in graphs:
        path = None if root is None else root / name / "graph.npz"
        if path is None or not path.exists():
            console.print(f"{name} is left out: no {path or 'folder of public graphs (set GNNSCALE_DATA)'}")
            continue
        edges = symmetric_edges(np.load(path)["edge_index"])
        for num_parts, published in zip(PUBLISHED_PARTS, PUBLISHED_CUTS[name], strict=True):
            for method in methods:
                stream = open_edge_stream(edges, num_nodes=int(edges.max()) + 1)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # an oversized cluster has its own column
                    p = partition(stream, method, num_parts, seed=seed)
                rows.append(
                    {
                        "graph": name,
                        "num_parts": num_parts,
                        "method": method,
                        "edge_cut_ratio": p.quality.edge_cut_ratio,
                        "published_cut_ratio": published,
                        "cut_over_published": p.quality.edge_cut_ratio / published,
                        "replication_factor": p.quality.replication_factor,
                        "node_balance": p.quality.node_balance,
                        "volume_balance": p.quality.volume_balance,
                        "oversized_clusters": p.notes.get("oversized_clusters", 0),
                        "seconds": p.seconds["total"],
                    }
                )
    return rows


def _speed_table(rows: list[dict], caption: str) -> Table:
    table = Table(title="One core, warm, from open to part_id (RF: replication factor)", caption=caption, box=SIMPLE)
    for name in ("method", "parts", "s", "Me/s", "Me/CPU-s", "MB", "bytes\na node", "beyond\ntwo chunks"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for name in ("cut", "RF", "node\nbalance", "volume\nbalance"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            str(row["num_parts"]),
            f"{row['seconds']:.3f}",
            f"{row['million_edges_per_s']:.1f}",
            f"{row['million_edges_per_cpu_s']:.1f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['bytes_a_node']:.0f}",
            f"{row['bytes_a_node_beyond_two_chunks']:.1f}",
            f"{row['edge_cut_ratio']:.3f}",
            f"{row['replication_factor']:.2f}",
            f"{row['node_balance']:.3f}",
            f"{row['volume_balance']:.3f}",
        )
    table.add_row(
        "published code", "", "", f"{PUBLISHED_MILLION_EDGES_PER_S}", "", "", f"{PUBLISHED_BYTES_A_NODE}", style="dim"
    )
    return table


def _cut_table(rows: list[dict], caption: str) -> Table:
    title = "Real graphs, both directions listed, sorted by source (RF: replication; nodes, volume: balances)"
    table = Table(
        title=title,
        caption=caption,
        box=SIMPLE,
    )
    methods = list(dict.fromkeys(row["method"] for row in rows))
    table.add_column("graph", no_wrap=True)
    for name in ("parts", "published", "ratio"):
        table.add_column(name, justify="right")
    for method in methods:
        for name in ("cut", "RF", "nodes", "volume"):
            table.add_column(f"{method}\n{name}", justify="right")
    cells = {(row["graph"], row["num_parts"], row["method"]): row for row in rows}
    for graph, num_parts in dict.fromkeys((row["graph"], row["num_parts"]) for row in rows):
        found = [cells[graph, num_parts, method] for method in methods]
        ratio = next((f"{row['cut_over_published']:.2f}" for row in found if row["method"] == "spring"), "")
        own = []
        for row in found:
            own += [f"{row['edge_cut_ratio']:.4f}", f"{row['replication_factor']:.2f}"]
            own += [f"{row['node_balance']:.2f}", f"{row['volume_balance']:.2f}"]
        table.add_row(graph, str(num_parts), f"{found[0]['published_cut_ratio']:.3f}", ratio, *own)
    return table


def _draw(path: Path, speed: list[dict], cuts: list[dict]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(draw, rows) for draw, rows in ((_draw_speed, speed), (_draw_cuts, cuts)) if rows]
    if not panels:
        return
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (draw, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, rows)
    figure.savefig(path, dpi=120)


def _draw_speed(axes, speed: list[dict]) -> None:
    for row in speed:
        axes.plot(row["million_edges_per_s"], row["bytes_a_node"], "o", label=row["method"])
    axes.plot(PUBLISHED_MILLION_EDGES_PER_S, PUBLISHED_BYTES_A_NODE, "x", color="gray", label="published SPRING")
    axes.set(xscale="log", yscale="log", xlabel="million edges a second", ylabel="bytes a node, chunks included")
    axes.legend()


def _draw_cuts(axes, cuts: list[dict]) -> None:
    labels = list(dict.fromkeys(f"{row['graph']} {row['num_parts']}" for row in cuts))
    for method in dict.fromkeys(row["method"] for row in cuts):
        values = [row["edge_cut_ratio"] for row in cuts if row["method"] == method]
        axes.plot(labels, values, "o", label=method)
    published = [row["published_cut_ratio"] for row in cuts if row["method"] == cuts[0]["method"]]
    axes.plot(labels, published, "x", color="gray", label="published SPRING")
    axes.set(yscale="log", ylabel="cut edges over all")
    axes.tick_params(axis="x", labelrotation=90)
    axes.legend()
