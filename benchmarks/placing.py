"""How long it takes to place the rows of a graph of papers100M's size on devices, by their access probabilities."""

import time
from dataclasses import dataclass

import numpy as np

from lightning_gnnscale.memory_peak import MemoryPeak
from lightning_gnnscale.placement import access_probability, place
from lightning_gnnscale.placement.place import RULES

from .graphs import load_workload
from .present import plain_columns, show
from .runner import Case, Runner, benchmark, check_names, digest, in_fresh_process, machine_line, write_csv

_GIB = 1 << 30


@dataclass(frozen=True)
class PlacingBench:
    """Place the rows of a graph by its nodes' access probabilities, in a process of its own, and report the cost.

    Writes `placing.csv`. Seconds of the processor (`cpu_s`) are those of all threads: other work on the machine does
    not count.

    Attributes:
        num_nodes: Nodes; papers100M has 111,059,956.
        num_edges: Edges of the generated graph (20 bytes each while it is made) of which the probabilities are computed
            (`method="vip"`, a hundredth of the nodes trained); None: no graph is made, and probabilities are sampled
            from a power law.
        methods: Methods that place: the rules.
        num_devices, buffer_share, alpha: See `place`; the share is of all rows, for each device.

    Source: Song and Jiang, ICS 2022, who place papers100M in 24 s.
    """

    num_nodes: int = 111_059_956
    num_edges: int | None = None
    methods: list[str] = RULES
    num_devices: int = 4
    buffer_share: float = 0.1
    alpha: float = 0.2
    seed: int = 0

    def __post_init__(self):
        check_names("methods", self.methods, RULES)
        if self.num_nodes < 1000:
            raise ValueError(f"bench.num_nodes must be at least 1000, got {self.num_nodes}")
        if not 0 < self.buffer_share <= 1:
            raise ValueError(f"bench.buffer_share must be in (0, 1], got {self.buffer_share}")

    def measure(self, runner: Runner) -> list[dict]:
        """Return a row per method: seconds and CPU seconds of probabilities and of placing, and peak memory."""
        facts = digest(self.num_devices, self.buffer_share, self.alpha, self.seed)
        cases = [
            Case(
                {"nodes": self.num_nodes, "edges": self.num_edges, "method": method, "settings": facts},
                lambda method=method: in_fresh_process(measured, self, method),
            )
            for method in self.methods
        ]
        rows = runner.rows(cases)
        write_csv(runner.folder / "placing.csv", rows)
        show(rows, plain_columns(rows, ("method",)), f"placing on {self.num_devices} devices", machine_line())
        return rows


run = benchmark(PlacingBench)


def measured(bench: PlacingBench, method: str) -> dict:
    """Return the row of a method; compiled loops are loaded before the clock starts."""
    warm_up(bench, method)
    probabilities = {}
    if bench.num_edges is None:
        sample = np.random.default_rng(bench.seed)
        prob = sample.pareto(1.8, bench.num_nodes).astype(np.float32)
        prob /= prob.max()
    else:
        workload = load_workload(f"power_law:{bench.num_nodes}:{bench.num_edges}", None)
        clock = _Clock()
        prob = access_probability(workload, workload.train_nodes, method="vip")
        probabilities = {"probability_s": clock.seconds, "probability_cpu_s": clock.cpu_seconds}
        del workload
    with MemoryPeak() as peak:
        clock = _Clock()
        placement = place(prob, bench.num_devices, _buffer_rows(bench), alpha=bench.alpha, method=method)
        spent = {"place_s": clock.seconds, "place_cpu_s": clock.cpu_seconds}
    shares = {name: round(share, 4) for name, share in placement.shares.items() if name != "disk"}
    return {**probabilities, **spent, "peak_gib": round(peak.peak_bytes / _GIB, 2), **shares}


def warm_up(bench: PlacingBench, method: str) -> None:
    """Compile what a method runs."""
    place(np.ones(64, np.float32), bench.num_devices, 8, alpha=bench.alpha, method=method)
    if bench.num_edges is not None:
        workload = load_workload("power_law:1000:5000", None)
        access_probability(workload, workload.train_nodes, method="vip")


def _buffer_rows(bench: PlacingBench) -> int:
    return max(1, round(bench.buffer_share * bench.num_nodes))


class _Clock:
    """Seconds, and seconds of the processor, since it was made."""

    def __init__(self):
        self._began = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self._began[0], 2)

    @property
    def cpu_seconds(self) -> float:
        return round(time.process_time() - self._began[1], 2)
