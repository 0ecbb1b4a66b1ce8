"""How much of `streaming_multilevel` threads share: python -m benchmarks.thread_shares planted:10000000 grid:2000000

CPU seconds by phase, which tell on a machine that is busy what two threads would save on an idle one: of the calling
thread alone (serial), of what it shares (shared), and of the longest share of each call, added up (longest). Threads
that read ahead are left out: they do so for one thread too. Speed is (serial + shared) / (serial + longest).
"""

import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partitioner import partition, phases
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads

from .graphs import graph_file, public_root, resolve_graph

NUM_THREADS, NUM_PARTS = 2, 8


class Shares:
    """CPU seconds by phase, (3,) each: serial, shared, longest; counted while `counting`."""

    def __init__(self):
        self.seconds = defaultdict(lambda: np.zeros(3))
        self._phase, self._since, self._caller = "total", 0.0, threading.get_ident()

    @contextmanager
    def counting(self):
        """Count what is partitioned in the block."""
        share, phase = RowThreads.map, phases.phase
        RowThreads.map = lambda own, function, items: self._map(share, own, function, list(items))
        phases.phase = lambda name: self._within(phase, name)
        self._since = time.thread_time()
        try:
            yield
        finally:
            self._count_serial()
            RowThreads.map, phases.phase = share, phase

    def _count_serial(self) -> None:
        now = time.thread_time()
        self.seconds[self._phase][0] += now - self._since
        self._since = now

    @contextmanager
    def _within(self, phase, name: str):
        self._count_serial()
        before, self._phase = self._phase, name
        try:
            with phase(name):
                yield
        finally:
            self._count_serial()
            self._phase = before

    def _map(self, share, threads: RowThreads, function, items: list) -> list:
        if threads.num_threads == 1 or len(items) <= 1 or threading.get_ident() != self._caller:
            return share(threads, function, items)
        took, by = np.zeros(len(items)), np.zeros(len(items), np.int64)

        def call(i: int):
            began = time.thread_time()
            try:
                return function(items[i])
            finally:
                took[i], by[i] = time.thread_time() - began, threading.get_ident()

        self._count_serial()
        caller, self._caller = self._caller, -1  # what is shared within a share is a part of it
        try:
            return share(threads, call, range(len(items)))
        finally:
            self._caller = caller
            load = np.zeros(threads.num_threads)
            for seconds in took:
                load[load.argmin()] += seconds
            self._since += took[by == threading.get_ident()].sum()  # the rest is what sharing costs the caller
            self.seconds[self._phase] += 0, took.sum(), load.max()


def main(names: list[str]) -> None:
    """Print a table a graph."""
    for name in names:
        with (
            tempfile.TemporaryDirectory() as folder,
            graph_file(resolve_graph(name, public_root(None)), Path(folder)) as file,
        ):
            for _ in range(2):  # kernels are compiled in the first
                stream = open_edge_stream(file.path, file.num_nodes, layout=file.layout, **file.reader)
                shares = Shares()
                with shares.counting():
                    partition(stream, num_parts=NUM_PARTS, num_threads=NUM_THREADS)
        print(f"\n| {name} | serial | shared | longest | speed |\n|---|---|---|---|---|")
        total = sum(shares.seconds.values())
        for phase, (serial, shared, longest) in [*shares.seconds.items(), ("all", total)]:
            speed = (serial + shared) / (serial + longest)
            print(f"| {phase} | {serial:.3f} | {shared:.3f} | {longest:.3f} | {speed:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
