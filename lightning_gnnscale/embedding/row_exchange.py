"""Rows pulled from the hosts that own them, and gradients pushed to them: uneven all-to-alls that all ranks enter."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ..errors import clear_error
from .hosts import Hosts
from .ownership import Ownership


class Requests:
    """Which nodes of a call are here, and which go to which rank.

    Args:
        nodes: (num,) int64.
        ownership, hosts: who owns them, and where this process runs.

    Attributes:
        here: (num_here,) positions of the nodes that this host owns. rows: (num_here,) their rows.
        away: (num_away,) positions of the others, by the rank that is asked.
        asked: (num_away,) their rows on their host.
        counts: (world_size,) how many each rank is asked for.
    """

    def __init__(self, nodes: np.ndarray, ownership: Ownership, hosts: Hosts):
        host, row = ownership.locate(nodes)
        local = host == hosts.host
        self.here = np.flatnonzero(local)
        self.rows = row[self.here]
        away = np.flatnonzero(~local)
        rank = _rank_of_rows(host[away], row[away], hosts)
        order = np.argsort(rank, kind="stable")
        self.away = away[order]
        self.asked = row[self.away]
        self.counts = np.bincount(rank, minlength=len(hosts.host_of_rank)).astype(np.int64)


def _rank_of_rows(host: np.ndarray, row: np.ndarray, hosts: Hosts) -> np.ndarray:
    """Return the rank that serves each row: a host deals its rows out to its ranks, so that none is served by two."""
    sizes = np.array([len(hosts.ranks(number)) for number in range(hosts.num_hosts)])
    table = np.zeros((hosts.num_hosts, sizes.max()), np.int64)
    for number in range(hosts.num_hosts):
        table[number, : sizes[number]] = hosts.ranks(number)
    return table[host, row % sizes[host]]


def pull_rows(
    requests: Requests,
    hosts: Hosts,
    read: Callable[[np.ndarray], np.ndarray],
    out: np.ndarray,
) -> int:
    """Fill in the requested rows, from this host and from others; all ranks must enter.

    Requests are sent first; the rows of this host are read while they travel.

    Args:
        requests: Requests of this rank; may be empty.
        hosts: The ranks by host.
        read: Maps (num,) rows of this host to their (num, dim) values, of the dtype of `out`.
        out: (num_nodes, dim), filled in place.

    Returns:
        Bytes of rows received from other hosts.

    Raises:
        StrategyError: another rank was lost, or did not enter.
    """
    with clear_error("pulling rows"):
        wanted = _exchange_counts(requests.counts, hosts.group)
        asked, work = _all_to_all(requests.asked, requests.counts, wanted, hosts.group)
        out[requests.here] = read(requests.rows)
        work.wait()
        answers = np.ascontiguousarray(read(asked.numpy()))
        row_bytes = out.dtype.itemsize * out.shape[1]
        flat = answers.reshape(-1).view(np.uint8)
        received, work = _all_to_all(flat, wanted * row_bytes, requests.counts * row_bytes, hosts.group)
        work.wait()
        out[requests.away] = received.numpy().view(out.dtype).reshape(-1, out.shape[1])
    return len(received)


def push_rows(
    requests: Requests, hosts: Hosts, gradients: np.ndarray, apply_here: Callable[[], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Send gradients to the owners of their rows; all ranks must enter.

    Args:
        requests: the rows of this rank's gradients; may be empty.
        hosts: the ranks.
        gradients: (num_nodes, dim), one row a node of the requests.
        apply_here: called while rows travel, to apply those that this host owns.

    Returns:
        (num_received,) int64 rows of this host and (num_received, dim) gradients, rank after rank, to be applied here.

    Raises:
        StrategyError: another rank was lost, or did not enter.
    """
    with clear_error("pushing gradients"):
        coming = _exchange_counts(requests.counts, hosts.group)
        rows, rows_work = _all_to_all(requests.asked, requests.counts, coming, hosts.group)
        dim = gradients.shape[1]
        leaving = np.ascontiguousarray(gradients[requests.away]).reshape(-1)
        values, work = _all_to_all(leaving, requests.counts * dim, coming * dim, hosts.group)
        apply_here()
        rows_work.wait()
        work.wait()
    return rows.numpy(), values.numpy().reshape(-1, dim)


def _exchange_counts(counts: np.ndarray, group) -> np.ndarray:
    received = torch.empty(len(counts), dtype=torch.int64)
    dist.all_to_all_single(received, torch.from_numpy(counts), group=group)
    return received.numpy()


def _all_to_all(values: np.ndarray, leaving: np.ndarray, coming: np.ndarray, group):
    """Start an uneven exchange; leaving, coming: (world_size,) items to and from each rank."""
    received = torch.empty(int(coming.sum()), dtype=torch.from_numpy(values[:0]).dtype)
    sent = torch.from_numpy(values)
    work = dist.all_to_all_single(received, sent, coming.tolist(), leaving.tolist(), group=group, async_op=True)
    return received, work
