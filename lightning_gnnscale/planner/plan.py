"""The number of parts: SDT-GNN's rule, with every term shown."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from ..errors import check_callable, check_flags, check_integer
from ..graph import id_dtype
from ..memory import format_bytes, format_seconds, gpu_memory_bytes, memory_limit_bytes, parse_bytes
from ..system import usable_cores
from .device_sampling import SamplingSize, size_sampling
from .device_speed import StageBound, card_of, speed_terms, stage_bounds
from .host_memory import (
    DISK_BYTES_PER_S,
    GPU_CONTEXT_BYTES,
    INTERPRETER_BYTES,
    BatchShape,
    RunSize,
    predict_evaluation,
    predict_evaluation_reads,
    predict_host_peak,
    predict_training,
    processes_bytes,
)
from .tier_sizes import plan_tiers

_OF_BATCHES = frozenset(one.name for one in fields(BatchShape))
_OF_TRAINING = frozenset(inspect.signature(predict_training).parameters) - {"run", "shape", "on_gpu"}
_OF_TRAINING |= {"pinned_rows", "simulated_rows"}
_OF_SAMPLING = ("part_rows", "mixed_parts", "sampled_together", "grouped_edge_types", "grouped_weights")
DEFAULT_COMPUTE_SHARE = 2.0 / 3.0
_STAGES = {"partition": "partitioning", "partition_store": "storing", "train": "training", "evaluate": "evaluation"}

_TIERS = {
    "device": "on a GPU",
    "peer": "on its peers",
    "pinned": "pinned on the host",
    "host": "in the page cache",
    "disk": "on disk",
}


@dataclass(frozen=True)
class Plan:
    """The number of parts that a graph is cut into, and what each of them costs.

    Attributes:
        num_parts: p, number of parts.
        num_devices: q, number of devices (of processes on a CPU).
        device_memory_bytes: M, memory for the parts of one device: its own on a CPU, its share of the host's for a GPU,
            which holds batches only; None: unlimited.
        compute_bytes: T, of that memory, set aside for computing; None if M is.
        csc_bytes, feature_bytes, edge_data_bytes: Sizes on disk of the graph, of its nodes' features, and of its edges'
            weights and features; S is their sum.
        num_nodes, num_edges: Number of nodes and of stored (directed) edges in the graph.
        host_memory_bytes: Memory of the host; None: unlimited.
        chosen_by: How num_parts was chosen: "rule", "halo" (the fewest parts that fit with their halos), "user", or
            "devices" (memory is unlimited).
        host_peak_bytes: Predicted peak of anonymous and shared memory on this host, for each stage.
        device_peak_bytes: Predicted peak of training on one device, beyond what a process holds before.
        halo_nodes_per_part: Halo rows of the largest part, known after partitioning or from a sample.
        halo_note: How the halo rows were found if they were not counted.
        edges_note: How num_edges was found if that is not obvious.
        largest_part_bytes: Size of the features and CSC of the largest part, bytes, known after partitioning.
        parts_held: Number of parts whose features are in memory at a time: those that a batch mixes, and the next one.
        device_memory_found, host_memory_found: Whether the planner found the memory itself; False if it was given.
        on_gpu: Whether the devices are GPUs.
        gpu_memory_bytes: Memory of one GPU, which batches and the model must fit; None: unlimited, or no GPU.
        tier_bytes: Feature rows on GPUs, bytes of each tier as one of them reads it: see `TierSizes`. Empty: rows are
            not placed.
        bounds: Bytes and least seconds of each stage of a batch on a named card; empty: none was named.
        sampling: What sampling takes of a GPU, and where it is; None: there is no GPU, and no card was named.
        num_batches: Batches of a pass over all nodes.
        evaluation_read_bytes: Predicted bytes that an exact evaluation of all nodes reads, all processes together; 0:
            memory holds the features.
    """

    num_parts: int
    num_devices: int
    device_memory_bytes: int | None
    compute_bytes: int | None
    csc_bytes: int
    feature_bytes: int
    num_nodes: int
    num_edges: int
    host_memory_bytes: int | None = None
    chosen_by: str = "rule"
    host_peak_bytes: dict[str, int] = field(default_factory=dict)
    device_peak_bytes: int = 0
    halo_nodes_per_part: int | None = None
    edges_note: str = ""
    edge_data_bytes: int = 0
    halo_note: str = ""
    largest_part_bytes: int = 0
    parts_held: int = 1
    device_memory_found: bool = False
    host_memory_found: bool = False
    on_gpu: bool = False
    gpu_memory_bytes: int | None = None
    tier_bytes: dict[str, int] = field(default_factory=dict)
    bounds: tuple[StageBound, ...] = ()
    sampling: SamplingSize | None = None
    num_batches: int = 0
    evaluation_read_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """S: the CSC, the features and the edges' data on disk, bytes."""
        return self.csc_bytes + self.feature_bytes + self.edge_data_bytes

    @property
    def parts_per_device(self) -> int:
        """Most parts that a device takes in turn."""
        return math.ceil(self.num_parts / self.num_devices)

    @property
    def part_bytes(self) -> int:
        """Bytes of the largest part: as measured, else a part's share of S and its halo's feature rows, if known."""
        own = math.ceil(self.total_bytes / self.num_parts)
        if self.halo_nodes_per_part is not None and self.num_nodes:
            own += math.ceil(self.halo_nodes_per_part * self.feature_bytes / self.num_nodes)
        return max(own, self.largest_part_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the parts that must fit a device at a time.

        Where the user gave their number and no device memory, none must: rows are then read for a run of batches.
        """
        if self.chosen_by == "user":
            return 0 if self.device_memory_found else self.part_bytes
        return self.part_bytes * min(self.parts_held, self.num_parts)

    @property
    def fits(self) -> bool:
        """Whether a part fits what a device has left, and every stage fits the host; True without limits."""
        return not self.shortages()

    def with_halo(self, halo_nodes_per_part: int, part_bytes: int = 0, note: str = "") -> "Plan":
        """Return the plan with the halo rows of the largest part, which SDT-GNN's rule ignores.

        Args:
            halo_nodes_per_part: halo rows of the part that has most of them.
            part_bytes: features and CSC of the largest part, bytes; 0: an average part and that halo.
            note: how the halo was found, where it was not counted.
        """
        halo = int(halo_nodes_per_part)
        return replace(self, halo_nodes_per_part=halo, largest_part_bytes=int(part_bytes), halo_note=note)

    def shortages(self) -> list[tuple[str, int, int]]:
        """Return what does not fit: (name, bytes needed, bytes allowed); the worst first."""
        found = []
        if self.device_memory_bytes is not None:
            space = self.device_memory_bytes - self.compute_bytes
            if self.held_bytes > space or space < 0:
                what = f"the largest of {self.num_parts} parts" if self.num_parts > 1 else "the graph as one part"
                if self.held_bytes > self.part_bytes:
                    what = f"the parts of a batch and the next, of {self.num_parts}"
                found += [(f"{what}, beside what is set aside for computing", self.held_bytes, max(space, 0))]
        memory = self.gpu_memory_bytes if self.on_gpu else self.device_memory_bytes
        if memory is not None and self.device_peak_bytes > memory:
            found += [("training on one device", self.device_peak_bytes, memory)]
        if self.host_memory_bytes is not None:
            found += [
                (f"{_STAGES.get(stage, stage)}, all processes together", peak, self.host_memory_bytes)
                for stage, peak in self.host_peak_bytes.items()
                if peak > self.host_memory_bytes
            ]
        return sorted(found, key=lambda one: one[2] - one[1])

    def explain(self) -> str:
        """Return every term of the decision, one a line."""
        return "\n".join(f"{term:<34} {value}" for term, value in self.terms())

    def terms(self) -> list[tuple[str, str]]:
        """Return the (term, value) pairs that `explain` prints."""
        rows = [
            ("nodes", f"{self.num_nodes:,}"),
            ("edges as stored", f"{self.num_edges:,}" + (f" ({self.edges_note})" if self.edges_note else "")),
            ("CSC, the graph on disk", format_bytes(self.csc_bytes)),
            ("features", format_bytes(self.feature_bytes)),
        ]
        if self.edge_data_bytes:
            rows += [("edge data, weights and features", format_bytes(self.edge_data_bytes))]
        rows += [
            ("S = CSC + features" + " + edge data" * bool(self.edge_data_bytes), format_bytes(self.total_bytes)),
            ("q, devices", str(self.num_devices)),
        ]
        if self.device_memory_bytes is None:
            rows += [("M, memory of a device", "not limited")]
        else:
            space = self.device_memory_bytes - self.compute_bytes
            rows += [
                (
                    "M, host memory for a GPU's parts" if self.on_gpu else "M, memory of a device",
                    _memory(self.device_memory_bytes, self.device_memory_found),
                ),
                ("T, set aside for computing", format_bytes(self.compute_bytes)),
                ("M - T, space for a part", format_bytes(max(0, space))),
            ]
            if self.chosen_by == "rule":
                sign = "<=" if self.total_bytes <= self.num_devices * space else ">"
                rows += [("rule", f"S {sign} q (M - T) = {format_bytes(max(0, self.num_devices * space))}")]
        if self.on_gpu:
            known = self.gpu_memory_bytes is not None
            rows += [("memory of a GPU, for batches", format_bytes(self.gpu_memory_bytes) if known else "not limited")]
        rows += [
            (f"feature rows, {_TIERS[tier]}", format_bytes(size)) for tier, size in self.tier_bytes.items() if size
        ]
        rows += [] if self.sampling is None else self.sampling.terms()
        times = f"{self.parts_held} " if self.parts_held > 1 else ""
        why = {
            "user": "as given",
            "devices": "one a device: its memory is not limited",
            "rule": "p = q" if self.num_parts == self.num_devices else f"p = ceil({times}S / (M - T))",
            "halo": "the fewest tried that fit with their halo",
        }[self.chosen_by]
        rows += [
            ("p, parts", f"{self.num_parts} ({why})"),
            ("parts a device, at most", str(self.parts_per_device)),
        ]
        if self.halo_nodes_per_part is not None:
            note = f" ({self.halo_note})" if self.halo_note else ""
            rows += [("halo rows of the largest part", f"{self.halo_nodes_per_part:,}{note}")]
        which = "bytes of the largest part" if self.halo_nodes_per_part is not None else "bytes of a part without halo"
        rows += [(which, format_bytes(self.part_bytes))]
        if self.parts_held > 1:
            held = min(self.parts_held, self.num_parts)
            rows += [("parts in memory at a time", f"{held}, those of a batch and the next")]
        rows += [("peak of a device, predicted", format_bytes(self.device_peak_bytes))]
        rows += [(f"host peak, {stage}, predicted", format_bytes(peak)) for stage, peak in self.host_peak_bytes.items()]
        if self.evaluation_read_bytes and self.fits:  # by the memory that is left, which says nothing where none is
            seconds = format_seconds(self.evaluation_read_bytes / DISK_BYTES_PER_S)
            reads = f"{format_bytes(self.evaluation_read_bytes)}, {seconds} at 1 GB/s"
            rows += [("read to evaluate all nodes, predicted", reads)]
        host = self.host_memory_bytes
        rows += [("memory of the host", "not limited" if host is None else _memory(host, self.host_memory_found))]
        rows += [("fits", "yes" if self.fits else f"NO: {self.remedy()}")]
        return rows + (speed_terms(self.bounds, self.num_batches) if self.bounds else [])

    def remedy(self, would_fit: str = "") -> str:
        """Return one sentence: what does not fit, by how much, and what would; empty where everything fits.

        Args:
            would_fit: settings that were tried and fit; if none is known: settings that help.
        """
        shortages = self.shortages()
        if not shortages:
            return ""
        what, needed, allowed = shortages[0]
        on_host = "processes" in what or (self.on_gpu and "part" in what)
        if not would_fit:
            more = "smaller batches, fan-outs or hidden layers, feature rows of fewer bytes"
            would_fit = f"fewer processes, {more}" if on_host else f"{more}, or another num_parts="
        found = self.host_memory_found if on_host else self.device_memory_found
        short = needed - allowed if self.on_gpu and "part" in what else 0
        enough = self.host_memory_bytes + self.num_devices * short if short else needed
        where, total = ("host", enough) if on_host else ("device", self.needed_device_bytes)
        size = f"{math.ceil(total / 2**20)}MiB"
        # What was found cannot be raised by a setting.
        memory = f"{size} of memory for the {where}" if found else f"planner.{where}_memory_bytes={size}"
        return (
            f"{what}: {format_bytes(needed)} of {format_bytes(allowed)}, {format_bytes(needed - allowed)} short; "
            f"what would fit: {would_fit}, or {memory}"
        )

    @property
    def needed_device_bytes(self) -> int:
        """Memory of a device with which this plan would fit it, bytes."""
        if self.on_gpu:
            return self.device_peak_bytes
        if self.device_memory_bytes is None:
            return 0
        if not self.device_memory_found and self.compute_bytes == math.ceil(
            self.device_memory_bytes * DEFAULT_COMPUTE_SHARE
        ):
            beside_part = math.ceil(self.held_bytes / (1 - DEFAULT_COMPUTE_SHARE))
        else:
            beside_part = self.held_bytes + self.compute_bytes
        return max(self.device_peak_bytes, beside_part)


def _memory(num_bytes: int, found: bool) -> str:
    return f"{format_bytes(num_bytes)} ({'found' if found else 'given'})"


def csc_bytes(num_nodes: int, num_edges: int) -> int:
    """Return the bytes of a CSC on disk: int64 indptr and ids of `id_dtype(num_nodes)`."""
    return 8 * (num_nodes + 1) + id_dtype(num_nodes).itemsize * num_edges


def plan(
    *,
    num_nodes: int,
    num_edges: int,
    feature_bytes: int | str = 0,
    placeable_bytes: int | str | None = None,
    edge_row_bytes: int = 0,
    num_devices: int = 1,
    device_memory_bytes: int | str | None = "auto",
    host_memory_bytes: int | str | None = "auto",
    compute_bytes: int | str | None = None,
    num_parts: int | None = None,
    accelerator: str = "auto",
    interpreter_bytes: int = INTERPRETER_BYTES,
    start_method: str = "popen",
    partition_bytes: Callable[[int], int | None] | None = None,
    device: str | None = None,
    rows_on: str = "pinned",
    sampled_on: str = "auto",
    samples_whole: bool = False,
    **training_options,
) -> Plan:
    """Decide the number of parts by SDT-GNN's rule: S <= q (M - T) gives q parts, otherwise ceil(S / (M - T)).

    Args:
        num_nodes, num_edges: Number of nodes and of stored edges in the graph (after `to_undirected`, twice the
            undirected edges).
        feature_bytes: Size of the features on disk, in bytes or as text like '12GiB'.
        placeable_bytes: Size of the dense ones among them, which a placement can put on devices; None: all are.
        edge_row_bytes: Size of the weight and features of one stored edge, bytes.
        num_devices: q, number of devices or processes, >= 1.
        device_memory_bytes: Memory of one device. "auto" finds it: the memory of the smallest GPU, or on CPUs a
            process's share of the host's memory without its interpreter. None: unlimited, one part per device. On CPUs
            it is M; a GPU holds batches alone, and its share of the host's memory is M.
        host_memory_bytes: Memory of the host. "auto" finds it, also under a cgroup's limit. None: unlimited.
        compute_bytes: T, memory set aside for computing. None: two thirds of M if M is given; the predicted
            need of training if M was found.
        num_parts: p, if the user has chosen it; None: the rule decides.
        accelerator: "gpu", "cpu", or "auto": a GPU if M is to be found and there is one.
        interpreter_bytes: Memory that the starting process holds before any work, bytes.
        start_method: How the training processes are started: "popen", "fork", "spawn" or "forkserver".
        partition_bytes: Maps the number of parts to the bytes that partitioning holds, or to None if unknown. None:
            unknown.
        device: Card whose bounds of bytes and seconds by stage are explained, such as "h200"; None: none.
        rows_on: Where feature rows are for these bounds: "device", "pinned", "host" or "disk".
        sampled_on: Where neighbours are sampled, a sampler's `device`: "auto", "cpu" or "cuda".
        samples_whole: Whether batches sample the whole graph, not parts.
        training_options: Attributes of `BatchShape` (`batch_size`, `fanouts`, ...), further arguments of
            `predict_training`; "auto" as placed_rows fills GPUs with rows, and on CPUs is
            simulated_rows; pinned_rows are those of the host.

    Returns:
        The Plan; `explain()` prints every term.

    Raises:
        ValueError: a count or size out of range; T leaves no space in M.

    Source: SDT-GNN, workload planning. Differs: S counts the CSC and the edges' data beside the features; where batches
    mix parts, as many and one more must fit M - T together; parts of a GPU must fit the host, which holds them;
    `Plan.with_halo` checks again with the halo rows, which SDT-GNN's rule ignores.
    """
    unknown = sorted(set(training_options) - _OF_BATCHES - _OF_TRAINING)
    if unknown:
        raise ValueError(f"planner takes no {', '.join(unknown)}; see gs.plan for its arguments")
    counts = {"num_nodes": num_nodes, "num_edges": num_edges, "edge_row_bytes": edge_row_bytes}
    for name, value in counts.items():
        check_integer(name, value, 0)
    check_integer("num_devices", num_devices, 1)
    check_integer("interpreter_bytes", interpreter_bytes, 0)
    check_callable("partition_bytes", partition_bytes)
    # numpy's own would overflow
    num_nodes, num_edges, edge_row_bytes, num_devices, interpreter_bytes = map(
        int, (*counts.values(), num_devices, interpreter_bytes)
    )
    features = parse_bytes(feature_bytes, "feature_bytes")
    placeable = features if placeable_bytes is None else parse_bytes(placeable_bytes, "placeable_bytes")
    edge_data = num_edges * edge_row_bytes
    total = csc_bytes(num_nodes, num_edges) + features + edge_data
    run = RunSize(num_nodes, num_edges, num_processes=num_devices, edge_row_bytes=edge_row_bytes)
    shape = BatchShape(**{name: value for name, value in training_options.items() if name in _OF_BATCHES})
    options = {name: value for name, value in training_options.items() if name in _OF_TRAINING}
    check_flags(samples_whole=samples_whole)
    card = None if device is None else card_of(device)
    found_host, found_device = host_memory_bytes == "auto", device_memory_bytes == "auto"
    gpu = gpu_memory_bytes() if found_device and accelerator != "cpu" else None
    on_gpu = accelerator == "gpu" or gpu is not None
    placed_rows, pinned_rows = _placed(options, on_gpu, placeable)
    if placed_rows is not None:
        options.setdefault("stored_row_bytes", placeable / max(1, num_nodes))
    # A placement's rows are on the GPUs if there are some.
    elsewhere = ("placed_rows", "cache_rows") if on_gpu else ()
    of_host = {name: value for name, value in options.items() if name not in elsewhere} | {"to_gpu": on_gpu}

    def training(parts: int, on_gpu: bool = False) -> int:
        given = {**options, "on_gpu": True} if on_gpu else of_host
        return predict_training(replace(run, num_parts=parts), shape, **given)

    if num_parts is not None:
        check_integer("num_parts", num_parts, 1)
        num_parts = int(num_parts)
    host = memory_limit_bytes() if found_host else parse_bytes(host_memory_bytes, "host_memory_bytes")
    interpreters = processes_bytes(num_devices, interpreter_bytes, start_method)
    free = None if host is None else (host - interpreters) // num_devices
    memory = gpu_memory = None if found_device else parse_bytes(device_memory_bytes, "device_memory_bytes")
    if on_gpu:
        if found_device and gpu is not None:
            gpu_memory = gpu - GPU_CONTEXT_BYTES
        found_device = True  # the host's memory holds the parts, whatever the GPU's is
    if found_device:
        memory = None if free is None else max(1, free)
    compute = parse_bytes(compute_bytes, "compute_bytes")
    if memory is not None and compute is not None and compute >= memory:
        raise ValueError(
            f"compute_bytes must be below device_memory_bytes {format_bytes(memory)}, got {format_bytes(compute)}"
        )
    if memory is not None and compute is None:
        compute = training(num_parts or num_devices) if found_device else math.ceil(memory * DEFAULT_COMPUTE_SHARE)
    mixed = options.get("mixed_parts", 0)
    held = mixed + 1 if mixed else 1
    parts, chosen_by = _choose_parts(total, num_devices, memory, compute, num_parts, held)
    if chosen_by == "rule":
        parts = max(num_devices, min(parts, num_nodes))  # a plan that does not fit says more
    if num_nodes and parts > num_nodes:
        raise ValueError(f"num_parts must be in [1, {num_nodes}], got {parts}")
    training_on_host = training(parts)
    device_peak = training(parts, on_gpu)
    sampling = None
    if on_gpu or card is not None:
        space = gpu_memory if gpu_memory is not None or card is None else int(card.memory_gib * 2**30)
        sampling = _sampling(replace(run, num_parts=parts), shape, space, sampled_on, samples_whole, options)
    of_sampling = sampling.device_bytes if on_gpu and sampling is not None else 0
    device_peak += of_sampling
    tiers = None
    if on_gpu and placed_rows is not None:
        left = None if host is None else free * num_devices - num_devices * training_on_host
        beside = None if gpu_memory is None else gpu_memory - device_peak
        tiers = plan_tiers(
            placed_rows, pinned_rows, num_nodes, placeable / max(1, num_nodes), beside, left, num_devices
        )
        if placed_rows == "auto":
            options["placed_rows"] = tiers.buffer_rows
            device_peak = training(parts, on_gpu) + of_sampling
    if found_device and compute_bytes is None and memory is not None:
        compute = training_on_host
    host_peaks = predict_host_peak(
        replace(run, num_parts=parts),
        training_bytes=training_on_host,
        evaluation_bytes=predict_evaluation(run, shape, free),
        interpreter_bytes=interpreter_bytes,
        start_method=start_method,
        partition_bytes=None if partition_bytes is None else partition_bytes(parts),
    )
    if tiers is not None:
        host_peaks["train"] += tiers.pinned
    bounds: tuple[StageBound, ...] = ()
    if device is not None:
        there = sampling is not None and sampling.there
        bounds = tuple(stage_bounds(num_nodes, num_edges, shape, device, rows_on, usable_cores(), there))
    return Plan(
        num_parts=parts,
        num_devices=num_devices,
        device_memory_bytes=memory,
        compute_bytes=compute,
        csc_bytes=csc_bytes(num_nodes, num_edges),
        feature_bytes=features,
        edge_data_bytes=edge_data,
        num_nodes=num_nodes,
        num_edges=num_edges,
        host_memory_bytes=host,
        chosen_by=chosen_by,
        host_peak_bytes=host_peaks,
        device_peak_bytes=device_peak,
        parts_held=held,
        device_memory_found=found_host if on_gpu else found_device,
        host_memory_found=found_host,
        on_gpu=on_gpu,
        gpu_memory_bytes=gpu_memory if on_gpu else None,
        tier_bytes={} if tiers is None else tiers.by_tier(),
        bounds=bounds,
        sampling=sampling,
        num_batches=math.ceil(num_nodes / (shape.batch_size or max(1, num_nodes))),
        evaluation_read_bytes=predict_evaluation_reads(run, shape, csc_bytes(num_nodes, num_edges), features, free),
    )


def _placed(options: dict, on_gpu: bool, placeable: int) -> tuple[int | float | str | None, int | None]:
    """Take what the planner settles itself out of the options; return the rows on a device and those pinned."""
    pinned, simulated = options.pop("pinned_rows", None), options.pop("simulated_rows", None)
    if options.get("placed_rows") == "auto":
        if on_gpu and placeable:
            del options["placed_rows"]
            return "auto", pinned
        options["placed_rows"] = simulated
    return options.get("placed_rows"), pinned


def _sampling(
    run: RunSize, shape: BatchShape, free_bytes: int | None, sampled_on: str, samples_whole: bool, options: dict
) -> SamplingSize | None:
    """Return what sampling takes of a GPU; None: batches are not of sampled neighbours."""
    if shape.batch_size is None or not shape.fanouts:
        return None
    grouped = {name: options[name] for name in _OF_SAMPLING if name in options}
    return size_sampling(run, shape, free_bytes, sampled_on, samples_whole=samples_whole, **grouped)


def _choose_parts(total: int, devices: int, memory: int | None, compute: int | None, given: int | None, held: int):
    if given is not None:
        return given, "user"
    if memory is None:
        return devices, "devices"
    if compute >= memory:  # found memory: training itself does not fit, as the plan says
        return devices, "rule"
    space = memory - compute
    if total * min(held, devices) <= devices * space:
        return devices, "rule"
    return math.ceil(held * total / space), "rule"
