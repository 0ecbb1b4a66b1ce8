"""What machines without a shared folder hold and request from each other in an epoch, counted before training.

Not counted: gradients and averaged models, boundary rows of full-graph training, evaluation, and rows that a trainer's
cache saves.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..errors import check_count, check_integer, short
from ..loader import RankPlace
from ..memory import parse_bytes
from ..partition_store import PartitionStore
from ..partition_store.typed_features import NodeTypesWithRows
from ..remote.assignment import assign_parts
from ..remote.batch_group import pack_group
from ..remote.held_rows import batch_columns, most_linked, owned_columns, part_of
from ..remote.holder import column_bytes, deal_in_order, edge_bytes, row_bytes_of, stored_table
from ..sampler import LayerwiseSampler, NeighborSampler
from ..sampler.minibatch import MiniBatch
from ..sampler.protocol import BatchSampler
from ..traits import SourceTraits
from .partition import PartitionDataModule
from .train_loader import part_targets

_LEARNED_BYTES = 12  # a learnable number and both moments of Adam


class RowsAsked:
    """Rows and bytes that machines request from each other, counted batch by batch.

    Args:
        store: The store whose parts they hold.
        owner: (num_parts,) machine that holds each part.
        num_machines: Number of machines.
        row_bytes: Size of a feature row, bytes.
        replicate_bytes: Rows of highest in-degree that each machine holds beside its own, bytes.
        sampler: Samples the batches; None: a plain `NeighborSampler`, whose batches have no columns of their edges.
        edge_features: Whether batches have the features of their edges.

    Attributes:
        owner, row_bytes: As given.
        edge_bytes: Size of an edge in the memory of its owner, bytes.
        replicated: (num_nodes,) bool: the nodes whose rows every machine holds.
        rows, neighbors, targets, edges: (num_machines, num_machines) int64: feature rows, ids of neighbours, nodes
            whose neighbours they are, and edges whose columns were asked for by themselves, that [this machine] gave
            [that one].
        all_rows, num_batches: (num_machines,) int64: rows of its batches, and batches.
    """

    def __init__(
        self,
        store: PartitionStore,
        owner: np.ndarray,
        num_machines: int,
        row_bytes: int,
        replicate_bytes: int,
        sampler: BatchSampler | None = None,
        edge_features: bool = True,
    ):
        self._offsets, csc = store.part_offsets, store.csc
        columns = () if sampler is None else owned_columns(sampler, store, edge_features)
        self._degree = csc.in_degree if reads_whole_rows(sampler) else None
        self._answered = answer_bytes(sampler, store, columns)
        self.owner, self.row_bytes = np.asarray(owner), row_bytes
        self.edge_bytes = edge_bytes(store, columns)
        self.replicated = np.zeros(store.num_nodes, bool)
        self.replicated[most_linked(csc.indptr, replicate_bytes, self.edge_bytes, row_bytes)] = True
        self.rows, self.neighbors, self.targets, self.edges = np.zeros((4, num_machines, num_machines), np.int64)
        self.all_rows, self.num_batches = np.zeros((2, num_machines), np.int64)

    def count(self, machine: int, batch: MiniBatch) -> None:
        """Count a batch of a machine."""
        nodes, sampled = batch.n_id.numpy(), np.diff(batch.indptr.numpy())
        found = sampled
        if self._degree is not None:
            sampled = self._degree[nodes[: len(sampled)]]
        owner = self.owner[part_of(nodes, self._offsets)]
        away = (owner != machine) & ~self.replicated[nodes]
        asked = away[: len(sampled)]  # of nodes of the last hop only features are requested
        self.rows[:, machine] += np.bincount(owner[away], minlength=len(self.rows))
        np.add.at(self.neighbors[:, machine], owner[: len(sampled)][asked], sampled[asked])
        if self._degree is not None:
            np.add.at(self.edges[:, machine], owner[: len(sampled)][asked], found[asked])
        self.targets[:, machine] += np.bincount(owner[: len(sampled)][asked], minlength=len(self.rows))
        self.all_rows[machine] += len(nodes)
        self.num_batches[machine] += 1

    def owned(self, batch: MiniBatch, node_types: NodeTypesWithRows | None = None) -> np.ndarray:
        """Return (num_machines,) int64: how many of a batch's nodes each machine owns.

        Args:
            batch: A batch.
            node_types: The node types whose nodes count; None: all.
        """
        nodes = batch.n_id.numpy()
        if node_types is not None:
            nodes = nodes[node_types.has_rows[node_types.nodes.type_of(nodes)]]
        owner = self.owner[part_of(nodes, self._offsets)]
        return np.bincount(owner, minlength=len(self.rows))

    def num_bytes(self) -> np.ndarray:
        """Return (num_machines, num_machines) bytes that [this machine] gave [that one] for the batches counted."""
        of_neighbor, of_target, of_edge = self._answered
        answered = self.neighbors * of_neighbor + self.targets * of_target + self.edges * of_edge
        return self.rows * self.row_bytes + answered


def reads_whole_rows(sampler: BatchSampler | None) -> bool:
    """Whether owners are asked for whole rows rather than for samples of them."""
    sampler = sampler.sampler or sampler if sampler is not None else None
    if isinstance(sampler, NeighborSampler):
        return sampler.subgraph_type != "directional"
    return isinstance(sampler, LayerwiseSampler)


def answer_bytes(
    sampler: BatchSampler | None, store: PartitionStore, columns: tuple[str, ...] = ()
) -> tuple[int, int, int]:
    """Return the bytes of a neighbour in an owner's answer, of a node that it is about, and of an edge by itself.

    Args:
        sampler: Samples the batches; None: a plain `NeighborSampler`.
        store: The store.
        columns: What owners hold, see `owned_columns`.
    """
    sampler, id_bytes = sampler.sampler or sampler if sampler is not None else None, store.csc.indices.itemsize
    if sampler is None:
        return id_bytes, 0, 0
    names = batch_columns(columns, sampler.has_edge_types)
    of_columns = sum(column_bytes(store, names).values())
    if reads_whole_rows(sampler):
        return id_bytes, 0, id_bytes + of_columns if names else 0
    if not (sampler.has_edge_types or sampler.weighted or sampler.temporal_strategy is not None):
        return id_bytes + of_columns, 0, 0
    with_place = not sampler.has_edge_types or bool(names)
    return id_bytes + 4 * with_place + 4 * store.has["edge_weight"] + of_columns, 4, 0


@dataclass(frozen=True)
class MachinePlan:
    """One machine of a run.

    Attributes:
        role: "trains" or "prepares".
        parts: Parts that it holds.
        held_bytes: Neighbours, feature rows and learnable rows that it holds.
        num_targets: Targets that it trains on in an epoch.
        away_share: Share of the rows of the batches it makes that come from other machines; None: it makes none.
        received_bytes, sent_bytes: Bytes that it receives and sends in an epoch.
        link_s: Seconds for which its link is busy in an epoch, the busier direction of the two.
    """

    role: str
    parts: tuple[int, ...]
    held_bytes: int
    num_targets: int
    away_share: float | None
    received_bytes: int
    sent_bytes: int
    link_s: float


@dataclass(frozen=True)
class Machines:
    """Machines that a run is planned for.

    Args:
        training: Number of machines that train, >= 1.
        devices: Ranks of each.
        preparing: Number of machines beside them that prepare batches, >= 0; 0: each machine makes its own.
        link_gbit: Rate at which a machine sends, and at which it receives at the same time, gigabits a second.
        batches: Batches that are sampled for each machine that trains, at most; an epoch is extrapolated from them.
        embedding_dim: Width of learnable rows; 0: there are none.
        embedding_node_types: Names of the node types whose nodes have learnable rows; None: all nodes have.

    Raises:
        ValueError: an argument outside its range.
    """

    training: int = 1
    devices: int = 1
    preparing: int = 0
    link_gbit: float = 1.0
    batches: int = 20
    embedding_dim: int = 0
    embedding_node_types: Sequence[str] | None = None

    def __post_init__(self):
        check_count("training", self.training)
        check_integer("preparing", self.preparing, 0)
        check_count("batches", self.batches)
        if not isinstance(self.link_gbit, int | float) or not self.link_gbit > 0:
            raise ValueError(f"link_gbit must be a number > 0, got {short(self.link_gbit)}")

    @property
    def number(self) -> int:
        """Number of all machines."""
        return self.training + self.preparing

    def plan(self, data: PartitionDataModule, weights: Any = None) -> list[MachinePlan]:
        """Return a row for each machine: those that train, then those that prepare.

        Args:
            data: The run's DataModule over a store that exists, set up for no stage.
            weights: Weight policy of the run's strategy; None: no policy.

        Raises:
            ValueError: machines are to prepare for a source that takes no workers of other machines.
            StrategyError: the run would be refused too.

        Cost: samples `batches` batches for each machine that trains, without features.
        """
        if self.preparing and SourceTraits(data.source).asking is None:
            raise ValueError(
                f"preparing={self.preparing} machines make batches for source=ray alone: set source=ray, or preparing=0"
            )
        store, crosses = data.store, data.scope_under(weights) == "graph"
        if self.preparing:
            owner = self._preparing_owners(data, crosses)
        else:
            owner = data.owners(self.training * self.devices, weights) // self.devices
        asked = data.rows.owners
        whole, replicate = crosses and asked is None, 0 if asked is None else asked.replicate_bytes
        row_bytes = row_bytes_of(stored_table(store)) if data.stored_features else 0
        traffic = RowsAsked(
            store, owner, self.number, row_bytes, parse_bytes(replicate, "replicate_bytes"), data.sampler,
            data.loader_options.edge_features,
        )  # fmt: skip
        sent, targets = self._sent(data, weights, traffic, asks=crosses and not whole), self._targets(data, weights)
        machines, parts_of = range(self.number), [np.flatnonzero(owner == one) for one in range(self.number)]
        held = [self._held_bytes(store, parts, traffic, whole, halos=not crosses) for parts in parts_of]
        return [self._row(one, owner, traffic, sent, held[one], targets[one]) for one in machines]

    def _preparing_owners(self, data: PartitionDataModule, crosses: bool) -> np.ndarray:
        """Return (num_parts,) int64: the machine of those that prepare which holds each part."""
        store, names = data.store, range(self.training, self.number)
        if crosses and data.rows.owners is not None:
            counts = [len(nodes) for nodes in part_targets(store, data.sampler).values()]
            return deal_in_order(counts, np.diff(store.part_offsets), names, store.num_machines)
        made_for = store.num_machines, store.num_parts
        assigned = assign_parts(range(store.num_parts), names, names, data.seed, store.num_parts, made_for)
        return np.array([assigned[part] for part in range(store.num_parts)])

    def _targets(self, data: PartitionDataModule, weights: Any) -> np.ndarray:
        """Return (number,) int64: the targets that each machine trains on."""
        counts = [len(nodes) for nodes in part_targets(data.store, data.sampler).values()]
        ranks = self.training * self.devices
        if data.scope_under(weights) == "graph" or data.mixed_parts(weights):
            owned = np.diff([rank * sum(counts) // ranks for rank in range(ranks + 1)])
        else:
            owned = np.bincount(data.owners(ranks, weights), counts, ranks).astype(np.int64)
        trained = owned.reshape(self.training, self.devices).sum(axis=1)
        return np.concatenate([trained, np.zeros(self.preparing, np.int64)])

    def _sent(self, data: PartitionDataModule, weights: Any, traffic: RowsAsked, asks: bool) -> np.ndarray:
        """Return (number, number) bytes that [this machine] sends [that one] in an epoch.

        Args:
            asks: Whether the maker of a batch requests rows from their owners.
        """
        sent = np.zeros((self.number, self.number))
        ranks = self.training * self.devices
        for trainer in range(self.training):
            place = RankPlace(trainer * self.devices, ranks, trainer, num_local=self.devices)
            with closing(data.trial_loader(place, weights)) as loader:
                by_part = self.preparing > 0 and asks and data.seed_order == "part"
                chunks = loader.chunks if by_part else 1  # a worker makes a chunk
                batches = list(islice(loader.sampled_chunks() if by_part else loader, self.batches * chunks))
                scale = self.devices * len(loader) * chunks / len(batches)
            if self.preparing:
                self._count_prepared(trainer, batches, scale, data, traffic, sent, asks)
            elif asks:
                before = traffic.num_bytes()
                for batch in batches:
                    traffic.count(trainer, batch)
                sent += scale * (traffic.num_bytes() - before)
            else:
                traffic.all_rows[trainer] = sum(len(batch.n_id) for batch in batches)
                traffic.num_batches[trainer] = len(batches)
            if self.embedding_dim:
                node_types = NodeTypesWithRows.of(data.store, self.embedding_node_types)
                rows = scale * sum(traffic.owned(batch, node_types) for batch in batches)
                rows[trainer] = 0
                sent[:, trainer] += rows * self.embedding_dim * 4
                sent[trainer] += rows * self.embedding_dim * 4  # the gradients of all received rows
        return sent

    def _count_prepared(
        self, trainer: int, batches: Sequence[MiniBatch], scale: float, data, traffic: RowsAsked, sent, asks: bool
    ) -> None:
        """Add what machines that prepare send each other, and the trainer, for its batches."""
        together = data.source.batches_per_group
        before = traffic.num_bytes()
        lines: dict[int, list[MiniBatch]] = {}
        for number, batch in enumerate(batches):
            at_home = asks and data.seed_order == "part"
            machine = traffic.owner[batch.part] if at_home else self.training + number // together % self.preparing
            lines.setdefault(int(machine), []).append(batch)
        groups = [
            (machine, made[first : first + together])
            for machine, made in lines.items()
            for first in range(0, len(made), together)
        ]
        for machine, made in groups:
            group = pack_group(made)
            for batch in made:
                if asks:
                    traffic.count(machine, batch)
                else:
                    traffic.all_rows[machine] += len(batch.n_id)
                    traffic.num_batches[machine] += 1
            sent[machine, trainer] += scale * (group.num_bytes + len(group.union) * traffic.row_bytes)
        sent += scale * (traffic.num_bytes() - before)

    def _held_bytes(
        self, store: PartitionStore, parts: np.ndarray, traffic: RowsAsked, whole: bool, halos: bool
    ) -> int:
        """Return the bytes of the rows of parts, or of the whole graph, with learnable ones.

        Args:
            parts: What the machine owns; none: it holds nothing.
            halos: Whether a part is held with the rows of its halo.
        """
        if not len(parts):
            return 0
        offsets, csc = store.part_offsets, store.csc
        held = traffic.replicated.copy()
        for part in range(store.num_parts) if whole else parts.tolist():
            held[offsets[part] : offsets[part + 1]] = True
        rows = int(held.sum())
        features = int(store.part_rows[parts].sum()) if halos else rows
        edges = int(np.diff(csc.indptr)[held].sum())
        node_types = NodeTypesWithRows.of(store, self.embedding_node_types)
        learned = int(np.diff(offsets if node_types is None else node_types.part_offsets)[parts].sum())
        learned *= self.embedding_dim * _LEARNED_BYTES
        return edges * traffic.edge_bytes + 8 * rows + features * traffic.row_bytes + learned

    def _row(
        self, one: int, owner: np.ndarray, traffic: RowsAsked, sent: np.ndarray, held: int, targets: int
    ) -> MachinePlan:
        parts = tuple(np.flatnonzero(owner == one).tolist())
        received, given, rows = sent[:, one].sum(), sent[one].sum(), int(traffic.all_rows[one])
        return MachinePlan(
            role="trains" if one < self.training else "prepares",
            parts=parts,
            held_bytes=held,
            num_targets=int(targets),
            away_share=float(traffic.rows[:, one].sum() / rows) if rows else None,
            received_bytes=round(received),
            sent_bytes=round(given),
            link_s=float(max(received, given) * 8 / (self.link_gbit * 1e9)),
        )
