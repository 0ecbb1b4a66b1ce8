"""`place`: which feature rows go on which device, by rule or as the baselines do."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np

from ..errors import is_integer, short
from ..graph import CSC
from ..jit import kernel
from ..rng import fold, permutation
from .access_probability import assign_seeds, checked_nodes, count_reads
from .hottest import hottest_first
from .link_cost import devices_here, link_alphas
from .placement import Placement, mean_shares, read_costs, read_shares


class Capacity(NamedTuple):
    """How many rows a device's buffer, its cache or host memory has space for.

    Attributes:
        rows: Number of rows, >= 0; where rows differ in width, of rows of the mean width over all nodes.
        row_bytes: (num_nodes,) integers >= 0, bytes of each node's row, 0 for a row that is not placed; None: all rows
            are alike.
    """

    rows: int
    row_bytes: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the space where rows differ in width."""
        return int(self.rows * self.row_bytes.sum(dtype=np.int64)) // len(self.row_bytes)

    def placeable(self, nodes: np.ndarray) -> np.ndarray:
        """Return those of (num,) ids whose rows can be placed, in their order."""
        return nodes if self.row_bytes is None else nodes[self.row_bytes[nodes] > 0]

    def first(self, nodes: np.ndarray, times: int = 1) -> np.ndarray:
        """Return the first placeable ones of (num,) ids, as many as fit a multiple of this space."""
        if self.row_bytes is None:
            return nodes[: times * self.rows]
        nodes = self.placeable(nodes)
        ends = np.cumsum(self.row_bytes[nodes], dtype=np.int64)
        return nodes[: np.searchsorted(ends, times * self.num_bytes, "right")]


def assign_training_nodes(csc: CSC, train_nodes: np.ndarray, num_devices: int, num_layers: int) -> np.ndarray:
    """Assign each training node, one after the other, to the device that holds most of its neighbourhood.

    The score of a device is |its nodes and IN(t)| x (share - |its training nodes|) / |its nodes|, where IN(t) is what
    is within num_layers hops of t and `share` the mean number of training nodes; ties go to the device with fewest
    training nodes, then to the lowest number.

    Args:
        csc: in-neighbours.
        train_nodes: (num_train,) int64, distinct.
        num_devices: >= 1.
        num_layers: hops, >= 1.

    Returns:
        (num_train,) int32 device of each training node.

    Cost: a breadth-first search for each training node; num_devices + 16 bytes a node.
    Source: Lin et al., PaGraph, SoCC 2020, section 4.2.
    """
    device = np.empty(len(train_nodes), np.int32)
    assign_seeds(np.asarray(csc.indptr), np.asarray(csc.indices), train_nodes, num_devices, num_layers, device)
    return device


def most_read_rows(
    csc: CSC, train_nodes: np.ndarray, device: np.ndarray, num_devices: int, num_layers: int, space: Capacity
) -> list[np.ndarray]:
    """Return, for each device, the (num,) int64 rows of its neighbourhoods with the highest out-degree inside them.

    `device` is what `assign_training_nodes` returned; no more rows are returned than there is space for.
    """
    rows = []
    for own in range(num_devices):
        degree = np.zeros(csc.num_rows, np.int64)
        seeds = train_nodes[device == own]
        count_reads(np.asarray(csc.indptr), np.asarray(csc.indices), seeds, num_layers, degree)
        order = np.argsort(-degree, kind="stable")[: np.count_nonzero(degree)]
        rows.append(space.first(order))
    return rows


def place_group(order: np.ndarray, prob: np.ndarray, num_devices: int, buffer_rows: int, alpha: float) -> np.ndarray:
    """Place rows on the devices of one group that read each other's buffers.

    Every device begins with the hottest rows. Then, from the coldest of them up, copies on all devices but one give way
    to further rows. This goes on as long as the peer reads of the old row cost less than the host reads of the new row
    that are saved.

    Args:
        order: (num_nodes,) int64 node ids, hottest first.
        prob: (num_nodes,) how likely each node is to be read.
        num_devices: Number of devices in the group, >= 1.
        buffer_rows: Number of rows in each device's buffer, in [1, num_nodes].
        alpha: Cost of a peer read divided by that of a host read, in [0, 1].

    Returns:
        (num_devices, buffer_rows) int64 node ids.

    Cost: O(num_devices x buffer_rows) time.
    Source: Song and Jiang, ICS 2022, Rule 2 and Algorithm 1, in the form that gives the paper's own example.
    """
    rows = np.repeat(order[None, :buffer_rows], num_devices, axis=0)
    if num_devices > 1:
        probabilities = prob[order[: num_devices * buffer_rows]]  # in order: the loop reads them one after the other
        _spread(order, probabilities, float(alpha), rows)
    return rows


def alpha_by_cost(alpha: float, num_devices: int) -> float:
    """Return the alpha with which Algorithm 1 stops where an exchange no longer pays for all devices together.

    A copy of row a that gives way to a row b that is on no device costs its own device alpha p(a), and saves host reads
    of b: p(b) there, and (1 - alpha) p(b) on each of the other devices. That pays while p(b) (n - (n - 1) alpha) >
    alpha p(a). The printed rule asks for p(b) > alpha p(a), and keeps copies that cost the other devices more.

    Args:
        alpha: cost of a peer read over that of a host read, in [0, 1].
        num_devices: n, of the group.
    """
    return alpha / (num_devices - (num_devices - 1) * alpha)


@kernel
def _spread(order, probabilities, alpha, rows):
    num_devices, buffer_rows = rows.shape
    added = np.zeros(num_devices)
    turn = np.arange(num_devices)
    following = buffer_rows
    for i in range(num_devices * buffer_rows):
        if following >= len(probabilities):
            return
        place = i % num_devices
        if place == 0:
            # The device that got least so far goes first; equal ones by number.
            for k in range(num_devices):
                turn[k] = k
            for k in range(1, num_devices):
                device, j = turn[k], k
                while j > 0 and added[turn[j - 1]] > added[device]:
                    turn[j] = turn[j - 1]
                    j -= 1
                turn[j] = device
        if place == num_devices - 1:
            continue  # the last one keeps its copy
        position = buffer_rows - 1 - i // num_devices
        device = turn[place]
        if (
            not probabilities[following] > alpha * probabilities[position]
        ):  # a place is given once: it holds order[position]
            return
        rows[device, position] = order[following]
        added[device] += probabilities[following]
        following += 1


RULES = ("rule", "rule_by_cost")
_SAME = 1e-9  # by which costs differ that are equal
METHODS = ("rule", "ranges", "random", "degree", "metis", "pagraph", "rule_by_cost", "naive")


def place(
    prob: np.ndarray,
    num_devices: int,
    buffer_rows: int,
    alpha: float | str | np.ndarray = 0.2,
    groups: Sequence[Sequence[int]] | None = None,
    method: str = "rule",
    store=None,
    train_nodes: np.ndarray | None = None,
    num_layers: int = 3,
    part_id: np.ndarray | None = None,
    host_rows: int | None = None,
    seed: int = 0,
    row_bytes: np.ndarray | None = None,
) -> Placement:
    """Place feature rows on devices.

    Where rows differ in width, a buffer is filled with the likeliest rows until its bytes are used: a byte of it saves
    the more bytes, the likelier its row is read, whatever the row's width. In a group, Algorithm 1 goes over the rows
    of each width separately; a width gets what its hottest rows take of one buffer, or of all buffers of the
    group, whichever costs less.

    Args:
        prob: (num_nodes,) how likely each node is to be read, for example from `access_probability`; or (num_devices,
            num_nodes), where devices read different parts. A group then places by their mean, and the rules give a row
            that only one device of it holds to the one that reads it most.
        num_devices: Number of devices, >= 1.
        buffer_rows: Number of rows in each device's buffer, in [1, num_nodes]; with `row_bytes`, bytes of so many rows
            of the mean width over all nodes. So are `host_rows`.
        alpha: Cost of a peer read divided by that of a host read, in [0, 1]: 0.2 for pairs, 0 for all-to-all links in
            the paper. Or (num_devices, num_devices), the cost of each pair; "auto": measured once per machine, see
            `link_alphas`. The rules go by a group's mean.
        groups: Groups of devices that read each other's buffers; every device is in one group. None: those of
            `linked_groups` with which the slowest device's reads cost least; all devices where the pairs are alike.
        method: "rule": Algorithm 1 in groups, Rule 1 (the hottest rows) on lone devices. "rule_by_cost": the same, but
            copies give way as long as the reads of all devices together get cheaper (`alpha_by_cost`); or "naive",
            where with those the slowest device's reads cost less. "ranges": ranges
            of ids. "random": random rows. "degree": the nodes of highest in-degree, in turns. "metis": the hottest
            nodes of each device's part, by `part_id`. "naive": the hottest nodes of each device's range of ids.
            These five fill the devices of a group with different rows.
            "pagraph": each device caches what its own share of the training nodes reads, and no device reads another's.
        store: The store of the rows, whose fingerprint the placement keeps; needed by "degree" and "pagraph".
        train_nodes: (num_train,) distinct ids; needed by "pagraph".
        num_layers: Number of hops that "pagraph" looks ahead.
        part_id: (num_nodes,) ints in [0, num_devices), indexed by the same ids as prob; needed by "metis".
        host_rows: Number of rows that host memory has space for. The hottest of the rows that a group reads from there
            stay in it, the others on disk. None: all stay in it.
        seed: Seed of "random".
        row_bytes: (num_nodes,) integers >= 0, bytes of each node's row where rows differ in width; 0 for a row that
            stays in host memory. None: all rows are alike.

    Returns:
        Placement. With `row_bytes`, `costs` are in reads of rows of the mean width.

    Raises:
        ValueError: an argument is outside its range, or prob has NaN or negative values.

    Cost: a sort of num_nodes by radix, and two passes over the nodes for each device; 28 bytes a node at most, and 8
        for each row of a buffer. "pagraph": see `assign_training_nodes`.
    Source: Song and Jiang, ICS 2022.
    """
    prob = _checked_prob(prob, num_devices)
    num_nodes = prob.shape[-1]
    _check(num_nodes, num_devices, buffer_rows, alpha, method)
    space = Capacity(buffer_rows, _checked_bytes(row_bytes, num_nodes))
    mean = prob if prob.ndim == 1 else prob.mean(axis=0)
    order = cache(partial(hottest_first, mean))
    choices = [_checked_groups(groups, num_devices)]
    alone = max(map(len, choices[0])) == 1
    if isinstance(alpha, str):
        alpha = 0.0 if alone or method not in RULES else link_alphas(devices_here(num_devices))
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), (num_devices, num_devices)) * (1 - np.eye(num_devices))
    if groups is None and np.ndim(alpha) == 2:
        choices = linked_groups(alphas)
    if method == "pagraph":
        choices = [tuple((device,) for device in range(num_devices))]
        apart = _pagraph(store, train_nodes, num_nodes, num_devices, num_layers, space)
        ways = [lambda group: [apart[device] for device in group]]
    elif method in RULES:
        ways = [partial(_by_rule, method, prob, space, alphas, order)]
        if space.row_bytes is not None:
            ways.append(partial(_by_rule, method, prob, space, alphas, order, of_group=True))
    elif method == "metis":
        parts = _checked_parts(part_id, num_nodes, num_devices)
        ways = [partial(_hottest_of_parts, prob, parts, space)]
    elif method == "naive":
        ways = []
    else:
        found = _candidates(method, mean, store, seed)
        ways = [lambda group: _assigned(found, len(group), space, in_turns=method == "degree")]
    if method in ("naive", "rule_by_cost"):
        ranges = np.arange(num_nodes) * num_devices // num_nodes
        ways.append(partial(_hottest_of_parts, prob, ranges, space))
    read = prob if space.row_bytes is None else prob * (space.row_bytes / max(space.row_bytes.mean(), 1e-9))
    groups, rows, costs = _cheapest(choices, ways, read, alphas)
    on_disk = None if host_rows is None else _beyond_host(order(), rows, groups, host_rows, space.row_bytes)
    shares = read_shares(rows, groups, on_disk, prob)
    fingerprint = getattr(store, "layout_fingerprint", "")
    return Placement(rows, groups, num_nodes, on_disk, mean_shares(shares), shares, method, fingerprint, costs)


def _cheapest(choices: list, ways: list[Callable], prob: np.ndarray, alphas: np.ndarray) -> tuple:
    """Return the groups, rows and costs with which the slowest device's reads cost least; equal ones: the first."""
    best: tuple = ()
    for groups, rows_of in product(choices, ways):
        rows = {device: own for group in groups for device, own in zip(group, rows_of(group), strict=True)}
        placed = tuple(rows[device] for device in range(len(alphas)))
        costs = read_costs(placed, groups, prob, alphas)
        if not best or max(costs) < (1 - _SAME) * max(best[2]):
            best = groups, placed, costs
    return best


def linked_groups(alphas: np.ndarray) -> list[tuple[tuple[int, ...], ...]]:
    """Return groups of devices to choose from, the largest first: those whose reads of each other cost up to a bound.

    There is one grouping for each distinct cost below 1, in tenths, and each device alone.
    """
    tenths = np.ceil(10 * np.maximum(alphas, alphas.T) - _SAME)
    found = []
    for bound in sorted(set(tenths[tenths < 10].tolist()), reverse=True):
        groups: list[list[int]] = []
        for device in range(len(alphas)):
            near = (group for group in groups if all(tenths[device, other] <= bound for other in group))
            group = next(near, None)
            if group is None:
                groups.append([device])
            else:
                group.append(device)
        found.append(tuple(map(tuple, groups)))
    found.append(tuple((device,) for device in range(len(alphas))))
    return list(dict.fromkeys(found))


def _by_rule(
    method: str,
    prob: np.ndarray,
    space: Capacity,
    alphas: np.ndarray,
    hottest: Callable[[], np.ndarray],
    group: tuple[int, ...],
    of_group: bool = False,
) -> list[np.ndarray]:
    """Return the rows of each device of a group, by Algorithm 1.

    Args:
        hottest: Returns all nodes, hottest first, where all devices read alike.
        of_group: Rows of each width get what the hottest rows take of all buffers of the group, not of one.
    """
    num = len(group)
    alpha = float(alphas[np.ix_(group, group)].sum() / (num * (num - 1))) if num > 1 else 0.0
    alpha = alpha if method == "rule" else alpha_by_cost(alpha, num)
    if prob.ndim == 1:
        own, mean, order = None, prob, hottest()
    else:
        own = prob[list(group)]
        mean = own.mean(axis=0, dtype=own.dtype)
        order = hottest_first(mean)
    found = []
    for alike, buffer_rows in _by_width(order, space, num if of_group else 1):
        placed = place_group(alike, mean, num, buffer_rows, alpha)
        found.append(placed if own is None or num == 1 else _nearest(placed, own))
    return list(np.concatenate(found, axis=1)) if found else [order[:0]] * num


def _by_width(order: np.ndarray, space: Capacity, num_devices: int) -> list[tuple[np.ndarray, int]]:
    """Return the rows of each width, hottest first, and how many of them the buffer of a device has space for.

    `order` are all ids, hottest first; the hottest fill the buffers of `num_devices` together.
    """
    if space.row_bytes is None:
        return [(order, space.rows)]
    hottest = space.row_bytes[space.first(order, num_devices)]
    found = [(width, np.count_nonzero(hottest == width) // num_devices) for width in np.unique(hottest)]
    widths = space.row_bytes[order]
    return [(order[widths == width], rows) for width, rows in found if rows]


def _nearest(placed: np.ndarray, prob: np.ndarray) -> np.ndarray:
    """Assign rows held by one device alone again: each to the device that reads it most, while that has space.

    Args:
        placed: (num_devices, buffer_rows) ids; as many are returned on each device.
        prob: (num_devices, num_nodes). Those that lose most with their second choice are assigned first.
    """
    ids, copies = np.unique(placed, return_counts=True)
    single = ids[copies == 1]
    wanted = np.sort(prob[:, single], axis=0)
    single = single[np.argsort(wanted[-2] - wanted[-1], kind="stable")]
    choice = np.argsort(-prob[:, single], axis=0, kind="stable")
    rows, filled = placed.copy(), np.zeros(len(placed), np.int64)
    for device, row in enumerate(placed):
        kept = row[~np.isin(row, single)]
        rows[device, : len(kept)], filled[device] = kept, len(kept)
    _assign(single, choice, rows, filled)
    return rows


@kernel
def _assign(nodes, choice, rows, filled):
    """Add each node to the first device of its choice whose row has space."""
    for i in range(len(nodes)):
        for k in range(len(rows)):
            device = choice[k, i]
            if filled[device] < rows.shape[1]:
                rows[device, filled[device]] = nodes[i]
                filled[device] += 1
                break


def _candidates(method: str, prob: np.ndarray, store, seed: int) -> np.ndarray:
    if method == "ranges":
        return np.arange(len(prob))
    if method == "random":
        return permutation(len(prob), fold(seed))
    if store is None:
        raise ValueError('method="degree" needs store=, whose rows it counts')
    _check_store(store, len(prob))
    return np.argsort(-np.diff(np.asarray(store.csc.indptr)), kind="stable")


def _pagraph(
    store, train_nodes, num_nodes: int, num_devices: int, num_layers: int, space: Capacity
) -> list[np.ndarray]:
    if store is None or train_nodes is None:
        raise ValueError('method="pagraph" needs store= and train_nodes=, whose neighbourhoods it shares out')
    _check_store(store, num_nodes)
    train_nodes = checked_nodes(train_nodes, num_nodes)
    device = assign_training_nodes(store.csc, train_nodes, num_devices, num_layers)
    return most_read_rows(store.csc, train_nodes, device, num_devices, num_layers, space)


def _assigned(candidates: np.ndarray, num_devices: int, space: Capacity, in_turns: bool) -> list[np.ndarray]:
    """Assign the first candidates to devices, in turns or in ranges, no row twice."""
    candidates = space.placeable(candidates)
    if in_turns:
        return [space.first(candidates[device::num_devices]) for device in range(num_devices)]
    rows, assigned = [], 0
    for _ in range(num_devices):
        rows.append(space.first(candidates[assigned:]))
        assigned += len(rows[-1])
    return rows


def _hottest_of_parts(
    prob: np.ndarray, part_id: np.ndarray, space: Capacity, group: tuple[int, ...]
) -> list[np.ndarray]:
    rows = []
    for device in group:
        own = np.flatnonzero(part_id == device)
        probabilities = (prob if prob.ndim == 1 else prob[device])[own]
        rows.append(space.first(own[hottest_first(probabilities)]))
    return rows


def _beyond_host(
    order: np.ndarray, rows: list[np.ndarray], groups, host_rows: int, row_bytes: np.ndarray | None
) -> np.ndarray:
    """Return (num_nodes,) bool: the coldest rows that some group lacks and that find no space in host memory."""
    if host_rows < 0:
        raise ValueError(f"host_rows must be at least 0 or None, got {host_rows}")
    needed = np.zeros(len(order), bool)
    for group in groups:
        held = np.zeros(len(order), bool)
        for device in group:
            held[rows[device]] = True
        needed |= ~held
    on_disk, space = np.zeros(len(order), bool), Capacity(host_rows, row_bytes)
    wanted = space.placeable(order[needed[order]])
    on_disk[wanted[len(space.first(wanted)) :]] = True
    return on_disk


def _checked_bytes(row_bytes: np.ndarray | None, num_nodes: int) -> np.ndarray | None:
    if row_bytes is None:
        return None
    row_bytes = np.asarray(row_bytes)
    if row_bytes.shape != (num_nodes,) or row_bytes.dtype.kind not in "iu" or (row_bytes < 0).any():
        raise ValueError(
            f"row_bytes must be ({num_nodes},) integers of at least 0, got {row_bytes.dtype} of shape {row_bytes.shape}"
        )
    return row_bytes


def _checked_prob(prob: np.ndarray, num_devices: int) -> np.ndarray:
    prob = np.asarray(prob)
    fits = prob.ndim == 1 or (prob.ndim == 2 and len(prob) == num_devices)
    if not fits or prob.dtype.kind not in "fiu":
        raise ValueError(
            f"prob must be numbers, one a node, or ({num_devices}, num_nodes), got {prob.dtype} of shape {prob.shape}"
        )
    bad = np.argwhere(~(prob >= 0) | ~np.isfinite(prob))
    if len(bad):
        raise ValueError(f"prob must be finite and at least 0, got {prob[tuple(bad[0])]} at node {bad[0][-1]}")
    return prob if prob.dtype in (np.float32, np.float64) else prob.astype(np.float64)


def _check(num_nodes: int, num_devices: int, buffer_rows: int, alpha: float | str | np.ndarray, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {short(method)}")
    if not is_integer(num_devices) or num_devices < 1:
        raise ValueError(f"num_devices must be an integer of at least 1, got {short(num_devices)}")
    if not is_integer(buffer_rows):
        raise ValueError(f"buffer_rows must be an integer, got {short(buffer_rows)}")
    if not 1 <= buffer_rows <= num_nodes:
        raise ValueError(f"buffer_rows must be in [1, {num_nodes}], the number of nodes, got {buffer_rows}")
    if isinstance(alpha, np.ndarray):
        if alpha.shape != (num_devices, num_devices) or not np.all((alpha >= 0) & (alpha <= 1)):
            raise ValueError(f"alpha must be ({num_devices}, {num_devices}) in [0, 1], got {alpha}")
    elif alpha != "auto" and not (isinstance(alpha, int | float | np.number) and 0 <= alpha <= 1):
        raise ValueError(f'alpha must be in [0, 1] or "auto", got {short(alpha)}')


def _check_store(store, num_nodes: int) -> None:
    if store.csc.num_rows != num_nodes:
        raise ValueError(f"prob is for {num_nodes} nodes, store has {store.csc.num_rows}: both must be of one graph")


def _checked_groups(groups: Sequence[Sequence[int]] | None, num_devices: int) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return (tuple(range(num_devices)),)
    groups = tuple(tuple(int(device) for device in group) for group in groups)
    if sorted(device for group in groups for device in group) != list(range(num_devices)):
        raise ValueError(f"groups must hold each of the devices 0 to {num_devices - 1} once, got {groups}")
    return groups


def _checked_parts(part_id: np.ndarray | None, num_nodes: int, num_devices: int) -> np.ndarray:
    if part_id is None:
        raise ValueError('method="metis" needs part_id=, one part a device')
    part_id = np.asarray(part_id)
    if part_id.shape != (num_nodes,) or part_id.dtype.kind not in "iu":
        raise ValueError(f"part_id must be ({num_nodes},) ints, got {part_id.dtype} of shape {part_id.shape}")
    if part_id.min() < 0 or part_id.max() >= num_devices:
        raise ValueError(f"part_id must be in [0, {num_devices}), got {part_id.min()} to {part_id.max()}")
    return part_id
