"""Inclusion probabilities with the correlations of real batches: all hops are sampled but the last, which is exact."""

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..rng import batch_key, fold, permutation
from ..triton_kernels.sample_neighbors import Workspace, sample_neighbors

FIRST_LOOK = 8  # batches after which it may turn out that the prior needs no correction
_CERTAIN = np.float32(-80.0)  # log of the chance to be missed, where a read is certain


def corrected(
    prior: np.ndarray,
    csc: CSC,
    train_nodes: np.ndarray,
    fanouts: tuple[int, ...],
    batch_size: int,
    num_batches: int,
    seed: int,
) -> np.ndarray:
    """Draw estimates from sampled batches, and shrink them towards a prior by how much they vary.

    In a clustered graph the neighbours of a node are found together or not at all, and a prior that takes them as
    independent counts the node too often: twice as many rows a batch on a web graph. Given the nodes whose rows the
    last hop draws from, their draws are independent: q = 1 - product of (1 - fanout / degree). The mean m of q over
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
    for number, (seeds, key) in enumerate(_batches(train_nodes, batch_size, num_batches, seed), 1):
        found, first = _all_but_last_hop(csc, seeds, fanouts, key)
        _add_batch(csc.indptr, csc.indices, found, first, fanouts[-1], log_missed, touched, total, squares)
        if number in (num_batches, FIRST_LOOK):
            mean, scaled, weight = _shrinkage(prior, total, squares, number)
            if weight == 1:  # all that the batches differ from the prior by is noise
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


def _batches(train_nodes: np.ndarray, batch_size: int, num_batches: int, seed: int):
    """Yield (seeds, key) of the first batches of sampled epochs."""
    a_pass = -(-len(train_nodes) // batch_size)
    for number in range(num_batches):
        epoch, batch = divmod(number, a_pass)
        if batch == 0:
            order = train_nodes[permutation(len(train_nodes), fold(seed, epoch))]
        yield order[batch * batch_size : (batch + 1) * batch_size], batch_key(seed, epoch, 0, batch)


def _all_but_last_hop(csc: CSC, seeds: np.ndarray, fanouts: tuple[int, ...], key: int) -> tuple[np.ndarray, int]:
    """Return the nodes found before the last hop, and the position from which on the last hop draws their rows."""
    if len(fanouts) == 1:
        return seeds, 0
    drawn = sample_neighbors(csc, seeds, fanouts[:-1], key, workspace=Workspace(csc.num_rows, csc.indices.dtype))
    return drawn.n_id, len(drawn.indptr) - 1


@kernel
def _add_batch(indptr, indices, found, first, fanout, log_missed, touched, total, squares):
    """Add a batch's chances and their squares; log_missed is zero before and after."""
    num = 0
    for i in range(len(found)):
        if log_missed[found[i]] == 0:
            touched[num] = found[i]
            num += 1
        log_missed[found[i]] = _CERTAIN
    for i in range(first, len(found)):
        begin, end = indptr[found[i]], indptr[found[i] + 1]
        # numbers, not infinities: e**-80 is no chance to be missed
        change = np.float32(np.log1p(-fanout / (end - begin))) if 0 <= fanout < end - begin else _CERTAIN
        for e in range(begin, end):
            if log_missed[indices[e]] == 0:
                touched[num] = indices[e]
                num += 1
            log_missed[indices[e]] += change
    for i in range(num):
        chance = -np.expm1(np.float64(log_missed[touched[i]]))
        total[touched[i]] += chance
        squares[touched[i]] += chance * chance
        log_missed[touched[i]] = 0
