"""A user's settings of a placement before there is a store: how much goes on each device, and by which method."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import check_count, check_integer, short
from ..planner.tier_sizes import TierSizes
from .access_probability import METHODS as PROBABILITIES
from .access_probability import access_probability
from .feature_cache import POLICIES, FeatureCache
from .place import METHODS, Capacity, place
from .placement import Placement, group_of

CPU_SHARE = 0.1  # of the rows, on each of the devices that CPUs simulate: they have no memory of their own to ask


@dataclass(frozen=True)
class PlacementSettings:
    """How feature rows are placed on devices, and whether sampling prefers them.

    Where node types have features of their own, rows differ in width: a number of rows is then the bytes of so many
    rows of the mean width, over the nodes of all node types. The likeliest rows of any node type fill them; sparse
    ones stay in host memory.

    Args:
        method: Method of `place`; "metis" assigns the parts of the store to the devices in turns, whatever made the
            parts. Or a `Placement` made before: the arguments up to host_rows are then ignored.
        buffer_share: Share of all rows that each device's buffer holds, in (0, 1]; used if buffer_rows is None. "auto":
            as many as fit the memory that is free on a GPU after the model's first step, see `size_tiers`; on CPUs,
            whose devices are simulated, a tenth.
        buffer_rows: Number of rows in each device's buffer.
        alpha: Cost of a peer read divided by that of a host read, in [0, 1], or "auto": measured once per machine.
        groups: Groups of devices that read each other's buffers. None: found by what reads cost between each two of a
            machine, so that the slowest device's reads cost least.
        probability: "auto": "vip_sampled" where batches sample fan-outs from the whole graph, else "samples": by
            batches of the run itself, sampled ahead. Or a method of `access_probability`, which uses fan-outs, or
            by all neighbours of a sampler without.
        host_rows: Number of rows that host memory has space for besides the buffers; the others are read from disk.
            None: on GPUs as many as may be pinned of the memory that is free; on CPUs all.
        cache_rows: Number of rows in each device's cache of rows that are on no device; 0: no cache.
        cache_policy: "lru", "sieve" or "belady"; see `FeatureCache`.
        lookahead_batches: Number of batches sampled ahead for "belady", >= 1; other policies ignore it.
        locality_scale: Factor s >= 1 by which the sampler prefers rows that are near; 1 if `LocalityController` is to
            raise it. None: no preference. Needs a sampler that takes `locality`.
        neighbor_set_size: See `LocalityBias`.
        gather_threads: Number of threads that gather placed rows for batches that other processes sampled, >= 1.

    Raises:
        ValueError: an argument outside its range.
    """

    method: str | Placement = "rule"
    buffer_share: float | str = "auto"
    buffer_rows: int | None = None
    alpha: float | str = "auto"
    groups: Sequence[Sequence[int]] | None = None
    probability: str = "auto"
    host_rows: int | None = None
    cache_rows: int = 0
    cache_policy: str = "lru"
    lookahead_batches: int = 16
    locality_scale: float | None = None
    neighbor_set_size: int = 8192
    gather_threads: int = 1

    def __post_init__(self):
        if not isinstance(self.method, Placement):
            _check_choice("method", self.method, METHODS)
        _check_choice("probability", self.probability, ("auto", "samples", *PROBABILITIES))
        _check_choice("cache_policy", self.cache_policy, tuple(POLICIES))
        share = self.buffer_share
        if share != "auto" and not (isinstance(share, int | float) and 0 < share <= 1):
            raise ValueError(f'rows.buffer_share must be in (0, 1], or "auto", got {short(share)}')
        if self.buffer_rows is not None:
            check_count("rows.buffer_rows", self.buffer_rows)
        if self.alpha != "auto" and not (isinstance(self.alpha, int | float) and 0 <= self.alpha <= 1):
            raise ValueError(f'rows.alpha must be in [0, 1] or "auto", got {short(self.alpha)}')
        if self.host_rows is not None:
            check_integer("rows.host_rows", self.host_rows)
        check_integer("rows.cache_rows", self.cache_rows)
        if self.locality_scale is not None and not self.locality_scale >= 1:
            raise ValueError(f"rows.locality_scale must be at least 1 or null, got {self.locality_scale}")
        for name in ("gather_threads", "lookahead_batches", "neighbor_set_size"):
            check_count(f"rows.{name}", getattr(self, name))
        if isinstance(self.groups, str) or not isinstance(self.groups, Sequence | None):
            raise ValueError(f"rows.groups must be a list of lists of devices, or null, got {short(self.groups)}")

    @property
    def sizes_itself(self) -> bool:
        """Whether the rows of a device are as many as fit a GPU's free memory."""
        return not isinstance(self.method, Placement) and self.buffer_rows is None and self.buffer_share == "auto"

    @property
    def foretells(self) -> bool:
        """Whether the caches go by reads that are announced."""
        return self.cache_rows > 0 and self.cache_policy == "belady"

    def sized(self, sizes: TierSizes) -> "PlacementSettings":
        """Return the settings with the numbers of rows that free memory allows, where they say none themselves."""
        if isinstance(self.method, Placement):
            return self
        own_rows = sizes.buffer_rows if self.sizes_itself else self.buffer_rows
        host_rows = sizes.host_rows if self.host_rows is None else self.host_rows
        return replace(self, buffer_rows=own_rows, host_rows=host_rows)

    def rows_of(self, num_nodes: int) -> int:
        """Return the number of rows in each device's buffer where no memory is looked at."""
        share = CPU_SHARE if self.buffer_share == "auto" else self.buffer_share
        return self.buffer_rows or max(1, round(share * num_nodes))

    def place(
        self,
        store,
        train_nodes: np.ndarray,
        num_devices: int,
        fanouts: Sequence[int],
        batch_size: int,
        seed: int = 0,
        alpha: np.ndarray | None = None,
        prob: np.ndarray | None = None,
    ) -> Placement:
        """Return the placement.

        Args:
            store: A partition store.
            train_nodes: (num_train,) store ids of the targets of all batches.
            num_devices: Number of devices.
            fanouts: Fan-outs of the sampler, one per hop, -1 for all neighbours.
            batch_size: Targets per batch.
            seed: Seed of sampled probabilities and of "random".
            alpha: (num_devices, num_devices) cost of reads between devices; None: the settings' for all.
            prob: See `place`; None: by `probability`, "auto" as "vip_sampled". Nodes of node types without features
                are not read.
        """
        if isinstance(self.method, Placement):
            return self.method
        if prob is None and self.probability == "samples":
            raise ValueError("placement.probability='samples' needs the batches of a run: train, or give prob=")
        if prob is None:
            prob = access_probability(
                store,
                train_nodes,
                num_layers=len(fanouts),
                method="vip_sampled" if self.probability == "auto" else self.probability,
                fanouts=fanouts,
                batch_size=batch_size,
                seed=seed,
            )
        row_bytes = None
        if store.features is not None and store.features.by_node_type:
            prob, row_bytes = np.asarray(prob) * store.features.has_row, store.features.row_bytes
        return place(
            prob,
            num_devices,
            self.rows_of(store.num_nodes),
            alpha=self.alpha if alpha is None else alpha,
            groups=self.groups,
            method=self.method,
            store=store,
            train_nodes=train_nodes,
            num_layers=len(fanouts),
            part_id=_device_of_parts(store, num_devices) if self.method == "metis" else None,
            host_rows=self.host_rows,
            seed=seed,
            row_bytes=row_bytes,
        )

    def caches_by_node_type(
        self, features, placement: Placement, device: int, prob: np.ndarray
    ) -> list[FeatureCache | None]:
        """Return the cache of each node type; together they have the bytes of `cache_rows`.

        Each has space for as many rows as its node type has among the likeliest rows that no device of the group holds.
        `features` are the store's `TypedFeatures`; the device reads node i with the probability `prob[i]`.
        """
        far = np.ones(placement.num_nodes, bool)
        for peer in group_of(placement, device):
            far[placement.rows[peer]] = False
        order = np.argsort(-prob, kind="stable")
        kept = Capacity(self.cache_rows, features.row_bytes).first(order[far[order]])
        counts = np.bincount(features.node_types.type_of(kept), minlength=features.node_types.num_node_types)
        return [FeatureCache(count, self.cache_policy) if count else None for count in counts.tolist()]


def _device_of_parts(store, num_devices: int) -> np.ndarray:
    """Return (num_nodes,) int32: the device whose parts, in turns, hold each node."""
    return np.repeat(np.arange(store.num_parts, dtype=np.int32) % num_devices, np.diff(store.part_offsets))


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"rows.{name} must be one of {', '.join(allowed)}, got {short(value)}")
