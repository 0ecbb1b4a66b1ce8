"""Nodes assigned one after the other while the rows of the graph stream by: what LDG and Fennel share."""

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..rng import combine_array, fold
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .checkpoint import Checkpoint
from .constraints import judge, resolve_constraints
from .graph_access.external_csc import BLOCK_EDGES, ExternalCSC, open_external_csc
from .graph_access.layout import ScanState
from .graph_access.scratch import AUTO
from .registry import check_number

ORDERS = ("given", "random")
LINEAR, POWER = range(2)  # how a part's size lowers its score

_SALT = 0x4E4F4445  # keeps this use of the seed apart from all others
_NEIGHBORS_AHEAD = 32


class SizeRule(NamedTuple):
    """How the size of a part enters its score, `neighbours * weight - penalty`.

    Attributes:
        kind: LINEAR: weight 1 - size / cap, penalty 0. POWER: weight 1, penalty scale * size ** exponent.
        cap: Largest number of nodes in a part; the parts together have room for all nodes.
        scale, exponent: Parameters of POWER, both >= 0.
    """

    kind: int
    cap: int
    scale: float = 0.0
    exponent: float = 0.0


class NodeStreamOptions(NamedTuple):
    """Options that every node stream has; see `ldg`."""

    passes: int = 1
    order: str = "given"
    block_edges: int = BLOCK_EDGES
    deduplicate: bool | None = None
    scratch: str | os.PathLike | None = AUTO
    checkpoint: str | os.PathLike | None = None
    checkpoint_every: int = 8


class NodeStreamState(NamedTuple):
    """The assignment as a value: saved after any block and given back, it goes on from there.

    Attributes:
        part_id: (num_nodes,) int8, int16 or int32, the part that each node was given last; -1: none yet.
        size: (num_parts,) int64, nodes that the present pass has given to each part.
        position: (2,) int64: the pass, and its next block.
    """

    part_id: np.ndarray
    size: np.ndarray
    position: np.ndarray

    @classmethod
    def empty(cls, num_nodes: int, num_parts: int) -> "NodeStreamState":
        dtype = next(t for t in (np.int8, np.int16, np.int32) if num_parts - 1 <= np.iinfo(t).max)
        return cls(np.full(num_nodes, -1, dtype), np.zeros(num_parts, np.int64), np.zeros(2, np.int64))


def stream_nodes(
    method: str,
    stream,
    num_parts: int,
    make_rule: Callable[[ExternalCSC, int], SizeRule],
    settings: dict,
    default_slack: float,
    options: NodeStreamOptions,
    seed: int = 0,
    balance=None,
    progress=None,
) -> np.ndarray:
    """Give every node to the part with the best score, `passes` times over.

    Args:
        method: its name.
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        make_rule: called with the graph and the cap of a part.
        settings: the method's own options, so that another run's checkpoint is not taken for this one's.
        default_slack: the largest part over the mean, where `balance` does not say.
        options: see `NodeStreamOptions`.
        seed: decides the order "random".
        balance: None, or {"nodes": slack}.
        progress: called as progress(what, done, total) once a chunk, later once a block.

    Returns:
        (num_nodes,) int32 part ids; no part holds more than its cap.

    Raises:
        ValueError: an option outside its range, a constraint other than "nodes", or a layout that the edges contradict.

    Cost: two passes over the stream and `passes` over its rows, O(num_nodes + num_edges) time each; 5 bytes a node (6
        from 129 parts on, 8 from 32,769 on) and two blocks of memory.
    """
    if set(balance or ()) - {"nodes"}:
        raise ValueError(f"partitioner {method!r} balances nodes alone, got balance={dict(balance)}")
    check_number("partitioner.passes", options.passes, at_least=1)
    check_number("partitioner.checkpoint_every", options.checkpoint_every, at_least=1)
    if options.order not in ORDERS:
        raise ValueError(f"partitioner.order must be one of {', '.join(ORDERS)}, got {options.order!r}")
    shared = {name: getattr(options, name) for name in ("passes", "order", "block_edges", "deduplicate")}
    settings = {"method": method, "num_parts": num_parts, "seed": seed, "balance": balance, **shared, **settings}
    saved = Checkpoint(options.checkpoint, stream, settings, options.checkpoint_every)
    csc, state = _open(stream, num_parts, options, saved, progress)
    with csc, phases.phase("assignment"):
        constraints = resolve_constraints(balance, None, csc.degree, num_parts, default_slack)
        rule = make_rule(csc, int(constraints.cap[0]))
        _run_passes(csc, state, rule, options, seed, saved, progress)
        judge(constraints, state.size.reshape(-1, 1))
    del csc  # its degrees make room for the wider part ids
    saved.remove()
    return state.part_id.astype(np.int32, copy=False)


def _open(stream, num_parts: int, options: NodeStreamOptions, saved, progress) -> tuple[ExternalCSC, NodeStreamState]:
    """Return the rows, made again after a kill, and the state at its start or where a checkpoint left it."""
    phase, arrays = saved.load() or ("", {})
    scan_state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase == "degrees" else None

    def save_scan(state: ScanState) -> None:
        if phase != "assignment":
            saved.after_chunk("degrees", state._asdict())

    csc = open_external_csc(
        stream, options.scratch, options.block_edges, options.deduplicate, progress, scan_state, save_scan
    )
    if phase == "assignment":
        return csc, NodeStreamState(*(arrays[name] for name in NodeStreamState._fields))
    return csc, NodeStreamState.empty(csc.num_nodes, num_parts)


def _run_passes(csc: ExternalCSC, state: NodeStreamState, rule: SizeRule, options, seed, saved, progress) -> None:
    position, given_order = state.position, np.empty(0, np.int64)
    while position[0] < options.passes:
        if position[1] == 0:
            state.size[:] = 0
        for block in csc.blocks(int(position[1])):
            order = given_order
            if options.order == "random":
                key = fold(seed, _SALT, int(position[0]))
                nodes = np.arange(block.first_node, block.first_node + block.num_rows)
                order = np.argsort(combine_array(key, nodes), kind="stable")
            _assign_rows(block.first_node, block.indptr, block.indices, order, state.part_id, state.size, rule)
            position[1] += 1
            saved.after_chunk("assignment", state._asdict())
            if progress is not None:
                progress("assignment", int(position.prod()), options.passes * csc.num_blocks)
        position[0], position[1] = position[0] + 1, 0


@kernel(inline="always")
def _weight(rule, size):
    return 1.0 - size / rule.cap if rule.kind == LINEAR else 1.0


@kernel(inline="always")
def _penalty(rule, size):
    return rule.scale * np.float64(size) ** rule.exponent if rule.kind == POWER else 0.0


@kernel(inline="always")
def _least_from(size, smallest, part):
    """Return the first part from `part` on that has the smallest size; where there is none, the first of one more.

    The part that held the smallest size last has just grown by one, so the next size up is that of some part.
    """
    while size[part] != smallest:
        part += 1
        if part == len(size):
            part, smallest = 0, smallest + 1
    return part


@kernel
def _assign_rows(first_node, indptr, indices, order, part_id, size, rule):
    """Assign the nodes of a block, in `order` or, where that is empty, as they lie."""
    num_parts = len(size)
    # Slot 0 counts neighbours without a part, and holds one from the start so that it is never listed as touched.
    count, touched = np.zeros(num_parts + 1, np.int64), np.empty(num_parts + 1, np.int64)
    count[0] = 1
    weight, penalty = np.empty(num_parts), np.empty(num_parts)
    least = 0
    for part in range(num_parts):
        weight[part], penalty[part] = _weight(rule, size[part]), _penalty(rule, size[part])
        if size[part] < size[least]:
            least = part
    for i in range(len(indptr) - 1):
        row = order[i] if len(order) else i
        num_touched = 0
        for e in range(indptr[row], indptr[row + 1]):
            if e + _NEIGHBORS_AHEAD < len(indices):
                prefetch(part_id, np.int64(indices[e + _NEIGHBORS_AHEAD]))
            slot = np.int64(part_id[indices[e]]) + 1
            touched[num_touched] = slot
            num_touched += count[slot] == 0
            count[slot] += 1
        # Among the parts without a neighbour none is better than the least filled one.
        best, best_score = least, count[least + 1] * weight[least] - penalty[least]
        for t in range(num_touched):
            part = touched[t] - 1
            score = count[part + 1] * weight[part] - penalty[part]
            count[part + 1] = 0
            tie_won = size[part] < size[best] or (size[part] == size[best] and part < best)
            if size[part] < rule.cap and (score > best_score or (score == best_score and tie_won)):
                best, best_score = part, score
        part_id[first_node + row] = best
        smallest = size[least]
        size[best] += 1
        weight[best], penalty[best] = _weight(rule, size[best]), _penalty(rule, size[best])
        if best == least:
            least = _least_from(size, smallest, least)
