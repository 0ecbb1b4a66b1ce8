"""SPRING beside METIS: speed and memory on a generated graph, cuts on real graphs beside the published code's."""

import importlib.util
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..partitioner import partition
from .graphs import public_root
from .partition_process import measure
from .present import LEFT, grouped, panels, save, table, tell
from .runner import Case, Runner, digest, machine_line

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
PUBLISHED_SPEED = {"method": "published code", "million_edges_per_s": 0.17, "bytes_a_node": 580}
PUBLISHED_LOOK = {"color": "gray", "label": "published SPRING"}
SPEED = {
    "method": ("method", LEFT),
    "num_parts": ("parts", ">"),
    "seconds": ("s", ".3f"),
    "million_edges_per_s": ("Me/s", ".4g"),
    "million_edges_per_cpu_s": ("Me/CPU-s", ".1f"),
    "peak_bytes": ("MB", lambda value: f"{value / 1e6:.0f}"),
    "bytes_a_node": ("bytes\na node", ".0f"),
    "bytes_a_node_beyond_two_chunks": ("beyond\ntwo chunks", ".1f"),
    "edge_cut_ratio": ("cut", ".3f"),
    "replication_factor": ("RF", ".2f"),
    "node_balance": ("node\nbalance", ".3f"),
    "volume_balance": ("volume\nbalance", ".3f"),
}
CUTS = {
    "edge_cut_ratio": ("cut", ".4f"),
    "replication_factor": ("RF", ".2f"),
    "node_balance": ("nodes", ".2f"),
    "volume_balance": ("volume", ".2f"),
}


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
    minutes: float | None = None,
    again: str = "none",
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
        minutes, again: See `Runner`.

    Returns:
        {"speed": rows, "cuts": rows}.
    """
    if "metis" in methods and importlib.util.find_spec("pymetis") is None:
        tell("METIS is left out: pymetis is not installed (extra \\[metis])")
        methods = [method for method in methods if method != "metis"]
    with Runner(output_dir, minutes, again) as runner, tempfile.TemporaryDirectory(dir=scratch) as folder:
        edges = cache(lambda: _write_edges(Path(folder), num_nodes, num_edges, seed))
        speed = [
            Case(
                {"method": method, "settings": digest(num_nodes, num_edges, num_parts, chunk_edges, repeats, seed)},
                partial(_speed, edges, method, num_nodes, num_edges, num_parts, chunk_edges, repeats, seed),
            )
            for method in methods
            if num_edges
        ]
        speed = runner.rows(speed, "speed.csv")
        if speed:
            title = "One core, warm, from open to part_id (RF: replication factor)"
            tell(table([*speed, PUBLISHED_SPEED], SPEED, title, machine_line()))
        cuts = runner.rows(_cut_cases(public_root(data_root), graphs, methods, seed), "cuts.csv")
        if cuts:
            tell(_cut_table(cuts, machine_line()))
        if any(row["method"] == "spring" for row in cuts):
            tell(f"cut / published, geometric mean: {cut_ratio_mean(cuts):.3f}")
        _draw(runner.folder / "spring.png", speed, cuts)
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


def _write_edges(folder: Path, num_nodes: int, num_edges: int, seed: int) -> Path:
    tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes")
    graph = SyntheticGraph(num_nodes, num_edges, seed=seed)
    return write_edges(graph.stream(), folder / "edges.bin", dtype="int32")


def _speed(
    edges, method: str, num_nodes: int, num_edges: int, num_parts: int, chunk_edges: int, repeats: int, seed: int
):
    found = measure(edges(), num_nodes, method, num_parts, chunk_edges=chunk_edges, repeats=repeats, seed=seed)
    two_chunks = 2 * chunk_edges * 8
    phases = {f"{name}_s": seconds for name, seconds in found.pop("phases").items() if name != "total"}
    notes = found.pop("notes")
    return {
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


def _cut_cases(root: Path | None, graphs: list[str], methods: list[str], seed: int) -> Iterator[Case]:
    for name in graphs:
        path = None if root is None else root / name / "graph.npz"
        if path is None or not path.exists():
            tell(f"{name} is left out: no {path or 'folder of public graphs (set GNNSCALE_DATA)'}")
            continue
        edges = cache(lambda path=path: symmetric_edges(np.load(path)["edge_index"]))
        for num_parts, published in zip(PUBLISHED_PARTS, PUBLISHED_CUTS[name], strict=True):
            for method in methods:
                key = {"graph": name, "num_parts": num_parts, "method": method, "settings": digest(seed)}
                yield Case(key, partial(_cut, edges, method, num_parts, published, seed))


def _cut(edges, method: str, num_parts: int, published: float, seed: int) -> dict:
    stream = open_edge_stream(edges(), num_nodes=int(edges().max()) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an oversized cluster has its own column
        p = partition(stream, method, num_parts, seed=seed)
    return {
        "edge_cut_ratio": p.quality.edge_cut_ratio,
        "published_cut_ratio": published,
        "cut_over_published": p.quality.edge_cut_ratio / published,
        "replication_factor": p.quality.replication_factor,
        "node_balance": p.quality.node_balance,
        "volume_balance": p.quality.volume_balance,
        "oversized_clusters": p.notes.get("oversized_clusters", 0),
        "seconds": p.seconds["total"],
    }


def _cut_table(rows: list[dict], caption: str):
    """Return one line a graph and number of parts, the methods side by side."""
    columns = {"graph": ("graph", LEFT), "num_parts": ("parts", ">"), "published_cut_ratio": ("published", ".3f")}
    columns["ratio"] = ("ratio", ".2f")
    for method in dict.fromkeys(row["method"] for row in rows):
        columns |= {f"{method} {name}": (f"{method}\n{head}", form) for name, (head, form) in CUTS.items()}
    shown = []
    for own in grouped(rows, "graph", "num_parts").values():
        line = dict(own[0])
        for row in own:
            line |= {f"{row['method']} {name}": row[name] for name in CUTS}
            line |= {"ratio": row["cut_over_published"]} if row["method"] == "spring" else {}
        shown.append(line)
    title = "Real graphs, both directions listed, sorted by source (RF: replication; nodes, volume: balances)"
    return table(shown, columns, title, caption)


def _draw(path: Path, speed: list[dict], cuts: list[dict]) -> None:
    parts = [(draw, rows) for draw, rows in ((_draw_speed, speed), (_draw_cuts, cuts)) if rows]
    if not parts:
        return
    figure, found = panels(["", " "][: len(parts)], size=(5.5, 4.5), beside=0)
    for axes, (draw, rows) in zip(found.values(), parts, strict=True):
        draw(axes, rows)
        axes.legend()
    save(figure, path)


def _draw_speed(axes, speed: list[dict]) -> None:
    for row in speed:
        axes.plot(row["million_edges_per_s"], row["bytes_a_node"], "o", label=row["method"])
    axes.plot(*(PUBLISHED_SPEED[name] for name in ("million_edges_per_s", "bytes_a_node")), "x", **PUBLISHED_LOOK)
    axes.set(xscale="log", yscale="log", xlabel="million edges a second", ylabel="bytes a node, chunks included")


def _draw_cuts(axes, cuts: list[dict]) -> None:
    for (method,), own in grouped(cuts, "method").items():
        axes.plot(
            [f"{r['graph']} {r['num_parts']}" for r in own], [r["edge_cut_ratio"] for r in own], "o", label=method
        )
    published = {f"{row['graph']} {row['num_parts']}": row["published_cut_ratio"] for row in cuts}
    axes.plot(list(published), list(published.values()), "x", **PUBLISHED_LOOK)
    axes.set(yscale="log", ylabel="cut edges over all")
    axes.tick_params(axis="x", labelrotation=90)
