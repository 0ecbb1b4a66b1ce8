"""Parts for several machines: the nodes are divided into machines, and those of each machine into its parts."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..edge_stream.options import StreamOptions
from ..edge_stream.stream import EdgeStream
from ..errors import check_integer
from ..graph import id_dtype
from ..jit import kernel
from ..rng import fold
from . import phases
from .constraints import Constraints, judge, node_weights, resolve_constraints
from .graph_access.scratch import AUTO, EdgeFile, reserve, scratch_folder
from .graph_access.simple_graph import open_simple_graph
from .graph_input import Checkpoint
from .part_order import MOST_PARTS, order_parts
from .registry import (
    WITHOUT_EFFECT,
    check_ids,
    fill_empty_parts,
    get_partitioner,
    promised_slack,
    usual_balance,
)

NODE_BYTES = 16  # that two levels hold beside the method
_SALT = 0x4D414348  # separates this use of the seed from all others
_SEEDS = 1 << 31  # METIS takes no larger ones
_VOLUME = "volume of the graph"  # of a machine's nodes, with their edges to other machines
_NOT_COMPARED = -1  # with parts that are made at once
_STATE = "machines"  # phase of a checkpoint


def check_num_machines(num_machines, num_parts: int) -> int:
    """Return the number of machines; ValueError where it does not divide that of the parts."""
    check_integer("partitioner.num_machines", num_machines, 1)
    if num_parts % num_machines:
        lower, upper = num_parts // num_machines * num_machines, -(-num_parts // num_machines) * num_machines
        takes = f"{lower} or {upper}" if lower else str(upper)
        raise ValueError(
            f"num_parts must be a multiple of partitioner.num_machines={num_machines}, so that each machine has as "
            f"many, got {num_parts}: take num_parts={takes}, or another num_machines"
        )
    return int(num_machines)


@dataclass(frozen=True)
class TwoLevels:
    """A method of two levels: first machines, then the parts of each.

    Args:
        method: Name of a registered method.
        options: Its options, complete.
        num_machines: Number of machines, > 1.
        seed, masks, balance, progress: As for `partition`.
    """

    method: str
    options: Mapping
    num_machines: int
    seed: int
    masks: Mapping | None
    balance: Mapping | None
    progress: Callable | None

    def parts(self, stream, num_parts: int) -> np.ndarray:
        """Return (num_nodes,) int32: the parts, of which each machine has a range of ids.

        Both levels keep the balance: a machine holds at most the root of what a part may hold over the mean, and its
        parts share what that leaves. Without a balance, a method of no fixed one keeps its own on each level, so that
        parts may be up to its square over the mean.

        The method also makes all parts at once, up to 2048; where fewer edges are between ranges of those, see
        `order_parts`, than between the machines, each of these ranges is a machine.

        With scratch disk the edges inside machines are written there once, else the stream is filtered for each
        machine. A state is saved after each machine, next to that of the method.

        Args:
            stream: An EdgeStream whose nodes are counted.
            num_parts: A multiple of the number of machines.

        Cost: the method twice for the whole graph, and once for each machine; 16 bytes a node beside it; scratch disk
            of 2 ids for each edge inside a machine.
        """
        saved = Checkpoint(self.options.get("checkpoint"), stream, self._settings(num_parts), 1)
        state = (saved.load() or (_STATE, {}))[1]
        balance = self.balance or usual_balance(self.method)
        asked = self._weights(stream, num_parts, balance) if balance else None
        if not state:
            state = self._machines(stream, num_parts, balance)
            _save(saved, state)
        if int(state["next"]) == _NOT_COMPARED:
            state |= self._ranges(stream, state["machine"], num_parts)
            _save(saved, state)
        facts, kept = json.loads(str(state["facts"]))
        phases.note(**facts, num_machines=self.num_machines)
        left = range(int(state["next"]), self.num_machines)
        if left:
            with phases.phase("parts of machines"), closing(_Edges(self, stream, state["machine"])) as edges:
                for machine in left:
                    self._divide(machine, edges.of(machine), state, num_parts, asked)
                    state["next"] = np.int64(machine + 1)
                    _save(saved, state)
        self._judge(stream, state, num_parts, asked, kept)
        saved.remove()
        return state["part_id"]

    def _machines(self, stream, num_parts: int, balance: Mapping | None) -> dict:
        """Return the state once each node has its machine: that, its part where it is known, and what is left to do."""
        with phases.phase("machines"):
            levels = self._levels(num_parts)
            slack = {name: float(value) ** (1 / levels) for name, value in (balance or {}).items()}
            machine, own = self._call(stream, self.num_machines, self.seed, self.masks, slack, "machines")
            phases.keep_graph(own.graph)
            kept = own.judgement and dict(zip(own.judgement[0].names, own.judgement[0].slack.tolist(), strict=True))
            facts = {name: value for name, value in own.notes.items() if not name.startswith("balance")}
            state = {"machine": machine, "facts": np.array(json.dumps([facts, kept], default=str))}
            return state | {
                "part_id": machine.copy(),
                "next": np.int64(self.num_machines if levels == 1 else _NOT_COMPARED),
            }

    def _ranges(self, stream, machine: np.ndarray, num_parts: int) -> dict:
        """Return what changes of the state: parts made at once, if ranges of them share fewer edges than machines."""
        left = {"next": np.int64(0)}
        if num_parts > MOST_PARTS:
            return left
        with phases.phase("machines"):
            part, _ = self._call(stream, num_parts, self.seed, self.masks, self.balance, "parts")
        between, cut = np.zeros((num_parts, num_parts), np.int64), 0
        with closing(stream.chunks()) as chunks:
            for chunk in chunks:
                cut += _count_between(chunk.src, chunk.dst, machine, part, between)
        number = np.empty(num_parts, np.int32)
        number[order_parts(between)] = np.arange(num_parts)
        owner = number // (num_parts // self.num_machines)
        within = np.equal.outer(owner, owner)
        if between[~within].sum() > cut:
            return left
        return {"machine": owner[part], "part_id": number[part], "next": np.int64(self.num_machines)}

    def _levels(self, num_parts: int) -> int:
        return 1 if num_parts == self.num_machines else 2

    def _settings(self, num_parts: int) -> dict:
        """Return plain values that decide the result: a checkpoint of other ones is not used."""
        options = {name: value for name, value in self.options.items() if name not in WITHOUT_EFFECT}
        if "scratch" in options:
            options["scratch"] = options["scratch"] is not None
        masks = {name: zlib.crc32(np.ascontiguousarray(mask)) for name, mask in self._masks().items()}
        settings = {"method": self.method, "options": options, "num_machines": self.num_machines, "seed": self.seed}
        return settings | {"num_parts": num_parts, "masks": masks, "balance": dict(self.balance or {})}

    def _masks(self) -> dict:
        return {name: mask for name, mask in (self.masks or {}).items() if mask is not None}

    def _judge(self, stream, state: dict, num_parts: int, asked, kept: Mapping | None) -> None:
        """Leave the balance of the parts to be judged: as asked, or what two levels of the method's own allow."""
        if asked is None:
            allowed = {name: slack ** self._levels(num_parts) for name, slack in (kept or {}).items()}
            largest = int(np.bincount(state["machine"]).max())
            promised = promised_slack(self.method, self.options, largest, num_parts // self.num_machines)
            if not allowed and promised is not None:
                allowed = {"nodes": max(1.0, promised * largest * self.num_machines / len(state["machine"]))}
            if not allowed:
                return
            asked = self._weights(stream, num_parts, allowed)
        judge(asked[0], _part_loads(asked[1], state["part_id"], num_parts))

    def _weights(self, stream, num_parts: int, balance: Mapping) -> tuple[Constraints, np.ndarray]:
        """Return the constraints of the parts, and (num_nodes, D) weights, (1, 1) of nodes alone."""
        degree = np.ones(stream.num_nodes, np.int8)
        if "volume" in balance:
            given = {name: self.options[name] for name in ("deduplicate", "scratch") if name in self.options}
            with phases.recording():  # the method reports the layout
                degree = open_simple_graph(stream, progress=self.progress, **given)[1]
        constraints = resolve_constraints(balance, self.masks, degree, num_parts)
        return constraints, node_weights(constraints, degree, np.int32)

    def _call(
        self, stream, num_parts: int, seed: int, masks, balance, what: str
    ) -> tuple[np.ndarray, phases.PhaseRecord]:
        """Return (num_nodes,) int32, the parts that the method gives of a graph, none empty, and its `PhaseRecord`."""
        options, told = dict(self.options), self.progress
        if options.get("checkpoint") is not None:
            options["checkpoint"] = f"{os.fspath(options['checkpoint'])}.{what.replace(' ', '')}"
        given = {"masks": masks or None, "balance": balance or None}
        given["progress"] = told and (lambda step, done, total: told(f"{what}: {step}", done, total))
        with phases.recording(phases.PhaseRecord(num_parts=num_parts, judges_later=True)) as record:
            part = get_partitioner(self.method)(stream, num_parts, seed=seed, **given, **options)
            part = check_ids(self.method, part, stream.num_nodes, num_parts)
            return fill_empty_parts(part, num_parts), record

    def _divide(self, machine: int, edges: EdgeStream, state: dict, num_parts: int, asked) -> None:
        """Give each node of a machine its part, in `state`."""
        nodes, each = np.flatnonzero(state["machine"] == machine), num_parts // self.num_machines
        own = np.arange(len(nodes), dtype=np.int32) % each
        if each > 1 and len(nodes) > each:  # else parts without nodes get one later
            masks = {name: np.asarray(mask)[nodes] for name, mask in self._masks().items()}
            balance = {}
            for d, name in enumerate(() if asked is None else asked[0].names):
                weight = np.ones(len(nodes), np.int8) if asked[1].size == 1 else asked[1][nodes, d]
                load = int(weight.sum(dtype=np.int64))
                if load:
                    if name == "volume":
                        name = _VOLUME
                        masks[name] = weight
                    balance[name] = max(int(asked[0].cap[d]), int(weight.max()), -(-load // each)) * each / load
            seed = fold(self.seed, _SALT, machine) % _SEEDS
            own, _ = self._call(edges, each, seed, masks, balance, f"machine {machine}")
        state["part_id"][nodes] = machine * each + own


class _Edges:
    """The edges inside each machine: on scratch disk where the method may use it, else filtered from the stream."""

    def __init__(self, levels: TwoLevels, stream, machine: np.ndarray):
        self._levels, self._stream, self._machine = levels, stream, machine
        self._number = np.empty(len(machine), id_dtype(len(machine)))
        self._sizes = np.zeros(levels.num_machines, np.int64)
        _number_nodes(machine, self._number, self._sizes)
        folder = scratch_folder(levels.options.get("scratch", AUTO))
        self._files: list[EdgeFile] = []
        if folder is None:
            return
        most = stream.num_edges or 0  # as far as it is known
        reserve(folder, most * 2 * self._number.itemsize, f"edges inside machines, {most} at most,")
        self._files = [EdgeFile(folder, self._number.dtype) for _ in range(levels.num_machines)]
        for pairs, ends in _sorted_chunks(stream, machine, self._number, levels.num_machines):
            for one, file in enumerate(self._files):
                file.append(pairs[ends[one] : ends[one + 1]])

    def of(self, machine: int) -> EdgeStream:
        """Return the edges inside a machine, by numbers of its nodes in the order of their ids."""
        levels = self._levels
        made_of = {"method": levels.method, "seed": levels.seed, "machine": machine, "of": levels.num_machines}
        file = self._files[machine] if self._files else None
        read = file.pieces if file else partial(_inside, self._stream, self._machine, self._number, machine)
        num_edges = file.num_edges if file else None
        return MachineEdges(self._stream, int(self._sizes[machine]), num_edges, read, made_of)

    def close(self) -> None:
        for file in self._files:
            file.close()


class MachineEdges(EdgeStream):
    """The edges between nodes of one machine, by numbers of these nodes.

    Args:
        stream: The edges of the whole graph.
        num_nodes: Nodes of the machine.
        num_edges: Edges between them; None: not counted.
        read: Yields them as (num_pairs, 2) arrays.
        made_of: Plain values that identify the machine's nodes, for the fingerprint.
    """

    def __init__(self, stream, num_nodes: int, num_edges: int | None, read: Callable[[], Iterator], made_of: dict):
        layout = stream.layout
        options = StreamOptions(num_nodes=num_nodes, chunk_edges=stream.chunk_edges, layout=layout)
        super().__init__(f"{stream.name}, machine {made_of['machine']}", id_dtype(num_nodes), options, num_edges)
        self._stream, self._read, self._made_of = stream, read, made_of

    def _identity(self) -> dict:
        return {"inside": self._stream.fingerprint(), **self._made_of}

    def _blocks(self, first_edge: int) -> Iterator:
        return self._read()


def _save(saved: Checkpoint, state: dict) -> None:
    if saved.path is not None:
        saved.save(_STATE, state)


def _part_loads(weight: np.ndarray, part_id: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (num_parts, D) int64: what each part weighs."""
    if weight.size == 1:
        return np.bincount(part_id, minlength=num_parts)[:, None]
    columns = [np.bincount(part_id, one, num_parts) for one in weight.T]
    return np.stack(columns, axis=1).astype(np.int64)


def _inside(stream, machine: np.ndarray, number: np.ndarray, one: int) -> Iterator[np.ndarray]:
    with closing(stream.chunks()) as chunks:
        for chunk in chunks:
            kept = (machine[chunk.src] == one) & (machine[chunk.dst] == one)
            yield np.stack([number[chunk.src[kept]], number[chunk.dst[kept]]], axis=1)


def _sorted_chunks(stream, machine: np.ndarray, number: np.ndarray, num_machines: int) -> Iterator[tuple]:
    """Yield of each chunk its edges inside machines, (num_pairs, 2) by machine, and (num_machines + 1,) starts."""
    pairs = np.empty((0, 2), number.dtype)
    with closing(stream.chunks()) as chunks:
        for chunk in chunks:
            if len(pairs) < len(chunk.src):
                pairs = np.empty((len(chunk.src), 2), number.dtype)
            ends = np.zeros(num_machines + 2, np.int64)
            _sort_inside(chunk.src, chunk.dst, machine, number, pairs, ends)
            yield pairs, ends[:-1]


@kernel
def _count_between(src, dst, machine, part, between):
    """Add up the edges between parts; return how many are between machines."""
    cut = 0
    for i in range(len(src)):
        between[part[src[i]], part[dst[i]]] += 1
        cut += machine[src[i]] != machine[dst[i]]
    return cut


@kernel
def _number_nodes(machine, number, sizes):
    """Number the nodes of each machine, in the order of their ids."""
    for node in range(len(machine)):
        number[node] = sizes[machine[node]]
        sizes[machine[node]] += 1


@kernel
def _sort_inside(src, dst, machine, number, pairs, ends):
    """Sort the edges inside machines by machine, in their order; `ends` gets where each machine's begin."""
    for i in range(len(src)):
        if machine[src[i]] == machine[dst[i]]:
            ends[machine[src[i]] + 2] += 1
    for one in range(2, len(ends)):
        ends[one] += ends[one - 1]
    for i in range(len(src)):
        one = machine[src[i]]
        if one == machine[dst[i]]:
            at = ends[one + 1]
            pairs[at, 0], pairs[at, 1] = number[src[i]], number[dst[i]]
            ends[one + 1] += 1
