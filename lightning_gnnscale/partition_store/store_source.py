"""`StoreSource`: a graph, a partitioner, a number of parts, and the partition store made from them."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from filelock import FileLock

from ..dataset import GraphDataset, load_pyg
from ..dataset.columns import opened
from ..edge_stream import EdgeStream
from ..errors import PlanError, check_count, check_integer, short
from ..events import record, stage
from ..foreign import is_pyg
from ..memory import format_bytes, free_memory_bytes
from ..partitioner import Partitioning, partition
from ..partitioner.graph_access.layout import lists_both_ways
from ..partitioner.quality import PartitionQuality
from ..partitioner.registry import partition_bytes
from ..partitioner.streaming_multilevel import EFFORTS
from ..partitioner.two_levels import NODE_BYTES as TWO_LEVELS_BYTES
from ..partitioner.two_levels import check_num_machines
from ..planner import Plan, plan
from ..planner.search import MOST_PARTS, SAMPLE_EDGES, PartRows, SampledHalos, grow, rows_curve, search_parts
from ..planner.sweep_plan import (
    ROWS_A_SEED,
    WAITING_BYTES,
    EpochUse,
    largest_share,
    plan_sweep,
    rows_space,
)
from ..system import PAGE_BYTES
from .journal import store_folder
from .manifest import read_source, write_json
from .partitioner_identity import (
    describe_partitioner,
    made_for_machines,
    method_name,
    registered_method,
    with_machines,
)
from .preparation import (
    expected_store_fingerprint,
    partitioning_facts,
    preparation_fingerprint,
    prepare_store,
    standing_edges,
    standing_parts,
    unfinished_packs_halo,
)
from .reader import PartitionStore

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_log = logging.getLogger(__name__)

_MOST_HALO = 0.5  # of the graph: beyond it, reading the whole table in order costs at most twice as much
# What a sweep may read, times what parts with packed halos do: it loads no rows that no batch uses, and the store is
# several times smaller.
_MOST_SWEPT = 2

_QUOTIENT = "quotient_edges_per_node"
SMALLEST_HALOS = "streaming_multilevel"  # the partitioner that ships here and has the smallest halos on large graphs


class StoreMaking(TypedDict, total=False):
    """The keywords of `StoreSource.of` and `StoreSource`, for type checkers; `tests/test_types.py` compares them."""

    root: str | os.PathLike | None
    dataset: "GraphDataset | Data | HeteroData | None"
    stream: EdgeStream | None
    features: Any
    labels: Any
    masks: Any
    edge_weight: Any
    edge_features: Any
    partitioner: str | Callable[..., Partitioning]
    num_parts: int | str
    num_machines: int | None
    planner: Callable[..., Plan] | None
    overwrite: bool
    pack_halo: bool | str
    feature_storage: str | None
    edge_storage: str | None
    progress: Callable[[str, int, int | None], None] | None


class StoreSource:
    """The inputs of a partition store. Its root and its number of parts may be changed until the store is made.

    Args:
        dataset: The graph and its rows.
        root: Folder that the store is written to. If the same store is there already, nothing is written. None: one
            below `stores` in the working directory, named after the graph, the partitioner and a digest of the input.
        partitioner: Name of a method, or a callable (stream, num_parts, seed, masks, progress) -> Partitioning.
        num_parts: Number of parts; "auto" asks the planner.
        num_machines: Number of machines that the parts are for, see `gs.partition`; None: what the partitioner says.
            "auto" then takes a multiple of it.
        planner: Callable with the arguments of `gs.plan`; it may carry memory sizes. None: `gs.plan`.
        seed: Seed of the partitioning's random choices.
        overwrite: Whether to replace a damaged store, or a store made from other input.
        pack_halo: Whether a newly written store also keeps the feature rows of each part's halo with the part:
            batches of a part then read two runs of the disk instead of rows scattered over the whole file. "auto": it
            does if memory does not hold the features, halos are a small part of the graph, and the disk has space. An
            existing store is accepted either way.
        feature_storage: How a newly written store holds features, see `write_partition_store`; None: as the data set
            says.
        edge_storage: How it holds neighbours: "delta", or None.
        progress: Called as progress(what, done, total) while the store is made.

    Raises:
        ValueError: num_parts is out of range, or pack_halo is none of these.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        root: str | os.PathLike | None = None,
        *,
        partitioner: str | Callable[..., Partitioning] = "streaming_multilevel",
        num_parts: int | str = "auto",
        num_machines: int | None = None,
        planner: Callable[..., Plan] | None = None,
        seed: int = 0,
        overwrite: bool = False,
        pack_halo: bool | str = "auto",
        feature_storage: str | None = None,
        edge_storage: str | None = None,
        progress: Callable[[str, int, int | None], None] | None = None,
    ):
        if num_machines is not None:
            partitioner = with_machines(partitioner, num_machines)
        self._multiple_of = made_for_machines(partitioner)
        if num_parts != "auto":
            check_count("num_parts", num_parts)
            check_num_machines(self._multiple_of, num_parts)
        if not isinstance(pack_halo, bool) and pack_halo != "auto":
            raise ValueError(f"pack_halo must be true, false or auto, got {short(pack_halo)}")
        self.dataset = dataset
        if feature_storage is not None:
            self.dataset = replace(dataset, feature_storage=feature_storage)
        if edge_storage is not None:
            self.dataset = replace(self.dataset, edge_storage=edge_storage)
        self.partitioner, self.num_parts, self.planner = partitioner, num_parts, planner or plan
        check_integer("seed", seed)
        self.seed, self.overwrite, self.pack_halo, self.progress = seed, overwrite, pack_halo, progress
        self._root = None if root is None else Path(root)
        self._measured: tuple[str, Partitioning] | None = None  # the latest of a search, by its fingerprint
        self._both_ways: bool | None = None  # of a stream with layout "auto", once it has been read

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the store without reading the graph, by name; None: not yet."""
        return {
            "store": self._root,
            "num_parts": self.num_parts,
            "num_nodes": self.dataset.stream.num_nodes,
            "num_features": self.dataset.feature_dim,
            "num_classes": self.dataset.num_classes,
        }

    @property
    def root(self) -> Path:
        """Folder of the store; one that was not given gets a name when it is first read."""
        if self._root is None:
            parts = "auto" if self.num_parts == "auto" else self.num_parts
            made_of = self.fingerprint(0 if self.num_parts == "auto" else self.num_parts)[:8]
            self._root = Path("stores") / f"{self.dataset.name}-{method_name(self.partitioner)}-p{parts}-{made_of}"
        return self._root

    @root.setter
    def root(self, root: str | os.PathLike) -> None:
        self._root = Path(root)

    @classmethod
    def of(
        cls,
        root: str | os.PathLike | None = None,
        dataset: GraphDataset | None = None,
        stream: EdgeStream | None = None,
        features=None,
        labels=None,
        masks=None,
        edge_weight=None,
        edge_features=None,
        **options,
    ) -> "StoreSource":
        """Return the source of a data set, or of a stream and its rows.

        Args:
            root: Folder that the store is written to; None: one below `stores`.
            dataset: A `GraphDataset`, or a `Data`, `TemporalData` or `HeteroData` of PyG, whose edges are kept as they
                are; instead of the following.
            stream: The edges. Rows are in the order of its nodes. They are arrays, tensors, tables or columns, or paths
                of .npy, .parquet or .csv, see `GraphDataset`.
            features: (num_nodes, dim), or a sparse matrix of SciPy or torch.
            labels: (num_nodes,) integers, -1 = unknown, or (num_nodes, num_labels).
            masks: {"train": (num_nodes,) bool, "val": ..., "test": ...}; of integers, the rows of the nodes;
                or a column of the words train, val and test, see `GraphDataset`.
            edge_weight, edge_features: (num_edges,) and (num_edges, dim), by position in the stream.
            options: Further arguments of `StoreSource`.

        Raises:
            ValueError: neither a data set nor a stream is given, or rows besides a data set.
        """
        rows = {"features": features, "labels": labels, "masks": masks, "edge_weight": edge_weight}
        given = [name for name, value in (rows | {"edge_features": edge_features}).items() if value is not None]
        if dataset is not None and (given or stream is not None):
            raise ValueError(
                f"{(given or ['stream'])[0]}: the data set has its own: give either it, or stream and rows"
            )
        if is_pyg(dataset):
            dataset = load_pyg(dataset, to_undirected=False)
        if stream is not None:
            edges = {"edge_weight": edge_weight, "edge_features": edge_features}
            dataset = GraphDataset("graph", stream, features, labels, {} if masks is None else masks, **edges)
        if dataset is None:
            raise ValueError("give either store, or dataset, or stream with features, labels and masks")
        return cls(dataset, root, **options)

    def prepare(self, num_parts: int, verify: bool = True) -> PartitionStore:
        """Partition and write the store, or open the same one where it exists; see `prepare_store` for errors.

        Args:
            num_parts: Number of parts.
            verify: See `PartitionStore.open`.
        """
        return prepare_store(
            self.root,
            self.dataset,
            lambda: self._partition(num_parts),
            self.fingerprint(num_parts),
            overwrite=self.overwrite,
            progress=self.progress,
            store_fingerprint=lambda: self._store_fingerprint(num_parts),
            pack_halo=self._packs_halo if self.pack_halo == "auto" else self.pack_halo,
            verify=verify,
        )

    def fingerprint(self, num_parts: int) -> str:
        """Return a digest of what a store of this many parts is made from: input, partitioner, seed."""
        made = {"partitioner": describe_partitioner(self.partitioner), "seed": self.seed}
        packed = {"pack_halo": True} if self.pack_halo is True else {}
        return preparation_fingerprint(self.dataset, made | packed, num_parts)

    def standing_parts(self) -> int | None:
        """Return the number of parts of the store at root where it was made from this, else None."""
        return standing_parts(self.root, self.fingerprint, self._store_fingerprint)

    @property
    def partitioning_facts(self) -> dict:
        """What partitioning measured when the store at root was made; empty if unknown."""
        return partitioning_facts(self.root)

    def make_plan(self, num_devices: int = 1, **options) -> Plan:
        """Return the plan for this graph.

        Args:
            num_devices: devices that train.
            options: further arguments of `gs.plan` and `predict_training`; they go before what the graph gives.

        Cost: nothing is read but counts; where reverses are added to edges of layout "auto", and no store of this
        input and number of parts exists, the edges once: those that are listed both ways are as many as will be stored.
        """
        standing = self._standing_edges()
        num_directed_edges, note = self._count_edges() if standing is None else (standing, "")
        num_edges = self._num_edges(num_directed_edges)
        sizes = {
            "num_parts": None if self.num_parts == "auto" else self.num_parts,
            "num_nodes": self.dataset.stream.count()[0],
            "num_edges": num_directed_edges,
            "feature_bytes": self.dataset.feature_bytes,
            "placeable_bytes": self.dataset.placeable_bytes,
            "edge_row_bytes": self.dataset.edge_row_bytes,
            "feature_dim": self.dataset.feature_dim,
            "feature_row_bytes": self.dataset.batch_row_bytes,
            "partition_bytes": lambda num_parts: self._partition_bytes(num_edges, num_parts),
        }
        given = {**sizes, "num_devices": num_devices, **options}
        made = self.planner(**given)
        if made.num_parts % self._multiple_of:
            more = self.planner(**{**given, "num_parts": self._multiple(made.num_parts)})
            made = replace(more, chosen_by=made.chosen_by)
        peaks = made.host_peak_bytes
        if standing is not None:  # it is not made again
            peaks = {stage: peak for stage, peak in peaks.items() if not stage.startswith("partition")}
        return replace(made, edges_note=note, host_peak_bytes=peaks)

    def _multiple(self, num_parts: int) -> int:
        """Return so many parts, or as many more as machines need to have equally many."""
        return -(-num_parts // self._multiple_of) * self._multiple_of

    def settle(self, make_plan: Callable[..., Plan], record: Path | None = None) -> Plan:
        """Choose the number of parts so that the largest part fits with its halo.

        Where even a part that reads the whole graph fits, the planner's number is taken as it is. Otherwise halos are
        estimated on a sample, and the fewest parts that would fit are measured: partitioned, and their halos counted,
        at most `MOST_MEASURED` times.

        Args:
            make_plan: returns the plan of this source; it takes `num_parts` and `part_rows`.
            record: JSON file of what was measured, so that a later run measures nothing; None: beside the store.

        Returns:
            A plan that fits; `num_parts` is set to it.

        Raises:
            PlanError: nothing fits, whatever the number of parts, or the number that was given does not.

        Cost: nothing where memory is ample; else a pass over the edges, the partitioning of a sample of at most 2M
            edges a few times, and the measured partitionings.
        """
        plan, auto = make_plan(), self.num_parts == "auto"
        num_nodes = plan.num_nodes
        self._check_partitioning(plan, make_plan)

        def plan_at(num_parts: int, part: PartRows) -> Plan:
            rows = max(part.rows, math.ceil(num_nodes / num_parts))
            halo = rows - num_nodes // num_parts if part.halo is None else part.halo
            made = make_plan(num_parts=num_parts, part_rows=rows).with_halo(halo, part.part_bytes)
            return replace(made, chosen_by="halo" if auto else made.chosen_by)

        if plan_at(plan.num_parts, PartRows(num_nodes)).fits:
            self.num_parts = plan.num_parts
            return plan
        most = min(MOST_PARTS, num_nodes) if auto else plan.num_parts
        least = grow(plan_at, lambda num_parts: 0, plan.num_parts, most)
        if least is None:
            tried = [plan_at(p, PartRows(0)) for p in {min(most, times * plan.num_parts) for times in (1, 4, 16)}]
            raise refusal(min(tried, key=_total_shortage), make_plan, "even without halos")
        if not auto:
            return plan
        record = record or Path(f"{self.root}.halos.json")
        record.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{record}.lock"):
            found = self._search(plan_at, make_plan, least.num_parts, most, record)
        self.num_parts = found.num_parts
        return found

    def _check_partitioning(self, plan: Plan, make_plan: Callable[..., Plan]) -> None:
        """Refuse a partitioner that does not fit the host's memory where a lighter one does, and name that."""
        peak, host = plan.host_peak_bytes.get("partition", 0), plan.host_memory_bytes
        known = registered_method(self.partitioner)
        if host is None or peak <= host or known is None:
            return
        method, options = known
        tried = [(f"+partitioner.{_QUOTIENT}={size}", method, options | {_QUOTIENT: size}) for size in (1, 0.5, 0.25)]
        tried = [*(tried if method == SMALLEST_HALOS else []), ("partitioner=spring", "spring", {})]
        num_edges = self._num_edges(plan.num_edges)

        def fits(name: str, given: dict) -> bool:
            needed = partition_bytes(name, plan.num_nodes, num_edges, plan.num_parts, given)
            return make_plan(partition_bytes=lambda _: needed).host_peak_bytes["partition"] <= host

        words = next((words for words, name, given in tried if fits(name, given)), None)
        if words is None:
            return  # the shortage is reported with the other stages
        size = f"{math.ceil(peak / 2**20)}MiB"
        memory = f"{size} of memory for the host" if plan.host_memory_found else f"planner.host_memory_bytes={size}"
        raise PlanError(
            f"the run does not fit: partitioning by {method} takes {format_bytes(peak)} of {format_bytes(host)}; "
            f"what would fit: {words}, or {memory}"
        )

    def quotient_by_memory(self, plan: Plan, more_bytes: int) -> tuple[float, float, float] | None:
        """Return the largest `quotient_edges_per_node` that the host's memory holds, with more of it, and at its best.

        None where memory is not limited, or holds the best already, or the partitioner has no such option.
        """
        known, host = registered_method(self.partitioner), plan.host_memory_bytes
        if host is None or known is None or known[0] != SMALLEST_HALOS:
            return None
        (method, options), num_edges = known, self._num_edges(plan.num_edges)

        def needed(given: dict) -> int:
            return partition_bytes(method, plan.num_nodes, num_edges, plan.num_parts, given)

        best = max(EFFORTS[options.get("effort") or "default"].quotient_edges_per_node, options.get(_QUOTIENT) or 0)
        beside = plan.host_peak_bytes["partition"] - needed(options)  # of the process, and chunks of the stream

        def held(limit: int) -> float:
            def fits(share: float) -> bool:
                return beside + needed(options | {_QUOTIENT: share * best}) <= limit

            return best if fits(1.0) else best * largest_share(fits)

        return None if held(host) == best else (held(host), held(host + more_bytes), best)

    def _num_edges(self, num_edges: int) -> int:
        """Return the undirected edges of a store with so many edges, at most."""
        return num_edges // 2 if self.dataset.stream.to_undirected else num_edges

    def estimate(self, make_plan: Callable[..., Plan]) -> Plan:
        """Return the plan with the halos of a sample of the edges; nothing of the whole graph is partitioned.

        Where the plan is to choose the parts and its number does not fit, it is the fewest that would.

        Args:
            make_plan: see `settle`.

        Cost: a pass over the edges, and one to three partitionings of a sample of at most 2M edges.
        """
        plan = make_plan()
        if plan.num_parts == 1 and plan.fits:
            return plan.with_halo(0)
        sample = SampledHalos(self.dataset.stream, self.seed)
        masks = sample.masks(self.dataset.masks or {})

        def plan_at(num_parts: int, part: PartRows) -> Plan:
            rows = max(part.rows, math.ceil(plan.num_nodes / num_parts))
            made = make_plan(num_parts=num_parts, part_rows=rows)
            made = made.with_halo(rows - plan.num_nodes // num_parts, note=sample.note)
            return replace(made, chosen_by=plan.chosen_by if num_parts == plan.num_parts else "halo")

        def rows(num_parts: int) -> int:
            return sample.rows(partial(self._assign_stream, masks=masks), self._multiple(num_parts))

        told = plan_at(plan.num_parts, PartRows(rows(plan.num_parts)))
        if told.fits or self.num_parts != "auto":
            return told
        most = min(MOST_PARTS, plan.num_nodes)
        known = {p: rows(p) for p in {min(most, max(4, 4 * plan.num_parts)), min(most, 16 * plan.num_parts)}}
        return grow(plan_at, rows_curve(known, plan.num_nodes), plan.num_parts, most) or told

    def _search(self, plan_at, make_plan, first: int, most: int, record: Path) -> Plan:
        num_nodes, measured = self.dataset.stream.num_nodes, _read_measured(record)
        known = measured.setdefault(self.fingerprint(0), {})

        def measure(num_parts: int) -> PartRows | None:
            part = self._measure(num_parts)
            if part is not None:
                known[num_parts] = part
                write_json(record, {key: {p: asdict(one) for p, one in of.items()} for key, of in measured.items()})
            return part

        guessed: dict[int, int] = {}
        if not known and self.dataset.stream.count()[1] > SAMPLE_EDGES:
            sample, assign = SampledHalos(self.dataset.stream, self.seed), partial(self._assign_stream, masks=None)
            guessed = {p: sample.rows(assign, self._multiple(p)) for p in {first, min(most, 4 * first)}}
        found = search_parts(plan_at, num_nodes, first, most, known, measure, guessed)
        if found is not None:
            return found
        nearest = [plan_at(p, one) for p, one in known.items()]
        nearest = nearest or [plan_at(p, PartRows(rows)) for p, rows in guessed.items()]
        method = method_name(self.partitioner)
        other = "" if method == SMALLEST_HALOS else f"partitioner={SMALLEST_HALOS}, whose halos are smaller"
        raise refusal(min(nearest, key=_total_shortage), make_plan, f"with parts by {method}", other)

    def _store_fingerprint(self, num_parts: int) -> str | None:
        choices = (False, True) if self.pack_halo == "auto" else (self.pack_halo,)
        expected = [
            expected_store_fingerprint(self.dataset, self.partitioner, num_parts, self.seed, packed)
            for packed in choices
        ]
        own = read_source(store_folder(self.root)).get("fingerprint")
        return own if own in expected else expected[0]

    def _packs_halo(self, made: Partitioning) -> bool:
        """Decide whether the store of a partitioning packs halo rows, and say why."""
        begun = unfinished_packs_halo(self.root, self.dataset, made)
        if begun is not None:
            return begun
        features, free = self.dataset.feature_bytes, free_memory_bytes()
        if 2 * features <= free or made.quality is None or made.quality.halo_hops != 1:
            return False
        num_nodes = max(self.dataset.stream.num_nodes, 1)
        halo_share = max(made.quality.halo_per_part) / num_nodes
        packed = int(sum(made.quality.halo_per_part) * features / num_nodes)
        space = shutil.disk_usage(store_folder(self.root).parent).free - 2 * features
        most_swept = _MOST_SWEPT * (packed + features)
        facts = f"features {format_bytes(features)}, memory {format_bytes(free)}, halos {format_bytes(packed)}"
        if features >= PAGE_BYTES * num_nodes:
            packs, why = False, f"rows are whole pages of the disk already ({facts})"
        elif halo_share > _MOST_HALO:
            packs, why = False, f"the largest halo is {halo_share:.0%} of the graph ({facts})"
        elif (swept := self._swept_bytes(made.quality, free)) is not None and swept <= most_swept:
            packs, why = False, f"batches in waiting read {format_bytes(swept)} an epoch without them ({facts})"
        elif packed > space:
            packs, why = False, f"the disk has no space for them ({facts})"
        else:
            packs, why = True, f"a part is then read in two runs of the disk ({facts})"
        record("pack_halo", packs=packs, why=why)
        _log.info(f"{self.root}: halo rows are {'packed' if packs else 'left at their owners'}: {why}")
        return packs

    def _swept_bytes(self, quality: PartitionQuality, free_bytes: int) -> float | None:
        """Predict the bytes of rows that an epoch reads in a sweep, of batches of fan-outs 15, 10, 5.

        Returns:
            None where rows cannot be swept: node types have their own, they are sparse, or parts leave no memory.
        """
        dataset, num_nodes = self.dataset, max(self.dataset.stream.num_nodes, 1)
        if dataset.feature_dims is not None or not isinstance(opened(dataset.features), np.ndarray):
            return None
        seeds = num_nodes if "train" not in dataset.masks else int(np.count_nonzero(dataset.masks["train"]))
        rows = seeds * ROWS_A_SEED
        use = EpochUse(
            num_nodes,
            dataset.feature_bytes / num_nodes,
            rows,
            own_share=1 - quality.edge_cut_ratio,
            waiting_bytes=rows * WAITING_BYTES,
        )
        part_bytes = 2 * max(quality.with_feature_bytes(0).bytes_per_part, default=0)
        space = rows_space(free_bytes) - part_bytes
        return plan_sweep(use, space).read_bytes if space > 0 else None

    def _standing_edges(self) -> int | None:
        """Return the edges of the store that exists already and will be used; None where there is none."""
        num_parts = self.standing_parts() if self.num_parts == "auto" else self.num_parts
        return None if num_parts is None else standing_edges(self.root, self.fingerprint(num_parts))

    def _partition_bytes(self, num_edges: int, num_parts: int) -> int | None:
        """Return what the partitioner is predicted to hold, bytes; None for one of the user's own."""
        known = registered_method(self.partitioner)
        if known is None:
            return None
        method, options = known
        num_nodes = self.dataset.stream.num_nodes
        needed = partition_bytes(method, num_nodes, num_edges, num_parts, options)
        return needed if needed is None or self._multiple_of == 1 else needed + TWO_LEVELS_BYTES * num_nodes

    def _count_edges(self) -> tuple[int, str]:
        """Return the edges that the store will have, and how they were counted where that is not obvious."""
        stream = self.dataset.stream
        if not stream.to_undirected:
            return stream.count()[1], ""
        layout = stream.layout
        if layout == "auto":
            if self._both_ways is None:
                self._both_ways = lists_both_ways(stream)
            layout = "both_ways" if self._both_ways else "auto"
        num_edges = stream.count()[1]
        if layout == "both_ways":
            return num_edges, "both directions of each edge are listed"
        return 2 * num_edges, "reverses added" if layout == "once" else "at most: reverses added, repeats to be dropped"

    def _partition(self, num_parts: int) -> Partitioning:
        """Partition, and include the feature rows that a part loads in the figures."""
        if self._measured is not None and self._measured[0] == self.fingerprint(num_parts):
            return self._measured[1]
        made = self._assign(num_parts)
        num_nodes, feature_bytes = self.dataset.stream.num_nodes, self.dataset.feature_bytes
        if not num_nodes:
            return made

        def with_rows() -> PartitionQuality | None:
            if made.quality is None or made.quality.feature_bytes:
                return made.quality
            return made.quality.with_feature_bytes(feature_bytes / num_nodes)

        return replace(made, quality=with_rows)

    def _assign(self, num_parts: int) -> Partitioning:
        return self._assign_stream(
            self.dataset.stream, num_parts, self.seed, masks=self.dataset.masks, progress=self.progress
        )

    def _assign_stream(self, stream, num_parts: int, seed: int, masks: dict | None, progress=None) -> Partitioning:
        options: dict[str, Any] = {"num_parts": num_parts, "seed": seed, "masks": masks, "progress": progress}
        if isinstance(self.partitioner, str):
            return partition(stream, method=self.partitioner, **options)
        return self.partitioner(stream, **options)

    def _measure(self, num_parts: int) -> PartRows | None:
        """Partition in so many parts, and return what the largest holds; `prepare` takes the latest as it is."""
        num_parts = self._multiple(num_parts)
        with stage("partition", note=f"{num_parts} parts by {method_name(self.partitioner)}, to measure halos"):
            made = self._partition(num_parts)
        self._measured = self.fingerprint(num_parts), made
        return None if made.quality is None else PartRows.of_quality(asdict(made.quality))


def refusal(plan: Plan, make_plan: Callable[..., Plan], when: str, remedy: str = "") -> PlanError:
    """Return the error of a plan that does not fit, with settings that would, where smaller batches are tried.

    Args:
        plan: does not fit.
        make_plan: returns plans; it takes `num_parts`, `part_rows`, `batch_size`.
        when: what was assumed or tried, in words.
        remedy: another setting that may help.
    """
    num_parts, rows = plan.num_parts, math.ceil(plan.num_nodes / plan.num_parts) + (plan.halo_nodes_per_part or 0)
    for batch_size in (256, 128, 64, 32):
        smaller = make_plan(num_parts=num_parts, part_rows=min(rows, plan.num_nodes), batch_size=batch_size)
        if smaller.with_halo(plan.halo_nodes_per_part or 0, plan.largest_part_bytes).fits:
            remedy = f"datamodule.batch_size={batch_size}" + (f", or {remedy}" if remedy else "")
            break
    return PlanError(f"the run does not fit memory {when}: {plan.remedy(remedy)}")


def _total_shortage(plan: Plan) -> int:
    return sum(needed - allowed for _, needed, allowed in plan.shortages())


def _read_measured(record: Path) -> dict[str, dict[int, PartRows]]:
    """Return what earlier searches measured; what cannot be read counts as absent."""
    try:
        return {
            key: {int(p): PartRows(**one) for p, one in known.items()}
            for key, known in json.loads(record.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
