"""How many parts, what fits where, and why."""

import inspect
import math

from ..graph import id_dtype
from ..units import format_bytes, parse_bytes
from .checks import check_integer
from .host_memory import predict_host_peak, predict_training
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
    device_memory_bytes: int | str | None = None,
    host_memory_bytes: int | str | None = None,
    compute_bytes: int | str | None = None,
    num_parts: int | None = None,
    **training_options,
) -> Plan:
    """Decide the number of parts by the seeds' rule: S <= q (M - T) gives q parts, otherwise ceil(S / (M - T)).

    Args:
        num_nodes, num_edges: of the graph; edges as stored (twice the undirected ones after `to_undirected`).
        feature_bytes: features on disk, bytes or text like '12GiB'.
        edge_row_bytes: weight and features of one stored edge, bytes.
        num_devices: q, devices or processes, >= 1.
        device_memory_bytes: M, memory of one device; None (no limit known) gives one part a device.
        host_memory_bytes: memory of the host; None: not checked.
        compute_bytes: T, set aside for computing; None: two thirds of M.
        num_parts: p, where the user has chosen it.
        training_options: further arguments of `predict_training` (`batch_size`, `fanouts`, ...).

    Returns:
        Plan; `explain()` prints every term.

    Raises:
        ValueError: a count or size out of range; T leaves no room in M.

    Source: SDT-GNN, workload planning. Differs: S counts the CSC and the edges' data beside the features;
    `Plan.with_halo` checks again with the halo rows, which the seeds' rule ignores.
    """
    unknown = sorted(set(training_options) - set(inspect.signature(predict_training).parameters))
    if unknown:
        raise ValueError(f"planner takes no {', '.join(unknown)}; see gs.plan for what it takes")
    counts = {"num_nodes": num_nodes, "num_edges": num_edges, "edge_row_bytes": edge_row_bytes}
    for name, value in counts.items():
        check_integer(name, value, 0)
    check_integer("num_devices", num_devices, 1)
    features = parse_bytes(feature_bytes, "feature_bytes")
    memory = parse_bytes(device_memory_bytes, "device_memory_bytes")
    host = parse_bytes(host_memory_bytes, "host_memory_bytes")
    compute = parse_bytes(compute_bytes, "compute_bytes")
    if memory is not None:
        compute = math.ceil(memory * DEFAULT_COMPUTE_SHARE) if compute is None else compute
        if compute >= memory:
            raise ValueError(
                f"compute_bytes must be below device_memory_bytes {format_bytes(memory)}, got {format_bytes(compute)}"
            )
    edge_data = num_edges * edge_row_bytes
    total = csc_bytes(num_nodes, num_edges) + features + edge_data
    parts, chosen_by = _choose_parts(total, num_devices, memory, compute, num_parts)
    if num_nodes and parts > num_nodes:
        ruled = chosen_by != "user" and memory is not None
        remedy = "; a part of one node does not fit: give more device memory" if ruled else ""
        raise ValueError(f"num_parts must be in [1, {num_nodes}], got {parts}{remedy}")
    shape = {"num_nodes": num_nodes, "num_edges": num_edges, "num_parts": parts, "num_processes": num_devices}
    training = predict_training(**shape, edge_row_bytes=edge_row_bytes, **training_options)
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
        host_peak_bytes=predict_host_peak(**shape, training_bytes=training),
        device_peak_bytes=training,
    )


def _choose_parts(total: int, devices: int, memory: int | None, compute: int | None, given: int | None):
    if given is not None:
        check_integer("num_parts", given, 1)
        return given, "user"
    if memory is None:
        return devices, "devices"
    room = memory - compute
    return (devices if total <= devices * room else math.ceil(total / room)), "rule"
