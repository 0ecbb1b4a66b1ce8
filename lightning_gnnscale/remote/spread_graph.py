"""Distributed construction on Ray: the rows of one graph lie with all workers, who ask each other for neighbours."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import GNNScaleError
from ..loader.batch_builder import BatchMaker
from ..loader.staged_part import PartStager
from ..sampler import NeighborSampler
from .cluster import WORKER_GROUP, import_ray, one_line, worker_handle
from .dealing import assign_parts
from .held_rows import DistributedFeatures, HeldFeatures, HeldRows, HopRequest, PartOwners, most_linked
from .messages import Spread
from .sampling_owners import DistributedNeighborSampler

ANSWER_LIMIT_S = 30.0


def spread_of(stage: PartStager, maker: BatchMaker, names: list[str], replicate_bytes: int) -> Spread | None:
    """Return how a stage's graph is spread over the workers, or None if the graph lies in no store.

    Args:
        stage: Loads the parts of the batches.
        maker: Makes the batches.
        names: Names of the workers' actors.
        replicate_bytes: Bytes of rows of high degree that each worker holds in addition.

    Raises:
        GNNScaleError: the sampler cannot ask other workers, or the batches do not cross parts.
    """
    store = _store_of(stage)
    if store is None:
        return None
    if len(stage.targets) > 1:
        raise GNNScaleError(
            "construction=distributed is for batches that cross parts, these stay in theirs: use scope=graph and "
            "weights=GradientAveraging(), or construction=local"
        )
    sampler = stage.sampler
    if not isinstance(sampler, NeighborSampler) or sampler.locality is not None or sampler.direction != "in":
        raise GNNScaleError(
            f"construction=distributed asks the owners of rows for what NeighborSampler draws along arcs without "
            f"locality, got {sampler}: use construction=local"
        )
    owners = assign_parts(range(store.num_parts), len(names), range(len(names)), stage.seed, store.num_parts)
    return Spread(tuple(owners[part] for part in range(store.num_parts)), tuple(names), replicate_bytes)


@dataclass(frozen=True)
class Unanswered:
    """An answer on its way from another worker; where that one has ended or knows no such graph, the files give it.

    Args:
        ref: Ray's. instead: makes it.
    """

    ref: Any
    instead: Callable[[], Any]

    def result(self) -> Any:
        """Return the answer; waits for it.

        Raises:
            GNNScaleError: the other worker failed at it.
        """
        ray = import_ray()
        try:
            answer = ray.get(self.ref, timeout=ANSWER_LIMIT_S)
        except ray.exceptions.RayTaskError as error:
            raise GNNScaleError(f"another worker could not give its rows: {one_line(error)}") from error
        except ray.exceptions.RayError:
            answer = None
        return self.instead() if answer is None else answer


class SpreadGraph:
    """One worker's share of a graph, and its connections to the other workers.

    Args:
        name: Name of the setup, by which the other workers know it.
        spread: How the graph is spread over all workers.
        number: Number of this worker.
        stage, maker: As given by the trainer.

    Attributes:
        rows: The rows that this worker holds.
        features: The feature rows that it holds, or None.
        asked: Requests sent to other workers so far.
        unanswered: Requests among them that were answered from the store's files instead.
    """

    def __init__(self, name: str, spread: Spread, number: int, stage: PartStager, maker: BatchMaker):
        self._name, self._spread, self._store = name, spread, _store_of(stage)
        self._table = maker.builder.features if maker.gathers else None
        store = self._store
        row_bytes = 0 if self._table is None or self._table.is_sparse else self._table.dim * self._table.dtype.itemsize
        replicated = most_linked(store.csc.indptr, spread.replicate_bytes, store.csc.indices.itemsize, row_bytes)
        parts = [part for part, owner in enumerate(spread.owners) if owner == number]
        self._owners = PartOwners(store.part_offsets, spread.owners)
        self.rows = HeldRows(store.csc, store.part_offsets, parts, replicated)
        held = self._table and HeldFeatures(self._table, store.part_offsets, parts, replicated)
        self.features, self.asked, self.unanswered = held, 0, 0
        self._handles: dict[int, Any] = {}

    def tools(self, stage: PartStager, maker: BatchMaker) -> tuple[PartStager, BatchMaker]:
        """Return a stage and a maker that draw and gather from the workers' memories."""
        sampler = DistributedNeighborSampler(stage.sampler, self.rows, self._owners, self._ask_rows)
        builder = copy(maker.builder)
        builder.sampler = sampler
        if self.features is not None:
            builder.features = DistributedFeatures.of(self._table, self.features, self._owners, self._ask_features)
        return replace(stage, sampler=sampler), replace(maker, builder=builder)

    def _ask_rows(self, owner: int, request: HopRequest) -> Unanswered:
        return self._ask(owner, "draw_rows", request, lambda: HeldRows.of_files(self._store.csc).draw(request))

    def _ask_features(self, owner: int, nodes: np.ndarray) -> Unanswered:
        return self._ask(owner, "gather_rows", nodes, lambda: self._table.gather(nodes))

    def _ask(self, owner: int, method: str, request: Any, files: Callable[[], Any]) -> Unanswered:
        self.asked += 1

        def instead():
            self.unanswered += 1
            return files()

        if owner not in self._handles:
            self._handles[owner] = worker_handle(self._spread.names[owner])
        call = getattr(self._handles[owner], method).options(concurrency_group=WORKER_GROUP)
        return Unanswered(call.remote(self._name, request), instead)


def _store_of(stage: PartStager) -> Any:
    """Return the store that a stage reads, None where it reads none."""
    found = [one for one in getattr(stage.load_part, "args", ()) if hasattr(one, "part_offsets")]
    return found[0] if found else None
