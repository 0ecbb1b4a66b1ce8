"""Every figure of one GPU by one command: copies, gathers, sampling, batches by stage, epochs beside PyG's loop."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from lightning_gnnscale.events import machine
from lightning_gnnscale.placement import FeatureBuffer
from lightning_gnnscale.sampler import LayerwiseSampler, LinkSampler, NeighborSampler
from lightning_gnnscale.sampler.protocol import BatchSampler
from lightning_gnnscale.system import usable_cores

from .gpu_copies import copy_speed, gather_speed
from .gpu_full_graph import exchange_step, full_graph_step
from .gpu_graph import GPUGraph, generate
from .gpu_peer import missing_sampler, pyg_epoch
from .gpu_table import STAGES, columns_of, compared, of_stage, page
from .gpu_training import Training
from .present import grouped, show, tell
from .runner import Case, Runner, benchmark, check_names, digest, machine_line, write_csv

DEVICES = ("auto", "cuda", "cpu")
MODELS = ("GraphSAGE", "GAT", "R-GCN")
_COPY_BYTES, _GATHER_BYTES, _TABLE_BYTES = 1 << 30, 512 << 20, 4 << 30
_NODES, _EDGES, _SEEDS = 10_000_000, 200_000_000, 100_000
_FULL_SHARE = 0.25  # of the graph, in full-graph steps: a layer's activations stay on the device
_SAMPLERS = {
    "layers": LayerwiseSampler(8192, 3),
    "links": LinkSampler(NeighborSampler([15, 10])),
    "an induced subgraph": NeighborSampler([15, 10], subgraph_type="induced"),
}
FIRST_WIDTHS, LAST_WIDTHS = (512, 256, 128), (64, 1024)


@dataclass(frozen=True)
class GPUBench:
    """Measure one GPU in ten minutes: the rows that matter most come first, and the same command goes on.

    Copies bound gathers and crossings; compute alone bounds epochs. The generated graph has 10,000,000 nodes,
    200,000,000 edges and 100,000 training nodes, times `scale`. An epoch that takes longer than `epoch_s` is cut off;
    its seconds are then those of its batches times their number. On a CPU the stages run at small scales, so that a
    test goes through them, and the rows that need a GPU are named. Writes `rows.csv`, `gpu.csv` with ratios, `gpu.md`.

    Attributes:
        device: "auto", "cuda" or "cpu"; auto: a GPU where there is one.
        scale: Size of everything, over the full one.
        fanouts, batch_size, hidden_channels: Of batches and models.
        threads: Threads that sample, and workers of PyG's loader; None: as many as there are cores but two.
        models: Of GraphSAGE, GAT and R-GCN.
        epoch_s: Seconds after which an epoch is cut off.
    """

    device: str = "auto"
    scale: float = 1.0
    dim: int = 128
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 1024
    hidden_channels: int = 256
    threads: int | None = None
    models: Sequence[str] = MODELS
    epoch_s: float = 12.0
    seed: int = 0

    def __post_init__(self):
        check_names("device", [self.device], DEVICES)
        check_names("models", self.models, MODELS)
        for name in ("scale", "epoch_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"bench.{name} must be above 0, got {getattr(self, name)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("bench.device=cuda: this machine has no GPU that torch sees: say auto or cpu")

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per case, with its ratios."""
        torch.set_float32_matmul_precision("high")
        on_gpu = self.device != "cpu" and torch.cuda.is_available()
        where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        inputs = Inputs(self, where, runner.folder)
        wanted = inputs.rows()
        left_out = grouped([{"why": row.missing, "row": row.name} for row in wanted if row.missing], "why")
        left_out = {why: [one["row"] for one in own] for (why,), own in left_out.items()}
        for why, names in left_out.items():
            tell(f"{why}; left out: {'; '.join(names)}", soft_wrap=True)
        try:
            rows = runner.rows([row.case(self._digest(where)) for row in wanted if not row.missing])
        finally:
            inputs.close()
        rows = compared(rows)
        write_csv(runner.folder / "gpu.csv", rows)
        (runner.folder / "gpu.md").write_text(page(rows, machine_line(), left_out))
        for stage, title in STAGES.items():
            own = of_stage(rows, stage)
            show(own, columns_of(own), title)
        return rows

    def _digest(self, where: torch.device) -> str:
        facts = (self.scale, self.dim, *self.fanouts, self.batch_size, self.hidden_channels, self.threads)
        return digest(*facts, self.epoch_s, self.seed, where.type, machine()["gpu"])


run = benchmark(GPUBench)


@dataclass(frozen=True)
class Row:
    """One row to be measured.

    Attributes:
        stage, what, tier, width: What it is; the row's key.
        measure: Returns its columns.
        missing: Why it cannot be measured here; "": it can.
    """

    stage: str
    what: str
    tier: str
    width: int
    measure: Callable[[], dict]
    missing: str = ""

    @property
    def name(self) -> str:
        """The row in words."""
        return ", ".join(filter(None, (self.stage, self.what, self.tier)))

    def case(self, settings: str) -> Case:
        """Return the case; what fails is a row that says why, and the others are measured."""
        key = {"stage": self.stage, "what": self.what, "tier": self.tier, "width": self.width, "settings": settings}
        return Case(key, partial(_measured, self.measure))


def _measured(measure: Callable[[], dict]) -> dict:
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        if torch.cuda.is_available():  # the next row needs the memory of this one
            gc.collect()
            torch.cuda.empty_cache()


class Inputs:
    """What the rows are measured on, made when the first of them asks for it.

    Args:
        bench: The settings.
        device: Device that is measured.
        folder: Folder for the features on disk.
    """

    def __init__(self, bench: GPUBench, device: torch.device, folder: Path):
        self.bench, self.device, self.folder = bench, device, folder
        self._buffer: tuple[str, FeatureBuffer] | None = None

    @cached_property
    def graph(self) -> GPUGraph:
        """The generated graph."""
        return self._generated(1.0)

    @cached_property
    def training(self) -> Training:
        """How batches of it are made."""
        bench = self.bench
        threads = max(1, usable_cores() - 2) if bench.threads is None else bench.threads
        return Training(
            self.graph, self.device, bench.fanouts, bench.batch_size, bench.hidden_channels, threads, bench.epoch_s
        )

    def buffer(self, tier: str) -> FeatureBuffer:
        """Return the features in a tier; one tier is open at a time."""
        if self._buffer is None or self._buffer[0] != tier:
            self._close_buffer()
            self._buffer = tier, self.graph.buffer(tier, self.device)
        return self._buffer[1]

    def close(self) -> None:
        """Release all of it."""
        self._close_buffer()
        if "graph" in vars(self):
            self.graph.close()

    @property
    def no_gpu(self) -> str:
        """Why rows that need a GPU are left out; "": they are not."""
        return "" if self.device.type == "cuda" else "there is no GPU"

    def rows(self) -> list[Row]:
        """Return all rows, the most important first."""
        first, *others = self.bench.models
        rows = [*self._copies(), *self._gathers(FIRST_WIDTHS)]
        rows += [*self._epochs(first), *self._pipeline()]
        for model in others:
            rows += self._epochs(model)
        for model in self.bench.models:
            rows += self._slower_epochs(model)
        return [*rows, *self._gathers(LAST_WIDTHS), *self._full_graph()]

    def _copies(self) -> list[Row]:
        size = self._size(_COPY_BYTES)
        return [
            Row("copy", way, "", 0, partial(copy_speed, way, size, self.device), "" if way == "device" else self.no_gpu)
            for way in ("device", "to device", "from device")
        ]

    def _gathers(self, widths: Sequence[int]) -> list[Row]:
        sizes = self._size(_GATHER_BYTES), self._size(_TABLE_BYTES)
        return [
            Row("gather", f"{width} bytes", tier, width, partial(gather_speed, tier, width, *sizes, self.device),
                self.no_gpu if tier == "pinned" else "")
            for width in widths
            for tier in ("device", "pinned", "index_select")
        ]  # fmt: skip

    def _epochs(self, model: str) -> list[Row]:
        def alone() -> dict:
            return self.training.compute_alone(model, self.buffer("device"))

        return [
            Row("epoch", model, "compute alone", 0, alone),
            Row("epoch", model, "device", 0, partial(self._epoch, model, "device", True)),
            Row("epoch", model, "PyG, device", 0, partial(self._pyg, model, "device"), missing_sampler()),
            Row("epoch", model, "pinned", 0, partial(self._epoch, model, "pinned", True)),
            Row("epoch", model, "PyG, pinned", 0, partial(self._pyg, model, "pinned"), missing_sampler()),
        ]

    def _slower_epochs(self, model: str) -> list[Row]:
        return [
            *(
                Row("epoch", model, f"{tier}, no overlap", 0, partial(self._epoch, model, tier, False), self.no_gpu)
                for tier in ("device", "pinned")
            ),
            Row(
                "epoch",
                model,
                "device, sampled on the CPU",
                0,
                partial(self._epoch, model, "device", True, "cpu"),
                self.no_gpu,
            ),
            Row("epoch", model, "disk", 0, partial(self._epoch, model, "disk", True)),
        ]

    def _pipeline(self) -> list[Row]:
        return [
            Row("batch", "sample, one thread", "", 0, lambda: self.training.sampling(1)),
            Row("batch", "sample, all threads", "", 0, lambda: self.training.sampling(self.training.num_threads)),
            Row("batch", "sample, graph on the device", "", 0, lambda: self.training.sampling_on_device()),
            *(
                Row(
                    "batch",
                    f"sample {what}, graph on the device",
                    "",
                    0,
                    partial(self._sampled_by, sampler),
                    self.no_gpu,
                )
                for what, sampler in _SAMPLERS.items()
            ),
            Row("batch", "fill", "host", 0, lambda: self.training.filling(self.buffer("device"))),
            Row("batch", "cross", "", 0, lambda: self.training.crossing(), self.no_gpu),
            *(
                Row("batch", "gather", tier, 4 * self.bench.dim, partial(self._gathered, tier))
                for tier in ("device", "pinned")
            ),
        ]

    def _sampled_by(self, sampler: BatchSampler) -> dict:
        return self.training.sampling_by(sampler)

    def _full_graph(self) -> list[Row]:
        bench, rows = self.bench, max(1, round(self.bench.scale * _NODES * _FULL_SHARE / 4))

        def step() -> dict:
            return full_graph_step(self._generated(_FULL_SHARE), 128, 3, self.device)

        exchanges = [
            Row("exchange", "float32" if bits is None else f"{bits} bits", "", 512,
                partial(exchange_step, rows, 128, bits, self.device))
            for bits in (None, 8, 4)
        ]  # fmt: skip
        return [Row("full graph", "GCN", f"{bench.scale * _FULL_SHARE:g} of the size", 0, step), *exchanges]

    def _epoch(self, model: str, tier: str, overlapped: bool, sampled: str = "auto") -> dict:
        return self.training.epoch(model, self.buffer(tier), overlapped, sampled)

    def _gathered(self, tier: str) -> dict:
        return self.training.gathering(self.buffer(tier))

    def _pyg(self, model: str, tier: str) -> dict:
        self._close_buffer()
        return pyg_epoch(self.training, model, tier)

    def _generated(self, share: float) -> GPUGraph:
        bench = self.bench
        counts = (max(1, round(number * share * bench.scale)) for number in (_NODES, _EDGES))
        seeds = max(1, round(_SEEDS * bench.scale))
        return generate(*counts, bench.dim, seeds, bench.seed, self.device, self.folder)

    def _size(self, num_bytes: int) -> int:
        return max(1 << 12, round(self.bench.scale * num_bytes) >> 12 << 12)

    def _close_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer[1].close()
            self._buffer = None
