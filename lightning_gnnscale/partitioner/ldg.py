"""LDG, linear deterministic greedy: a node goes to the part with most of its neighbours, weighted by space left.

Fennel uses the same stream of nodes, with another rule for the size of a part.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import check_number, short
from ..jit import kernel
from ..rng import combine_array, fold
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .constraints import judge, resolve_constraints
from .graph_access.external_csc import BLOCK_EDGES, ExternalCSC
from .graph_input import GraphInput, graph_partitioner

ORDERS = ("given", "random")
LINEAR, POWER = range(2)  # how a part's size lowers its score

_SALT = 0x4E4F4445  # separates this use of the seed from all others
_NEIGHBORS_AHEAD = 32
_ASSIGNMENT = "assignment"  # a phase, also of a checkpoint


class SizeRule(NamedTuple):
    """How the size of a part enters its score, `neighbours * weight - penalty`.

    Attributes:
        kind: LINEAR: weight 1 - size / cap, penalty 0. POWER: weight 1, penalty scale * size ** exponent.
        cap: Largest number of nodes in a part; the parts together have space for all nodes.
        scale, exponent: Parameters of POWER, both >= 0.
    """

    kind: int
    cap: int
    scale: float = 0.0
    exponent: float = 0.0


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


@graph_partitioner("ldg", memory=lambda num_nodes, *_: 6 * num_nodes)
def ldg(
    graph: GraphInput, num_parts: int, *, passes: int = 1, order: str = "given", block_edges: int = BLOCK_EDGES
) -> np.ndarray:
    """Partition by linear deterministic greedy over a stream of nodes with their neighbours.

    Args:
        graph: the graph; scratch disk is needed. Its seed decides the order "random", nothing else.
        graph.balance: {"nodes": slack}: a part holds at most slack * num_nodes / num_parts nodes, >= 1. None: 1.0, the
            paper's. No other constraint is taken.
        passes: times that all nodes are assigned, >= 1; from the second on a neighbour that has not come yet counts
            where the last pass put it, and parts start empty again.
        order: "given": ascending ids. "random": inside each block, by a hash of (seed, pass, node); the blocks stay
            in ascending order, because that is their order on disk.
        block_edges: entries of a block at most, >= 1; it has an effect on the result only with order "random".

    Returns:
        (num_nodes,) int32 part ids. A node without neighbours in a part with space goes to the least filled part.

    Cost: O(num_nodes + num_edges) time in two passes over the stream and `passes` over its rows on scratch disk; 5
        bytes a node (6 from 129 parts on) and two blocks of memory; see `open_external_csc` for the disk.
    Source: Stanton and Kliot, KDD 2012, "linear deterministic greedy"; restreamed: Nishimura and Ugander, KDD 2013.
        Differs: ties go to the least filled part, then to the lowest index.
    """
    return stream_nodes(graph, num_parts, lambda csc, cap: SizeRule(LINEAR, cap), 1.0, passes, order, block_edges)


def stream_nodes(
    graph: GraphInput,
    num_parts: int,
    make_rule: Callable[[ExternalCSC, int], SizeRule],
    default_slack: float,
    passes: int,
    order: str,
    block_edges: int,
) -> np.ndarray:
    """Give every node to the part with the best score, `passes` times over; what LDG and Fennel share.

    `make_rule` is called with the rows of the graph and the cap of a part; `default_slack` is the largest part over the
    mean where `graph.balance` does not say. The rest, and the cost: see `ldg`.
    """
    if set(graph.balance or ()) - {"nodes"}:
        raise ValueError(f"partitioner {graph.method!r} balances nodes alone, got balance={dict(graph.balance)}")
    check_number("partitioner.passes", passes, at_least=1)
    if order not in ORDERS:
        raise ValueError(f"partitioner.order must be one of {', '.join(ORDERS)}, got {short(order)}")
    csc = graph.open_rows(block_edges)
    left = graph.left_in(_ASSIGNMENT)
    state = NodeStreamState(**left) if left else NodeStreamState.empty(csc.num_nodes, num_parts)
    with csc, phases.phase(_ASSIGNMENT):
        constraints = resolve_constraints(graph.balance, None, csc.degree, num_parts, default_slack)
        _run_passes(graph, csc, state, make_rule(csc, int(constraints.cap[0])), passes, order)
        judge(constraints, state.size.reshape(-1, 1))
    del csc  # its degrees make space for the wider part ids
    return state.part_id.astype(np.int32, copy=False)


def _run_passes(graph: GraphInput, csc: ExternalCSC, state: NodeStreamState, rule: SizeRule, passes, order) -> None:
    position, row_order = state.position, np.empty(0, np.int64)
    while position[0] < passes:
        if position[1] == 0:
            state.size[:] = 0
        for block in csc.blocks(int(position[1])):
            if order == "random":
                key = fold(graph.seed, _SALT, int(position[0]))
                nodes = np.arange(block.first_node, block.first_node + block.num_rows)
                row_order = np.argsort(combine_array(key, nodes), kind="stable")
            _assign_rows(block.first_node, block.indptr, block.indices, row_order, state.part_id, state.size, rule)
            position[1] += 1
            graph.after_chunk(_ASSIGNMENT, state._asdict)
            graph.tell(_ASSIGNMENT, int(position.prod()), passes * csc.num_blocks)
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
    """Assign the nodes of a block, in `order` or, where that is empty, in ascending order."""
    num_parts = len(size)
    # Slot 0 counts neighbours without a part. It starts at one, so that it is never listed as touched.
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


@graph_partitioner("fennel", memory=lambda num_nodes, *_: 6 * num_nodes)
def fennel(
    graph: GraphInput,
    num_parts: int,
    *,
    gamma: float = 1.5,
    alpha: float | None = None,
    passes: int = 1,
    order: str = "given",
    block_edges: int = BLOCK_EDGES,
) -> np.ndarray:
    """Partition by Fennel's greedy rule over a stream of nodes with their neighbours.

    Args:
        graph: see `ldg`.
        graph.balance: see `ldg`. None: a slack of 1.1, the paper's nu.
        gamma: exponent of the cost alpha * size ** gamma of a part, >= 1.
        alpha: its factor, >= 0. None: num_edges * num_parts ** (gamma - 1) / num_nodes ** gamma, the paper's.
        passes, order, block_edges: see `ldg`.

    Returns:
        (num_nodes,) int32 part ids.

    Cost: see `ldg`.
    Source: Tsourakakis et al., WSDM 2014; restreamed: Nishimura and Ugander, KDD 2013. Differs: the price of a part is
        the derivative alpha * gamma * size ** (gamma - 1), which stays exact for large parts; ties go to the least
        filled part, then to the lowest index; alpha is the same in every pass.
    """
    check_number("partitioner.gamma", gamma, at_least=1)
    if alpha is not None:
        check_number("partitioner.alpha", alpha, at_least=0)

    def rule(csc: ExternalCSC, cap: int) -> SizeRule:
        factor = default_alpha(csc.num_nodes, csc.num_edges, num_parts, gamma) if alpha is None else float(alpha)
        return SizeRule(POWER, cap, factor * gamma, float(gamma) - 1.0)

    return stream_nodes(graph, num_parts, rule, 1.1, passes, order, block_edges)


def default_alpha(num_nodes: int, num_edges: int, num_parts: int, gamma: float) -> float:
    """Return the paper's alpha, sqrt(num_parts) * num_edges / num_nodes**1.5 at gamma 1.5."""
    return num_edges * num_parts ** (gamma - 1.0) / num_nodes**gamma
