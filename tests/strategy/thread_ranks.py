"""Ranks as threads of one process: what the exchange hands to the process group travels through memory."""

import threading
from contextvars import ContextVar
from types import SimpleNamespace

from lightning_gnnscale.strategy import averaging
from lightning_gnnscale.strategy.exchange import transport


class ThreadRanks:
    """Patches rank, world size, all-to-all and broadcast, until the test ends.

    Attributes:
        handed_over: for each rank, the bytes that it has handed to others.
    """

    def __init__(self, world_size: int, monkeypatch):
        self.world_size, self.handed_over = world_size, [0] * world_size
        self._rank, self._calls = ContextVar("rank"), [0] * world_size
        self._arrived, self._chunks = threading.Condition(), {}
        monkeypatch.setattr(averaging, "rank", self._rank.get)
        monkeypatch.setattr(averaging, "world_size", lambda: world_size)
        monkeypatch.setattr(
            transport, "dist", SimpleNamespace(all_to_all_single=self._all_to_all, broadcast=self._broadcast)
        )

    def run(self, function):
        """Call function(rank) on all ranks at once; return the results in rank order."""
        results, errors, self._calls = [None] * self.world_size, [], [0] * self.world_size

        def call(rank):
            self._rank.set(rank)
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        assert not self._chunks, f"sent, and never read: {list(self._chunks)}"
        return results

    def _all_to_all(self, incoming, outgoing, arriving, sizes, async_op):
        rank = self._rank.get()
        number = self._calls[rank]
        self._calls[rank] += 1
        assert sum(sizes) == len(outgoing) and sum(arriving) == len(incoming) and async_op
        with self._arrived:
            for other, chunk in enumerate(outgoing.split(sizes)):
                self._chunks[number, rank, other] = chunk
                self.handed_over[rank] += len(chunk) if other != rank else 0
            self._arrived.notify_all()
        return SimpleNamespace(wait=lambda: self._deliver(rank, number, incoming, arriving))

    def _broadcast(self, tensor, source, async_op):
        rank = self._rank.get()
        number = self._calls[rank]
        self._calls[rank] += 1
        assert async_op and len(tensor)
        if rank != source:
            arriving = [len(tensor) if other == source else 0 for other in range(self.world_size)]
            return SimpleNamespace(wait=lambda: self._deliver(rank, number, tensor, arriving, [source]))
        with self._arrived:
            for other in range(self.world_size):
                if other != rank:
                    self._chunks[number, rank, other] = tensor
                    self.handed_over[rank] += len(tensor)
            self._arrived.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def _deliver(self, rank, number, incoming, arriving, sources=None):
        for other, place in enumerate(incoming.split(arriving)):
            if sources is not None and other not in sources:
                continue
            address = number, other, rank
            with self._arrived:
                assert self._arrived.wait_for(lambda a=address: a in self._chunks, timeout=10), f"never sent: {address}"
                chunk = self._chunks.pop(address)
            assert len(chunk) == len(place), "the receiver reckons with another number of bytes than were sent"
            place.copy_(chunk)
