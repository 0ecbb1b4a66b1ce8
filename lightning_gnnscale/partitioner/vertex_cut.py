"""What methods that place edges (vertex-cut) share: a degree pass, placing passes, masters; all go on after a kill."""

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import phases
from .checkpoint import Checkpoint
from .graph_access.layout import ScanState
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import BLOCK_EDGES, SimpleGraph, graph_facts, open_simple_graph, reopen_simple_graph
from .masters import MASTERS, assign_masters, check_masters
from .registry import check_number


class EdgePass(NamedTuple):
    """One pass over the edges.

    Attributes:
        name: Name of its phase, as in `Partitioning.seconds` and in progress.
        place: Called as place(src, dst, state, part) with a block of edges. It changes the state in place, moves the
            edges that it places to the front of `src` and `dst`, writes their parts to `part`, and returns their
            number.
        begin: Called as begin(state) before the first edge; returns the state. None: there is nothing to do.
    """

    name: str
    place: Callable[[np.ndarray, np.ndarray, NamedTuple, np.ndarray], int]
    begin: Callable[[NamedTuple], NamedTuple] | None = None


class VertexCut(NamedTuple):
    """A method that places edges.

    Attributes:
        method: its registered name.
        settings: its own options, plain values, for the checkpoint.
        state_type: a NamedTuple of arrays.
        start: called as start(graph, degree) after the degree pass; returns the state. It may keep `degree`.
        passes: in their order.
    """

    method: str
    settings: dict
    state_type: type
    start: Callable[[SimpleGraph, np.ndarray], NamedTuple]
    passes: tuple[EdgePass, ...]


class _Position(NamedTuple):
    """Where a pass stands: (2,) uint64 edges read and their checksum; (1,) next chunk; (num_parts,) edges placed."""

    seen: np.ndarray
    next_chunk: np.ndarray
    placed: np.ndarray

    @classmethod
    def start(cls, placed: np.ndarray) -> "_Position":
        """Return the position before the first chunk of a pass, `placed` edges being placed by earlier passes."""
        return cls(np.zeros(2, np.uint64), np.zeros(1, np.int64), placed)


class _Run(NamedTuple):
    """All that a placing pass changes, and the name of the pass that it stands in: "" before the first one."""

    phase: str
    graph: SimpleGraph
    state: NamedTuple
    owners: NamedTuple
    position: _Position


def place_edges(
    cut: VertexCut,
    stream,
    num_parts: int,
    seed: int = 0,
    masters: str = "majority",
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
    progress=None,
) -> np.ndarray:
    """Place every edge in a part, and give every node a master among the parts that hold its edges.

    Args:
        cut: The method.
        stream: An EdgeStream.
        num_parts: In [1, num_nodes].
        seed: Seed of the masters, used where the rule is "random".
        masters: "majority", "last" or "random": see `masters.MASTERS`.
        deduplicate, scratch: See `open_simple_graph`.
        checkpoint, checkpoint_every: See `spring`.
        progress: Called as progress(what, done, total) once a chunk.

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Raises:
        ValueError: an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.
    """
    check_masters(masters)
    check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)
    settings = {"num_parts": num_parts, "seed": seed, "masters": masters, "deduplicate": deduplicate, **cut.settings}
    settings["scratch"] = scratch is not None  # without it repeated edges may stay
    saved = Checkpoint(checkpoint, stream, {"method": cut.method, **settings}, checkpoint_every)
    phase, graph, state, owners, position = _open(cut, stream, settings, scratch, saved, progress)
    names = [edge_pass.name for edge_pass in cut.passes]
    for edge_pass in cut.passes[names.index(phase) if phase else 0 :]:
        with phases.phase(edge_pass.name):
            if edge_pass.name != phase:
                position = _Position.start(position.placed)
                state = state if edge_pass.begin is None else edge_pass.begin(state)
            _run_pass(edge_pass, graph, state, owners, position, saved, progress)
    phases.note(edges_per_part=position.placed.tolist())
    del state
    with phases.phase("masters"):
        part_id = assign_masters(owners, num_parts)
    saved.remove()
    return part_id


def _open(cut: VertexCut, stream, settings: dict, scratch, saved: Checkpoint, progress) -> _Run:
    """Return the run after the degree pass, or where a checkpoint left it."""
    phase, arrays = saved.load() or ("", {})
    rule = MASTERS[settings["masters"]]
    if phase not in ("", "degrees"):
        with phases.phase("degrees"):
            graph = reopen_simple_graph(stream, arrays, scratch, progress)
        return _Run(phase, graph, *(_load(kind, arrays) for kind in (cut.state_type, rule, _Position)))
    state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase else None
    with phases.phase("degrees"):
        graph, degree = open_simple_graph(
            stream,
            state,
            settings["deduplicate"],
            scratch,
            progress,
            after_chunk=lambda state: saved.after_chunk("degrees", state._asdict()),
        )
        owners = rule.start(degree, settings["num_parts"], settings["seed"])
        position = _Position.start(np.zeros(settings["num_parts"], np.int64))
        return _Run("", graph, cut.start(graph, degree), owners, position)


def _run_pass(edge_pass: EdgePass, graph: SimpleGraph, state, owners, position: _Position, saved, progress) -> None:
    """Read the edges from the position's chunk to the end; state, owners and position are changed in place."""
    num_parts = len(position.placed)
    part = np.empty(BLOCK_EDGES, np.int32)
    for chunk in graph.stream.chunks(int(position.next_chunk[0])):
        for src, dst in graph.blocks(chunk, position.seen):
            count = edge_pass.place(src, dst, state, part)
            owners.watch(src[:count], dst[:count], part[:count], num_parts)
            position.placed[:] += np.bincount(part[:count], minlength=num_parts)
        position.next_chunk[0] += 1
        values = (state, owners, position)
        saved.after_chunk(edge_pass.name, {**_save(*values), **graph_facts(graph)})
        if progress is not None:
            progress(edge_pass.name, int(position.seen[0]), graph.report.num_listed)
    graph.check(position.seen)


def _save(*values) -> dict[str, np.ndarray]:
    return {f"{type(value).__name__}.{name}": array for value in values for name, array in value._asdict().items()}


def _load(kind: type, arrays: dict[str, np.ndarray]):
    return kind(*(arrays[f"{kind.__name__}.{name}"] for name in kind._fields))
