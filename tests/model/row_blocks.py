"""A small graph cut into blocks of rows, and exchanges that carry rows between threads of one process."""

import threading
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.model.block import Block

NUM_NODES, OFFSETS = 17, (0, 6, 13, 17)
EDGES_OUT_AND_BACK = (
    (0, 1), (0, 7), (0, 8), (0, 14), (1, 2), (2, 9), (3, 4), (3, 15), (4, 7), (6, 7), (7, 8), (8, 12), (8, 13),
    (9, 10), (10, 14), (13, 14), (13, 15), (0, 13), (0, 12),
)  # fmt: skip
SELF_LOOPS = (3, 8)  # 5, 11 and 16 are isolated


@dataclass
class Rows:
    """The block of one process."""

    rank: int
    block: Block
    node_ids: Tensor
    send_rows: list[Tensor]
    counts: list[int]

    @property
    def num_local(self) -> int:
        return self.block.num_targets


def make_rows(offsets=OFFSETS, directed=False, weighted=False) -> list[Rows]:
    """Cut the graph at `offsets` into complete rows of each block; (0, NUM_NODES) leaves it whole."""
    edges = np.array([*EDGES_OUT_AND_BACK, *((node, node) for node in SELF_LOOPS)]).T
    if not directed:
        edges = np.concatenate([edges, edges[::-1, : len(EDGES_OUT_AND_BACK)]], axis=1)
    csc = build_csc(*edges, NUM_NODES)
    target = np.repeat(np.arange(NUM_NODES), csc.in_degree)
    weight = np.random.default_rng(0).random(len(target)) + 0.5 if weighted else None
    degree = np.bincount(target, weight, NUM_NODES).astype(np.float32 if weighted else np.int64)
    halos = []
    for first, stop in pairwise(offsets):
        sources = np.unique(csc.indices[csc.indptr[first] : csc.indptr[stop]])
        halos.append(sources[(sources < first) | (sources >= stop)])
    ranks = range(len(offsets) - 1)
    return [
        _rows_of(rank, ranks, offsets, halos, csc, None if weight is None else torch.from_numpy(weight), degree)
        for rank in ranks
    ]


def _rows_of(rank, ranks, offsets, halos, csc, weight, degree):
    first, stop = offsets[rank], offsets[rank + 1]
    nodes = np.concatenate([np.arange(first, stop), halos[rank]])
    place = {int(node): local for local, node in enumerate(nodes)}
    edges = slice(csc.indptr[first], csc.indptr[stop])
    indices = torch.tensor([place[int(node)] for node in csc.indices[edges]], dtype=torch.int32)
    indptr = torch.from_numpy(csc.indptr[first : stop + 1] - csc.indptr[first])
    own_weight = None if weight is None else weight[edges]
    lacking = torch.from_numpy(~np.isin(nodes, SELF_LOOPS)).float()  # nothing where there is a self-loop
    inside = [(halo >= first) & (halo < stop) for halo in halos]
    return Rows(
        rank,
        Block(indptr, indices, len(nodes), own_weight, torch.from_numpy(degree[nodes]), self_weight=lacking),
        torch.from_numpy(nodes.astype(np.int64)),
        [torch.from_numpy((halos[other][inside[other]] - first).astype(np.int64)) for other in ranks],
        [int(((halos[rank] >= offsets[owner]) & (halos[rank] < offsets[owner + 1])).sum()) for owner in ranks],
    )


class Mail:
    """Chunks on their way between threads; one who waits too long for a chunk fails."""

    def __init__(self):
        self._chunks, self._arrived = {}, threading.Condition()

    def post(self, address, chunk: Tensor) -> None:
        with self._arrived:
            assert address not in self._chunks, f"sent twice: {address}"
            self._chunks[address] = chunk.clone()
            self._arrived.notify_all()

    def fetch(self, address) -> Tensor:
        with self._arrived:
            assert self._arrived.wait_for(lambda: address in self._chunks, timeout=20), f"never sent: {address}"
            return self._chunks.pop(address)


class MailExchange:
    """The exchange of one layer of one block: exact, through a `Mail` that all blocks share."""

    local_only = False

    def __init__(self, mail: Mail, rows: Rows, layer: int, pulls: bool):
        self.mail, self.of, self.layer, self.pulls = mail, rows, layer, pulls
        self.log = []  # (what, training, width) of each call
        self.calls = 0

    def send(self, rows: Tensor, training: bool) -> "MailTransfer":
        self.log.append(("send", training, rows.shape[1]))
        return self._start(rows)

    def pull(self, grad: Tensor) -> "MailTransfer":
        self.log.append(("pull", True, grad.shape[1]))
        return self._start(grad)

    def _start(self, rows: Tensor) -> "MailTransfer":
        assert len(rows) == self.of.num_local and not rows.requires_grad
        self.calls += 1
        transfer = MailTransfer(self, self.calls, rows)
        transfer.post("there", [rows[own] for own in self.of.send_rows])
        return transfer


class MailTransfer:
    """Rows on their way, and the gradients that come back."""

    def __init__(self, exchange: MailExchange, call: int, rows: Tensor):
        self.exchange, self.call, self.like, self.came_back = exchange, call, rows, False

    def post(self, way, chunks):
        of = self.exchange.of
        for other, chunk in enumerate(chunks):
            if other != of.rank:
                self.exchange.mail.post((self.exchange.layer, self.call, way, of.rank, other), chunk)

    def fetch(self, way):
        of, mail = self.exchange.of, self.exchange.mail
        others = [other for other in range(len(of.counts)) if other != of.rank]
        return {other: mail.fetch((self.exchange.layer, self.call, way, other, of.rank)) for other in others}

    def wait(self):
        return torch.cat([self.like[:0], *self.fetch("there").values()])

    def send_back(self, grad):
        self.exchange.log.append(("send back", True, grad.shape[1]))
        self.came_back = True
        self.post("back", grad.split(self.exchange.of.counts))

    def wait_back(self):
        assert self.came_back, "gradients are awaited before any were sent"
        total = torch.zeros_like(self.like)
        for other, chunk in self.fetch("back").items():
            total.index_add_(0, self.exchange.of.send_rows[other], chunk)
        return total


def on_threads(function, *arguments):
    """Call function(*one of each argument list) for every rank at once; return the results in rank order."""
    results, errors = [None] * len(arguments[0]), []

    def call(rank, mine):
        try:
            results[rank] = function(*mine)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(rank, mine)) for rank, mine in enumerate(zip(*arguments, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return results
