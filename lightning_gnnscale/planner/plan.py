"""How many parts: the seeds' rule, every term of it on show."""

import math
from dataclasses import dataclass, field, replace

from ..units import format_bytes

DEFAULT_COMPUTE_SHARE = 2.0 / 3.0


@dataclass(frozen=True)
class Plan:
    """How many parts a graph is cut into, and what each of them costs.

    Attributes:
        num_parts: parts, p.
        num_devices: devices (or processes on a CPU), q.
        device_memory_bytes: memory of one device, M; None where it is not limited.
        compute_bytes: memory of one device set aside for computing, T; None where M is.
        csc_bytes, feature_bytes, edge_data_bytes: the graph, the features of its nodes, and weights and features of
            its edges, on disk; S is their sum.
        num_nodes, num_edges: of the graph; edges as stored (arcs).
        host_memory_bytes: memory of the host; None where it is not limited.
        chosen_by: "rule", "user" or "devices" (no device memory given).
        host_peak_bytes: predicted peak of anonymous and shared memory on this host, by stage.
        device_peak_bytes: predicted peak of training on one device, beyond what a process holds before.
        halo_nodes_per_part: halo rows of the largest part, once partitioning has told them.
        edges_note: how num_edges was arrived at, where that is not plain.
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

    @property
    def total_bytes(self) -> int:
        """S: the CSC, the features and the edges' data on disk, bytes."""
        return self.csc_bytes + self.feature_bytes + self.edge_data_bytes

    @property
    def parts_per_device(self) -> int:
        return math.ceil(self.num_parts / self.num_devices)

    @property
    def part_bytes(self) -> int:
        """Bytes of one part: its share of S, plus the halo's feature rows where partitioning has told them."""
        own = math.ceil(self.total_bytes / self.num_parts)
        if self.halo_nodes_per_part is None or not self.num_nodes:
            return own
        return own + math.ceil(self.halo_nodes_per_part * self.feature_bytes / self.num_nodes)

    @property
    def fits(self) -> bool:
        """Whether a part fits what a device has left, and every stage fits the host; True where nothing is limited."""
        device = self.device_memory_bytes is None or (
            self.part_bytes <= self.device_memory_bytes - self.compute_bytes
            and self.device_peak_bytes <= self.device_memory_bytes
        )
        peak = max(self.host_peak_bytes.values(), default=0)
        return device and (self.host_memory_bytes is None or peak <= self.host_memory_bytes)

    def with_halo(self, halo_nodes_per_part: int) -> "Plan":
        """Return the plan checked again with the halo rows of the largest part, which the seeds' rule ignores."""
        return replace(self, halo_nodes_per_part=int(halo_nodes_per_part))

    def explain(self) -> str:
        """Return every term of the decision, one a line."""
        return "\n".join(f"{term:<34} {value}" for term, value in self.terms())

    def terms(self) -> list[tuple[str, str]]:
        """Return the (term, value) pairs that `explain` prints."""
        rows = [
            ("nodes", f"{self.num_nodes:,}"),
            ("edges as stored", f"{self.num_edges:,}" + (f" ({self.edges_note})" if self.edges_note else "")),
            ("CSC", format_bytes(self.csc_bytes)),
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
            room = self.device_memory_bytes - self.compute_bytes
            sign = "<=" if self.total_bytes <= self.num_devices * room else ">"
            rows += [
                ("M, memory of a device", format_bytes(self.device_memory_bytes)),
                ("T, set aside for computing", format_bytes(self.compute_bytes)),
                ("M - T, room for a part", format_bytes(room)),
                ("rule", f"S {sign} q (M - T) = {format_bytes(self.num_devices * room)}"),
            ]
        why = {
            "user": "as given",
            "devices": "one a device: no device memory was given",
            "rule": "p = q" if self.num_parts == self.num_devices else "p = ceil(S / (M - T))",
        }[self.chosen_by]
        rows += [
            ("p, parts", f"{self.num_parts} ({why})"),
            ("parts a device, at most", str(self.parts_per_device)),
        ]
        if self.halo_nodes_per_part is not None:
            rows += [("halo rows of the largest part", f"{self.halo_nodes_per_part:,}")]
        rows += [("bytes of a part", format_bytes(self.part_bytes))]
        rows += [("peak of a device, predicted", format_bytes(self.device_peak_bytes))]
        rows += [(f"host peak, {stage}, predicted", format_bytes(peak)) for stage, peak in self.host_peak_bytes.items()]
        host = "not limited" if self.host_memory_bytes is None else format_bytes(self.host_memory_bytes)
        rows += [("memory of the host", host)]
        rows += [("fits", "yes" if self.fits else "NO: " + self._remedy())]
        return rows

    def _remedy(self) -> str:
        if self.device_memory_bytes is not None and self.part_bytes > self.device_memory_bytes - self.compute_bytes:
            needed = math.ceil(self.part_bytes * self.num_parts / (self.device_memory_bytes - self.compute_bytes))
            return f"a part exceeds M - T; ask for num_parts={needed} or more, or a smaller compute_bytes"
        if self.device_memory_bytes is not None and self.device_peak_bytes > self.device_memory_bytes:
            return "a training step exceeds M; smaller batches, fan-outs or hidden layers, or more parts"
        return "the host's memory is exceeded; fewer processes, smaller batches, or more parts"
