"""How many parts, what fits where, and why."""

import inspect
import math
from collections.abc import Callable

from ..graph import id_dtype
from ..memory import format_bytes, gpu_memory_bytes, memory_limit_bytes, parse_bytes
from .host_memory import (
    GPU_CONTEXT_BYTES,
    INTERPRETER_BYTES,
    check_integer,
    predict_evaluation,
    predict_host_peak,
    predict_training,
    processes_bytes,
)
from .plan import DEFAULT_COMPUTE_SHARE, Plan

__all__ = ["Plan", "csc_bytes", "format_bytes", "parse_bytes", "plan", "predict_host_peak", "predict_training"]


def csc_bytes(num_nodes: int, num_edges: int) -> int:
    """Return the bytes of a CSC on disk: int64 indptr and ids of `id_dtype(num_nodes)`."""
    return 8 * (num_nodes + 1) + id_dtype(num_nodes).itemsize * num_edges


def plan(
    *,
    num_nodes: int,
    num_edges: int,
    feature_bytes: int | str = 0,
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
    **training_options,
) -> Plan:
    """Decide the number of parts by the seeds' rule: S <= q (M - T) gives q parts, otherwise ceil(S / (M - T)).

    Args:
        num_nodes, num_edges: Number of nodes and of stored edges in the graph (after `to_undirected`, twice the
            undirected edges).
        feature_bytes: Size of the features on disk, in bytes or as text like '12GiB'.
        edge_row_bytes: Size of the weight and features of one stored edge, bytes.
        num_devices: q, number of devices or processes, >= 1.
        device_memory_bytes: M, memory of one device. "auto" finds it: the memory of the smallest GPU, or on CPUs a
            process's share of the host's memory without its interpreter. None: unlimited, one part per device.
        host_memory_bytes: Memory of the host. "auto" finds it, also under a cgroup's limit. None: unlimited.
        compute_bytes: T, memory set aside for computing. None: two thirds of M if M is given; what training is
            predicted to take if M was found.
        num_parts: p, if the user has chosen it; None: the rule decides.
        accelerator: "gpu", "cpu", or "auto": a GPU if M is to be found and there is one.
        interpreter_bytes: Memory that the starting process holds before any work, bytes.
        start_method: How the training processes are started: "popen", "fork", "spawn" or "forkserver".
        partition_bytes: Maps the number of parts to the bytes that partitioning holds, or to None if unknown. None:
            unknown.
        training_options: Further arguments of `predict_training` (`batch_size`, `fanouts`, ...).

    Returns:
        The Plan; `explain()` prints every term.

    Raises:
        ValueError: a count or size out of range; T leaves no room in M.

    Source: SDT-GNN, workload planning. Differs: S counts the CSC and the edges' data beside the features; where batches
    mix parts, as many and one more must fit M - T together; `Plan.with_halo` checks again with the halo rows, which the
    seeds' rule ignores.
    """
    unknown = sorted(set(training_options) - set(inspect.signature(predict_training).parameters))
    if unknown:
        raise ValueError(f"planner takes no {', '.join(unknown)}; see gs.plan for what it takes")
    counts = {"num_nodes": num_nodes, "num_edges": num_edges, "edge_row_bytes": edge_row_bytes}
    for name, value in counts.items():
        check_integer(name, value, 0)
    check_integer("num_devices", num_devices, 1)
    features = parse_bytes(feature_bytes, "feature_bytes")
    edge_data = num_edges * edge_row_bytes
    total = csc_bytes(num_nodes, num_edges) + features + edge_data
    shape = {"num_nodes": num_nodes, "num_edges": num_edges, "num_processes": num_devices}
    found_host, found_device = host_memory_bytes == "auto", device_memory_bytes == "auto"
    gpu = gpu_memory_bytes() if found_device and accelerator != "cpu" else None
    on_gpu = accelerator == "gpu" or gpu is not None
    shape |= {"edge_row_bytes": edge_row_bytes, "on_gpu": on_gpu}

    def training(parts: int) -> int:
        return predict_training(**shape, num_parts=parts, **training_options)

    if num_parts is not None:
        check_integer("num_parts", num_parts, 1)
    host = memory_limit_bytes() if found_host else parse_bytes(host_memory_bytes, "host_memory_bytes")
    interpreters = processes_bytes(num_devices, interpreter_bytes, start_method)
    free = None if host is None else (host - interpreters) // num_devices
    memory = None if found_device else parse_bytes(device_memory_bytes, "device_memory_bytes")
    if found_device and on_gpu:
        memory = None if gpu is None else gpu - GPU_CONTEXT_BYTES
    elif found_device and host is not None:
        memory = max(1, free)
    compute = parse_bytes(compute_bytes, "compute_bytes")
    if memory is not None and compute is not None and compute >= memory:
        raise ValueError(
            f"compute_bytes must be below device_memory_bytes {format_bytes(memory)}, got {format_bytes(compute)}"
        )
    if memory is not None and compute is None:
        compute = training(num_parts or num_devices) if found_device else math.ceil(memory * DEFAULT_COMPUTE_SHARE)
    mixed = training_options.get("mixed_parts", 0)
    held = mixed + 1 if mixed and not on_gpu else 1  # a GPU holds batches, its parts are the host's
    parts, chosen_by = _choose_parts(total, num_devices, memory, compute, num_parts, held)
    if chosen_by == "rule":
        parts = max(num_devices, min(parts, num_nodes))  # that the plan does not fit says more
    if num_nodes and parts > num_nodes:
        raise ValueError(f"num_parts must be in [1, {num_nodes}], got {parts}")
    device_peak = training(parts)
    training_on_host = predict_training(**{**shape, "on_gpu": False}, num_parts=parts, **training_options)
    if found_device and compute_bytes is None and memory is not None:
        compute = device_peak
    taken = set(inspect.signature(predict_evaluation).parameters)
    evaluation = predict_evaluation(
        free_bytes=free,
        num_nodes=num_nodes,
        num_edges=num_edges,
        **{name: value for name, value in training_options.items() if name in taken},
    )
    host_peaks = predict_host_peak(
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_parts=parts,
        num_processes=num_devices,
        training_bytes=training_on_host,
        evaluation_bytes=evaluation,
        edge_row_bytes=edge_row_bytes,
        interpreter_bytes=interpreter_bytes,
        start_method=start_method,
        partition_bytes=None if partition_bytes is None else partition_bytes(parts),
    )
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
        device_memory_found=found_device,
        host_memory_found=found_host,
    )


def _choose_parts(total: int, devices: int, memory: int | None, compute: int | None, given: int | None, held: int):
    if given is not None:
        return given, "user"
    if memory is None:
        return devices, "devices"
    if compute >= memory:  # of found memory: training itself does not fit, which the plan says
        return devices, "rule"
    room = memory - compute
    if total * min(held, devices) <= devices * room:
        return devices, "rule"
    return math.ceil(held * total / room), "rule"
