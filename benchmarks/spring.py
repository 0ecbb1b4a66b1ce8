"""SPRING and METIS: speed and memory on a generated graph, cuts on real graphs compared with the published code's."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from lightning_gnnscale.edge_stream import SyntheticGraph, open_edge_stream, write_edges
from lightning_gnnscale.partitioner import partition

from .graphs import public_root, without_metis
from .partition_process import measure
from .present import LEFT, grouped, panels, save, show, tell
from .runner import Case, Runner, benchmark, digest, machine_line

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


@dataclass(frozen=True)
class SpringBench:
    """Measure speed and memory on a generated file, and cuts on real graphs.

    Writes `speed.csv`, `cuts.csv` and `spring.png`.

    Attributes:
        num_nodes, num_edges: Number of nodes and edges in the generated graph, written as raw int32 pairs; num_edges =
            0 leaves it out.
        num_parts: Number of parts of the generated graph.
        data_root: Folder of public graphs; None: it is searched for. Graphs that are not there are left out, with a
            message.
        graphs: Graphs out of `PUBLISHED_CUTS`; an empty list leaves the table of cuts out.
        methods: Partitioners to compare; "metis" is left out if it is not installed.
        chunk_edges: Edges per chunk.
        repeats: Number of runs after the first; the best counts.
        seed: Seed of the generated graph and of the methods.
        scratch: Folder for the generated file; None: the system's folder for temporary files.
    """

    num_nodes: int = 1_000_000
    num_edges: int = 10_000_000
    num_parts: int = 8
    data_root: str | os.PathLike | None = None
    graphs: list[str] = tuple(PUBLISHED_CUTS)
    methods: list[str] = ("spring", "metis")
    chunk_edges: int = 1 << 22
    repeats: int = 3
    seed: int = 0
    scratch: str | os.PathLike | None = None

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"speed": rows, "cuts": rows}."""
        methods = without_metis(self.methods)
        facts = (self.num_nodes, self.num_edges, self.num_parts, self.chunk_edges, self.repeats, self.seed)
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            edges = cache(partial(self._write, Path(folder) / "edges.bin"))
            cases = [
                Case({"method": method, "settings": digest(*facts)}, partial(self._speed, edges, method))
                for method in (methods if self.num_edges else ())
            ]
            speed = runner.rows(cases, "speed.csv")
        title = "One core, warm, from open to part_id (RF: replication factor)"
        show(speed and [*speed, PUBLISHED_SPEED], SPEED, title, machine_line())
        cuts = runner.rows(self._cut_cases(methods), "cuts.csv")
        _show_cuts(cuts)
        if any(row["method"] == "spring" for row in cuts):
            tell(f"cut / published, geometric mean: {cut_ratio_mean(cuts):.3f}")
        _draw(runner.folder / "spring.png", speed, cuts)
        return {"speed": speed, "cuts": cuts}

    def _write(self, path: Path) -> Path:
        tell(f"generating {self.num_edges:,} edges of {self.num_nodes:,} nodes")
        graph = SyntheticGraph(self.num_nodes, self.num_edges, seed=self.seed)
        return write_edges(graph.stream(), path, dtype="int32")

    def _speed(self, edges: Callable[[], Path], method: str) -> dict:
        options = {"chunk_edges": self.chunk_edges, "repeats": self.repeats, "seed": self.seed}
        found = measure(edges(), self.num_nodes, method, self.num_parts, **options)
        beyond = found["peak_bytes"] - 2 * self.chunk_edges * 8
        phases = {f"{name}_s": seconds for name, seconds in found.pop("phases").items() if name != "total"}
        return {
            "num_nodes": self.num_nodes,
            "listed_edges": self.num_edges,
            "num_parts": self.num_parts,
            "chunk_edges": self.chunk_edges,
            "million_edges_per_s": self.num_edges / found["seconds"] / 1e6,
            "million_edges_per_cpu_s": self.num_edges / found["cpu_seconds"] / 1e6,
            "bytes_a_node": found["peak_bytes"] / self.num_nodes,
            "bytes_a_node_beyond_two_chunks": max(0.0, beyond / self.num_nodes),
            "layout": found.pop("notes").get("layout", ""),
            **found,
            **phases,
        }

    def _cut_cases(self, methods: list[str]) -> Iterator[Case]:
        root = public_root(self.data_root)
        for name in self.graphs:
            path = None if root is None else root / name / "graph.npz"
            if path is None or not path.exists():
                tell(f"{name} is left out: no {path or 'folder of public graphs (set GNNSCALE_DATA)'}")
                continue
            edges = cache(lambda path=path: symmetric_edges(np.load(path)["edge_index"]))
            published = zip(PUBLISHED_PARTS, PUBLISHED_CUTS[name], strict=True)
            for (num_parts, cut), method in product(published, methods):
                key = {"graph": name, "num_parts": num_parts, "method": method, "settings": digest(self.seed)}
                yield Case(key, partial(_cut, edges, method, num_parts, cut, self.seed))


run = benchmark(SpringBench)


def symmetric_edges(edge_index: np.ndarray) -> np.ndarray:
    """List every undirected edge in both directions, sorted by source, without repeats and self-loops.

    Args:
        edge_index: (2, num_edges) integers.

    Returns:
        (2, 2 * num_edges) int32.
    """
    both = np.concatenate([edge_index, edge_index[::-1]], axis=1).astype(np.int64)
    src, dst = both[:, both[0] != both[1]]
    num_nodes = int(edge_index.max()) + 1
    return np.stack(np.divmod(np.unique(src * num_nodes + dst), num_nodes)).astype(np.int32)


def cut_ratio_mean(rows: list[dict]) -> float:
    """Return the geometric mean of SPRING's cut over the published code's."""
    return geometric_mean(row["cut_over_published"] for row in rows if row["method"] == "spring")


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


def _show_cuts(rows: list[dict]) -> None:
    """Print one line a graph and number of parts, the methods side by side."""
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
    show(shown, columns, title, machine_line())


def _draw(path: Path, speed: list[dict], cuts: list[dict]) -> None:
    sides = [rows for rows in (speed, cuts) if rows]
    if not sides:
        return
    figure, found = panels(["", " "][: len(sides)], size=(5.5, 4.5), beside=0)
    axes = iter(found.values())
    if speed:
        left, published = next(axes), (PUBLISHED_SPEED[name] for name in ("million_edges_per_s", "bytes_a_node"))
        for row in speed:
            left.plot(row["million_edges_per_s"], row["bytes_a_node"], "o", label=row["method"])
        left.plot(*published, "x", **PUBLISHED_LOOK)
        left.set(xscale="log", yscale="log", xlabel="million edges a second", ylabel="bytes a node, chunks included")
        left.legend()
    if cuts:
        right, cases = next(axes), {f"{row['graph']} {row['num_parts']}": row["published_cut_ratio"] for row in cuts}
        for (method,), own in grouped(cuts, "method").items():
            names = [f"{row['graph']} {row['num_parts']}" for row in own]
            right.plot(names, [row["edge_cut_ratio"] for row in own], "o", label=method)
        right.plot(list(cases), list(cases.values()), "x", **PUBLISHED_LOOK)
        right.set(yscale="log", ylabel="cut edges over all")
        right.tick_params(axis="x", labelrotation=90)
        right.legend()
    save(figure, path)
