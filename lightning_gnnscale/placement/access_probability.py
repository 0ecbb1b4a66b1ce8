"""How likely each node is to be read as input of a training batch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import short
from ..graph import CSC
from ..jit import kernel
from ..rng import batch_key, fold, permutation
from ..triton_kernels.sample_neighbors import Workspace, check_fanouts, sample_neighbors

if TYPE_CHECKING:
    from ..partition_store import PartitionStore


@kernel
def _search(indptr, indices, seed, stamp, num_layers, seen, queue):
    """List the nodes within num_layers hops of a seed in the queue, itself first, and return how many they are."""
    queue[0] = seed
    seen[seed] = stamp
    begin, end = 0, 1
    for _ in range(num_layers):
        last = end
        for q in range(begin, last):
            for e in range(indptr[queue[q]], indptr[queue[q] + 1]):
                u = indices[e]
                if seen[u] != stamp:
                    seen[u] = stamp
                    queue[end] = u
                    end += 1
        begin = last
    return end


@kernel
def count_reached(indptr, indices, train_nodes, num_layers, counts):
    """Count, for each node, the training nodes that have it within num_layers hops."""
    num_nodes = len(indptr) - 1
    seen = np.full(num_nodes, -1, np.int64)
    queue = np.empty(num_nodes, np.int64)
    for i in range(len(train_nodes)):
        end = _search(indptr, indices, train_nodes[i], i, num_layers, seen, queue)
        for q in range(end):
            counts[queue[q]] += 1


@kernel
def assign_seeds(indptr, indices, train_nodes, num_devices, num_layers, device):
    """Write the device of each training node, one after the other; see `pagraph.assign_training_nodes`."""
    num_nodes = len(indptr) - 1
    held = np.zeros((num_devices, num_nodes), np.bool_)
    num_held = np.zeros(num_devices, np.int64)
    num_train = np.zeros(num_devices, np.int64)
    share = len(train_nodes) / num_devices
    seen = np.full(num_nodes, -1, np.int64)
    queue = np.empty(num_nodes, np.int64)
    for i in range(len(train_nodes)):
        end = _search(indptr, indices, train_nodes[i], i, num_layers, seen, queue)
        best, best_score = -1, 0.0
        for d in range(num_devices):
            common = 0
            for q in range(end):
                common += held[d, queue[q]]
            score = common * (share - num_train[d]) / max(1, num_held[d])
            if best < 0 or score > best_score or (score == best_score and num_train[d] < num_train[best]):
                best, best_score = d, score
        device[i] = best
        num_train[best] += 1
        for q in range(end):
            if not held[best, queue[q]]:
                held[best, queue[q]] = True
                num_held[best] += 1


@kernel
def count_reads(indptr, indices, seeds, num_layers, degree):
    """Count, for each node within num_layers hops of the seeds, the edges by which targets there read it."""
    num_nodes = len(indptr) - 1
    seen = np.zeros(num_nodes, np.bool_)
    queue = np.empty(num_nodes, np.int64)
    end = len(seeds)
    for i in range(end):
        queue[i] = seeds[i]
        seen[seeds[i]] = True
        degree[seeds[i]] += 1
    begin = 0
    for _ in range(num_layers):
        last = end
        for q in range(begin, last):
            for e in range(indptr[queue[q]], indptr[queue[q] + 1]):
                u = indices[e]
                degree[u] += 1
                if not seen[u]:
                    seen[u] = True
                    queue[end] = u
                    end += 1
        begin = last


METHODS = ("vip", "vip_sampled", "presample", "reach", "paths")
FIRST_LOOK = 8  # batches after which it may turn out that the prior needs no correction
_CERTAIN = np.float32(-80.0)  # log of the probability of being missed, where a read is certain


def corrected(
    prior: np.ndarray,
    csc: CSC,
    train_nodes: np.ndarray,
    fanouts: tuple[int, ...],
    batch_size: int,
    num_batches: int,
    seed: int,
) -> np.ndarray:
    """Estimate from sampled batches, and shrink the estimates towards a prior by how much they vary.

    In a clustered graph the neighbours of a node are found together or not at all, and a prior that takes them as
    independent counts the node too often: twice as many rows a batch on a web graph. Given the nodes whose rows the
    last hop samples from, their samples are independent: q = 1 - product of (1 - fanout / degree). The mean m of q over
    batches is unbiased; its variance, estimated from the same batches, says how far to trust the prior instead
    (scaled to the same sum): p = m + w (prior - m), w = sum of variances / sum of (prior - m)^2, at most 1.

    Args:
        prior: (num_nodes,) estimates, not all 0.
        csc, train_nodes, fanouts, batch_size, seed: see `access_probability`.
        num_batches: at most, >= 2; FIRST_LOOK suffice where the prior is right.

    Returns:
        (num_nodes,) float32 in [0, 1].

    Cost: num_batches sampled batches of one hop less, and the rows of their last nodes; 36 bytes a node.
    Source: James and Stein, 1961, for the weight; the rest is this package's own.
    """
    num_nodes = csc.num_rows
    log_missed, touched = np.zeros(num_nodes, np.float32), np.empty(num_nodes, np.int64)
    total, squares = np.zeros(num_nodes), np.zeros(num_nodes)
    for number, (seeds, key) in enumerate(epoch_batches(train_nodes, batch_size, num_batches, seed), 1):
        found, first = _all_but_last_hop(csc, seeds, fanouts, key)
        _add_batch(csc.indptr, csc.indices, found, first, fanouts[-1], log_missed, touched, total, squares)
        if number in (num_batches, FIRST_LOOK):
            mean, scaled, weight = _shrinkage(prior, total, squares, number)
            if weight == 1:  # the batches differ from the prior by noise only
                break
    return (mean + weight * (scaled - mean)).astype(np.float32)


def _shrinkage(
    prior: np.ndarray, total: np.ndarray, squares: np.ndarray, num_batches: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the mean over batches, the prior scaled to its sum, and the weight of the prior."""
    mean = total / num_batches
    variance = (squares - num_batches * mean**2) / (num_batches * (num_batches - 1))
    scaled = np.minimum(prior * (mean.sum() / prior.sum()), 1.0)
    distance = ((scaled - mean) ** 2).sum()
    return mean, scaled, min(1.0, max(0.0, variance.sum()) / distance) if distance > 0 else 0.0


def epoch_batches(train_nodes: np.ndarray, batch_size: int, num_batches: int, seed: int):
    """Yield (seeds, key) of the first batches of sampled epochs."""
    a_pass = -(-len(train_nodes) // batch_size)
    for number in range(num_batches):
        epoch, batch = divmod(number, a_pass)
        if batch == 0:
            order = train_nodes[permutation(len(train_nodes), fold(seed, epoch))]
        yield order[batch * batch_size : (batch + 1) * batch_size], batch_key(seed, epoch, 0, batch)


def _all_but_last_hop(csc: CSC, seeds: np.ndarray, fanouts: tuple[int, ...], key: int) -> tuple[np.ndarray, int]:
    """Return the nodes found before the last hop, and the position from which on the last hop samples their rows."""
    if len(fanouts) == 1:
        return seeds, 0
    sampled = sample_neighbors(csc, seeds, fanouts[:-1], key, workspace=Workspace(csc.num_rows, csc.indices.dtype))
    return sampled.n_id, len(sampled.indptr) - 1


@kernel
def _add_batch(indptr, indices, found, first, fanout, log_missed, touched, total, squares):
    """Add a batch's probabilities and their squares; log_missed is zero before and after."""
    num = 0
    for i in range(len(found)):
        if log_missed[found[i]] == 0:
            touched[num] = found[i]
            num += 1
        log_missed[found[i]] = _CERTAIN
    for i in range(first, len(found)):
        begin, end = indptr[found[i]], indptr[found[i] + 1]
        # numbers, not infinities: e**-80 is zero probability of being missed
        change = np.float32(np.log1p(-fanout / (end - begin))) if 0 <= fanout < end - begin else _CERTAIN
        for e in range(begin, end):
            if log_missed[indices[e]] == 0:
                touched[num] = indices[e]
                num += 1
            log_missed[indices[e]] += change
    for i in range(num):
        probability = -np.expm1(np.float64(log_missed[touched[i]]))
        total[touched[i]] += probability
        squares[touched[i]] += probability * probability
        log_missed[touched[i]] = 0


def sampled_probability(prior: np.ndarray, batches: Iterable[np.ndarray]) -> np.ndarray:
    """Return how often batches read each node, shrunk towards a prior by how much that varies; see `corrected`.

    Args:
        prior: (num_nodes,) estimates, not all 0.
        batches: ids that a batch reads, one array a batch, at least two; repeated ids count once.
    """
    counts, number = np.zeros(len(prior)), 0
    for nodes in batches:
        counts[np.unique(nodes)] += 1
        number += 1
    if number < 2:
        raise ValueError(f"batches must be at least 2, got {number}")
    mean, scaled, weight = _shrinkage(prior, counts, counts, number)
    return (mean + weight * (scaled - mean)).astype(np.float32)


def layer_probability(store: "GraphRows", train_nodes: np.ndarray, nodes_per_layer, batch_size: int) -> np.ndarray:
    """Estimate how likely a batch of `LayerwiseSampler` reads each node.

    A layer samples k nodes u in proportion to w(u) = sum over v of f(v) / degree(v)^2, where f(v) is the probability
    that the layer before has v: f'(u) = min(1, k w(u) / sum of w). The probabilities are joined over all layers.

    Args:
        store, train_nodes, batch_size: See `access_probability`.
        nodes_per_layer: Nodes that each hop samples, the hop next to the seeds first.

    Returns:
        (num_nodes,) float32 in [0, 1].

    Cost: a pass over the rows a layer; 16 bytes a node.
    Source: Zou et al., LADIES, NeurIPS 2019, for w given the layer before; its mean over batches is this package's own.
    """
    csc = CSC(np.asarray(store.csc.indptr), np.asarray(store.csc.indices))
    found = np.zeros(csc.num_rows, np.float32)
    found[train_nodes] = min(1.0, batch_size / len(train_nodes))
    missed = 1 - found
    for size in nodes_per_layer:
        weight = np.zeros(csc.num_rows)
        _spread_importance(csc.indptr, csc.indices, found, weight)
        found = np.minimum(1.0, size * weight / max(weight.sum(), np.finfo(np.float64).tiny)).astype(np.float32)
        missed *= 1 - found
    return 1 - missed


class GraphRows(Protocol):
    """What these functions need of a store."""

    @property
    def csc(self) -> CSC:
        """All edges."""


def access_probability(
    store: "PartitionStore | GraphRows",  # some type checkers do not take a cached property for a property
    train_nodes: np.ndarray,
    num_layers: int = 3,
    method: str = "vip",
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    num_epochs: int = 2,
    num_batches: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """Estimate how likely a batch reads each node's features.

    Args:
        store: The graph: any object with the `csc` of a partition store, as arrays or memory maps.
        train_nodes: (num_train,) distinct ids in [0, num_nodes), the targets of the batches.
        num_layers: Number of hops for "reach" and "paths", >= 1.
        method: "vip": vertex inclusion probability of a batch sampled with the fan-outs, hop by hop, treating
            neighbours as independent. "vip_sampled": the same, corrected by batches of which all hops but the last are
            sampled. "presample": share of the batches of some sampled epochs. "reach": share of the training nodes that
            have the node within num_layers hops. "paths": number of paths of at most num_layers hops from training
            nodes, divided by the largest such number.
        fanouts: Neighbours per node for each hop, >= 1, or -1 for all; used by "vip", "vip_sampled" and "presample".
        batch_size: Training nodes per batch, >= 1; used by the same methods.
        num_epochs: Number of epochs that "presample" samples, >= 1.
        num_batches: Upper bound on the batches that "vip_sampled" samples, >= 2.
        seed: Seed of the samples of "vip_sampled" and "presample".

    Returns:
        (num_nodes,) float32 in [0, 1].

    Raises:
        ValueError: an unknown method, or an argument outside its range.

    Cost: "vip", "paths": one pass over the rows a hop, 12 to 16 bytes a node. "vip_sampled": also num_batches sampled
        batches, 48 bytes a node. "presample": num_epochs sampled epochs.
        "reach": a breadth-first search for each training node: for small graphs.
    Source: Song and Jiang, ICS 2022 ("reach", "paths"); Kaler et al., SALIENT++, MLSys 2023 ("vip").
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {short(method)}")
    csc = CSC(np.asarray(store.csc.indptr), np.asarray(store.csc.indices))
    train_nodes = checked_nodes(train_nodes, csc.num_rows)
    for name, value in {"num_layers": num_layers, "batch_size": batch_size, "num_epochs": num_epochs}.items():
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {short(value)}")
    if isinstance(num_batches, bool) or int(num_batches) != num_batches or num_batches < 2:
        raise ValueError(f"num_batches must be an integer of at least 2, got {short(num_batches)}")
    if method == "reach":
        return _reach(csc, train_nodes, int(num_layers))
    if method == "paths":
        return _paths(csc, train_nodes, int(num_layers))
    fanouts, batch_size = check_fanouts(fanouts), int(batch_size)
    if method == "presample":
        return _presample(csc, train_nodes, fanouts, batch_size, int(num_epochs), seed)
    prior = _vip(csc, train_nodes, fanouts, batch_size)
    if method == "vip":
        return prior
    return corrected(prior, csc, train_nodes, fanouts, batch_size, int(num_batches), seed)


def checked_nodes(nodes: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return training nodes as (num_train,) int64; ValueError unless they are distinct ids, at least one."""
    nodes = np.ascontiguousarray(nodes)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu" or len(nodes) == 0:
        raise ValueError(f"train_nodes must be ids, at least one, got {nodes.dtype} of shape {nodes.shape}")
    if nodes.min() < 0 or nodes.max() >= num_nodes:
        raise ValueError(f"train_nodes must be in [0, {num_nodes}), got {nodes.min()} to {nodes.max()}")
    if len(np.unique(nodes)) != len(nodes):
        raise ValueError(f"train_nodes must be distinct, got {len(nodes) - len(np.unique(nodes))} repeats")
    return nodes.astype(np.int64)


def _vip(csc: CSC, train_nodes: np.ndarray, fanouts: tuple[int, ...], batch_size: int) -> np.ndarray:
    """p_l(u) = 1 - prod over targets v of u of (1 - min(1, fanout / degree(v)) p_(l-1)(v)), joined over all hops."""
    found = np.zeros(csc.num_rows, np.float32)
    found[train_nodes] = min(1.0, batch_size / len(train_nodes))
    missed = 1 - found
    for fanout in fanouts:
        log_missed = np.zeros(csc.num_rows, np.float32)
        _spread_probabilities(csc.indptr, csc.indices, found, fanout, log_missed)
        found = -np.expm1(log_missed)
        missed *= 1 - found
    return 1 - missed


def _presample(csc, train_nodes, fanouts, batch_size, num_epochs, seed) -> np.ndarray:
    counts, num_batches = np.zeros(csc.num_rows, np.int64), num_epochs * -(-len(train_nodes) // batch_size)
    space = Workspace(csc.num_rows, csc.indices.dtype)
    for seeds, key in epoch_batches(train_nodes, batch_size, num_batches, seed):
        counts[sample_neighbors(csc, seeds, fanouts, key, workspace=space).n_id] += 1
    return (counts / num_batches).astype(np.float32)


def _reach(csc: CSC, train_nodes: np.ndarray, num_layers: int) -> np.ndarray:
    counts = np.zeros(csc.num_rows, np.int64)
    count_reached(csc.indptr, csc.indices, train_nodes, num_layers, counts)
    return (counts / len(train_nodes)).astype(np.float32)


def _paths(csc: CSC, train_nodes: np.ndarray, num_layers: int) -> np.ndarray:
    paths = np.zeros(csc.num_rows)
    paths[train_nodes] = 1
    for _ in range(num_layers):
        longer = paths.copy()  # a self-loop at every node: shorter paths count too
        _spread_paths(csc.indptr, csc.indices, paths, longer)
        paths = longer
    return (paths / paths.max()).astype(np.float32)


@kernel
def _spread_probabilities(indptr, indices, found, fanout, log_missed):
    """Add log(1 - probability) to every source of every target that may be found."""
    for v in range(len(indptr) - 1):
        if found[v] == 0:
            continue
        degree = indptr[v + 1] - indptr[v]
        probability = np.float64(found[v])
        if 0 <= fanout < degree:
            probability *= fanout / degree
        # a certain read stays finite: e**-80 is zero probability of being missed
        change = np.float32(np.log1p(-probability) if probability < 1 else -80.0)
        for e in range(indptr[v], indptr[v + 1]):
            log_missed[indices[e]] += change


@kernel
def _spread_importance(indptr, indices, found, weight):
    """Add probability / degree^2 of every target to each of its sources."""
    for v in range(len(indptr) - 1):
        if found[v] == 0:
            continue
        degree = np.float64(indptr[v + 1] - indptr[v])
        for e in range(indptr[v], indptr[v + 1]):
            weight[indices[e]] += found[v] / (degree * degree)


@kernel
def _spread_paths(indptr, indices, paths, longer):
    for v in range(len(indptr) - 1):
        if paths[v] != 0:
            for e in range(indptr[v], indptr[v + 1]):
                longer[indices[e]] += paths[v]
