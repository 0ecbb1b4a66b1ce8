"""`PartitionDataModule`: partitions in `prepare_data`, trains on parts, evaluates exactly."""

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from ..errors import PlacementError, StrategyError, check_count, check_integer, is_integer, short
from ..events import record
from ..graph import batches_of, check_requires
from ..keywords import passes_on
from ..loader import (
    LoaderOptions,
    PartLoader,
    Processes,
    RankPlace,
    RowReads,
    SourceSettings,
    Threads,
    parts_of_rank,
    rank_of_parts,
)
from ..loader.device_batches import DeviceBatches
from ..memory import trim_heap
from ..model.layer_source import NodeSet
from ..partition_store import PartitionStore, StoreMaking, StoreSource
from ..placement import FeatureBuffer, Placement, PlacementSettings, TypedBuffers
from ..planner.host_memory import BatchShape, RunSize, predict_evaluation
from ..sampler import ClusterSampler, FullBatchSampler, NeighborSampler
from ..sampler.clusters_by import clusters_by
from ..sampler.minibatch import MiniBatch
from ..sampler.on_device import asked_device
from ..sampler.protocol import BatchSampler, as_batch_sampler
from ..scratch import Scratch, open_scratch
from ..traits import BackboneTraits, ModuleTraits, SourceTraits, StrategyTraits
from .evaluation import (
    EvaluationOptions,
    ValidationSample,
    evaluation_links,
    evaluation_options,
    sample_order,
    validation_sample,
)
from .layer_source import EvaluationLoader, EvaluationPass, StoreLayerSource
from .placed_training import PlacedTraining, RankReads, with_scale
from .stored_graph import StoredGraphDataModule, check_edge_features, check_model, num_layers_of, policy_of
from .tiers import device_name, is_placeable
from .train_loader import (
    NO_GPU,
    RowsSetting,
    check_edge_weights,
    check_even_parts,
    check_scope,
    epoch_work,
    make_alone_loader,
    make_evaluation_loader,
    make_graph_loader,
    make_interleaved_loader,
    make_link_loader,
    make_part_loader,
    mixes_parts,
    part_targets,
    rank_targets,
    reads_by_memory,
    settle_column_reads,
    settle_evaluation_reads,
    settle_row_reads,
    source_settings,
)

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from ..remote import OwnerReads
    from ..remote.holder import HeldGraph

# Below Lightning's own logger, so that it logs where the Trainer does.
_log = logging.getLogger("lightning.pytorch.validation")
MODES = ("mini_batch", "full_batch")
SCOPES = ("auto", "part", "parts", "graph")
SEED_ORDERS = ("graph", "part")


class PartitionDataModule(StoredGraphDataModule):
    """Train on the parts of a graph, one part at a time on each process.

    Parts are assigned to ranks cyclically, so there may be more parts than ranks.

    Batches, and evaluation, have `edge_attr`, the features of their edges, where the store has them. GAT and
    GINE read them (`edge_dim=dm.num_edge_features`), and so does any backbone that takes `edge_attr`; others are
    refused.

    Args:
        store: Folder or URL of a partition store, an open store, or a `StoreSource`; or a `Data` of PyG, from which one
            is made (its edges are kept as they are); None: one is made, see `making`.
        mode: "mini_batch", or "full_batch": each part is one batch.
        sampler: Samples a mini-batch: one of this package's samplers or any `BatchSampler`; None:
            `NeighborSampler([25, 10])`. A `ClusterSampler` without clusters of its own gets SPRING's. Evaluation
            follows edges from target to source, so direction="both" needs a store with both directions.
        batch_size: Seeds per batch, >= 1.
        halo_hops: Hops of halo that a part sees, 0 to 3; 0 gives each cross edge to one of its two parts.
        scope: "part": batches stay inside core and halo; "parts": inside the parts that a batch mixes, which are
            sampled as one graph: which parts are together changes from epoch to epoch, and so do the edges between
            parts that batches follow (`halo_hops=1`, gradient averaging); "graph": they cross parts and ranks get equal
            shares of the seeds (`ClusterSampler` and `SaintSampler` then hold 4 to 21 bytes an edge of the whole graph
            on each rank);
            "auto": "part", but "graph" under gradient averaging where a batch cannot mix parts (other samplers than
            `NeighborSampler` and `LayerwiseSampler`), or `rows` are tiered or their owners'. Under gradient averaging
            "part" makes each batch of a chunk of several parts, and every rank takes a share.
        interleave_parts: Number of parts that such a batch mixes, >= 1; one more part is in memory, or with
            scope="parts" as many again. Where workers of "ray" have a cap that holds fewer parts, as many as it holds.
        seed_order: Where the seeds of a batch that crosses parts come from. "graph": from all over its rank's share.
            "part": a batch is `interleave_parts` chunks, the seeds of each of one part, and every rank takes a share:
            where workers of "ray" ask owners, a chunk is made where its seeds are.
        repartition_every: Epochs for which each rank trains on its own parts alone, as one graph, >= 1: edges from
            other ranks' parts are left out, the others' messages are weighed for it, and no rank reads a feature that
            another holds. Then parts change ranks. For gradient averaging, with scope="auto" and at least two parts a
            rank. None: ranks do not train alone.
        evaluation: `EvaluationOptions`, or the name of a mode for its defaults. "layerwise": exact, a layer at a time.
            "sampled": for any backbone, in batches with all neighbours of each evaluated node.
        seed: Seed of the partitioning, of the order of seeds, and of sampling.
        source: What prepares training batches on each rank: `gs.Threads`, `gs.Processes`, `gs.TaskGraphs` or
            `gs.RayWorkers`. A name ("threads", "processes", "task_graphs", "ray") stands for its defaults. All give the
            same batches.
        rows: Where the feature rows of training batches are; the batches are the same. "mapped", "resident" or
            "planned": in the store's files, see `RowReads`. "auto": on a GPU dense rows fill its memory, that of its
            peers, pinned memory and the page cache, by what is free after the first step; else one of these three, by
            the memory that is free when training starts. "tiered", `PlacementSettings` or a `Placement` made before:
            on the devices, one a process, in host memory and on disk. "owners" or `OwnerReads`: on several machines
            each holds the parts that its ranks train on, and asks the others; one machine reads the store. Workers of
            "ray" hold the rows of the parts that they prepare; under "owners" each of their machines holds some, and
            asks the others.
        device_batches: Batches that are copied to a GPU ahead of their use, through pinned memory and beside training,
            >= 0; 0: Lightning moves each when it is asked for. Without effect on a CPU.
        stored_features: Whether batches and evaluation read the store's features. False: the model's `inputs` bring
            them.
        stored_edge_features: Whether they read the store's edge features. False: a model without `edge_dim` may train.
        making: What a store is made from, and how: the keywords of `StoreSource.of` and `StoreSource`, among them root,
            dataset or stream with features, labels and masks, partitioner and num_parts.

    Raises:
        ValueError, PartitionStoreError, StrategyError: one line with the remedy.

    Cost: a rank holds two parts' graphs (this one and the next, 8 bytes an edge each) and the batches made ahead;
        features stay memory-mapped. Evaluation writes 4 x num_nodes x width bytes of scratch for each
        of the two widest layers.
    Source: SDT-GNN, training and evaluation. Differs: evaluation is exact layer-wise inference shared over ranks.
    """

    @passes_on(StoreSource.of, StoreSource)
    def __init__(
        self,
        store: "str | os.PathLike | PartitionStore | StoreSource | Data | None" = None,
        *,
        mode: str = "mini_batch",
        sampler: BatchSampler | None = None,
        batch_size: int = 512,
        halo_hops: int = 1,
        scope: str = "auto",
        interleave_parts: int = 4,
        seed_order: str = "graph",
        repartition_every: int | None = None,
        evaluation: str | EvaluationOptions = "layerwise",
        seed: int = 0,
        source: str | SourceSettings = "threads",
        rows: "str | OwnerReads | PlacementSettings | Placement" = "auto",
        device_batches: int = 2,
        stored_features: bool = True,
        stored_edge_features: bool = True,
        **making: Unpack[StoreMaking],
    ):
        super().__init__(store, seed, **making)
        _check_choice("mode", mode, MODES)
        _check_choice("scope", scope, SCOPES)
        _check_choice("seed_order", seed_order, SEED_ORDERS)
        check_count("batch_size", batch_size)
        check_count("interleave_parts", interleave_parts)
        check_integer("device_batches", device_batches, 0)
        if not is_integer(halo_hops) or halo_hops not in (0, 1, 2, 3):
            raise ValueError(f"halo_hops must be 0, 1, 2 or 3, got {short(halo_hops)}")
        self.mode, self.scope, self.evaluation = mode, scope, evaluation_options(evaluation)
        if mode == "full_batch" and not isinstance(sampler, FullBatchSampler):
            sampler = FullBatchSampler()
        self.sampler = as_batch_sampler(sampler or NeighborSampler([25, 10]))
        if isinstance(self.sampler, ClusterSampler) and self.sampler.cluster is None:
            self.sampler = replace(self.sampler, cluster=clusters_by("spring"))
        self.halo_hops, self.interleave_parts, self.seed_order = halo_hops, interleave_parts, seed_order
        self.device_batches = device_batches
        links = self.evaluation.links
        own = {} if self.dataset is None else self.dataset.links
        self.links = own if links is None else dict(links)
        self.rows = RowsSetting.of(rows)
        self.source = self.rows.source(source_settings(source), self.sampler, scope)
        if seed_order == "part":
            self._check_seeds_by_part()
        if scope == "parts":
            self._check_together()
        self.repartition_every = repartition_every
        if repartition_every is not None:
            self._check_alone()
        self._held: HeldGraph | None = None
        self.loader_options = LoaderOptions(
            batch_size,
            seed,
            num_threads=SourceTraits(self.source).num_threads,
            prefetch_batches=self.source.batches_ahead,
            edge_features=stored_edge_features,
        )
        placement = self.rows.placement
        if not stored_features and placement is not None:
            raise ValueError('rows="tiered" places stored features: leave stored_features=True, or say rows="auto"')
        self.stored_features = stored_features
        self._placed = None if placement is None else PlacedTraining(placement, self.sampler)
        self._settling: LambdaCallback | None = None
        self._train_loader: PartLoader | None = None
        self._scratch: Scratch | None = None

    def _check_seeds_by_part(self) -> None:
        """Refuse what does not go with chunks whose seeds are in one part and whose neighbours are anywhere.

        Raises:
            ValueError: the message names the remedy.
        """
        if self.scope != "graph":
            raise ValueError(
                f'seed_order="part" is for batches that cross parts, got scope="{self.scope}": use scope="graph", or '
                'seed_order="graph"'
            )
        if not mixes_parts(self.sampler):
            raise ValueError(
                f'seed_order="part" mixes chunks of NeighborSampler or LayerwiseSampler, got {self.sampler}: '
                "leave it out"
            )
        if self.asks_owners:
            raise ValueError(
                'rows=owners gives each rank the seeds of the parts that its machine holds, seed_order="part" '
                "a share of each part: leave one of them out"
            )

    def _check_together(self) -> None:
        """Refuse what does not go with parts that are sampled as one graph.

        Raises:
            ValueError: the message names the remedy.
        """
        if not mixes_parts(self.sampler):
            raise ValueError(
                f'scope="parts" is for NeighborSampler and LayerwiseSampler, got {short(self.sampler)}: use '
                'scope="auto"'
            )
        if self.halo_hops != 1:
            raise ValueError(f'scope="parts" takes halo_hops=1, got {self.halo_hops}: use scope="part", or 1')

    def _check_alone(self) -> None:
        """Refuse what does not go with ranks that train on their own parts alone.

        Raises:
            ValueError: the message names the remedy.
        """
        check_count("repartition_every", self.repartition_every)
        if self.scope != "auto" or self.seed_order != "graph" or self.halo_hops != 1:
            raise ValueError(
                f"repartition_every={self.repartition_every} keeps batches in the parts of a rank: leave scope, "
                f"seed_order and halo_hops out, got {self.scope}, {self.seed_order} and {self.halo_hops}"
            )
        if not mixes_parts(self.sampler):
            raise ValueError(
                f"repartition_every is for NeighborSampler and LayerwiseSampler, got {short(self.sampler)}: leave it "
                "out, or use one of them"
            )
        if self.rows.owners is not None or self.rows.placement is not None or not self.source.in_process:
            if isinstance(self.source, Processes) and self.rows == RowsSetting(self.rows.how):
                return
            raise ValueError(
                "repartition_every reads the rows of a rank's own parts, prepared on its machine: use rows=auto, and "
                "source=threads, processes or task_graphs"
            )

    @property
    def kernel_set(self) -> str:
        """The name of the set of kernels compiled ahead, see `kernels.json`."""
        if self.sampler.trains_on_links:
            return "links"
        return "train" if self.dataset is None or self.dataset.schema is None else "hetero"

    def check_trainer(self, trainer: Any) -> None:
        """Refuse a strategy that would wait forever or does not fit the scope; raises as `setup` does."""
        weights = policy_of(trainer)
        if trainer.world_size > 1 and weights is None:
            raise StrategyError(
                f"{type(trainer.strategy).__name__} waits for a gradient of each of the {trainer.world_size} processes "
                'in every batch, and parts have different numbers of batches: use Trainer(strategy="gnnscale")'
            )
        check_scope(self.scope_under(weights), weights, self.sampler)
        if self._placed is not None:
            self._placed.check_trainer(trainer, self.device_batches)

    def setup(self, stage: str | None = None) -> None:
        """Open the store, a scratch folder for evaluation, and for training the placed features."""
        super().setup(stage)
        if stage == "fit":
            self._check_fit()
        if self._scratch is None:
            self._scratch = open_scratch(self.root, self.evaluation.scratch, self.trainer)
        if stage in ("fit", None) and self._placed is None and self._not_placed is None:
            self._placed = PlacedTraining(PlacementSettings("rule_by_cost"), self.sampler)
        if stage in ("fit", None) and self._placed is not None and self.buffer is None:
            self._check_trainable()
            world_size, crosses = self._place().world_size, self.scope_under(self._weights) == "graph"
            targets = [self._targets_of(rank, world_size) for rank in range(world_size)]
            reads = RankReads(crosses, targets, self._nodes_sampled)
            evaluation = predict_evaluation(RunSize(self.store.num_nodes, self.store.num_edges), self._evaluated_rows)
            given = (self.store, self.sampler, self.loader_options, self.trainer, reads, evaluation)
            self.sampler = self._placed.open(*given)
            if not self._placed.is_settled:
                self._settling = LambdaCallback(on_train_batch_end=self._settle_rows)
                self.trainer.callbacks.append(self._settling)
        if self.sampler.locality is not None:
            self.sampler.locality.check_store(self.store.num_nodes, self.store.layout_fingerprint)

    @property
    def _not_placed(self) -> str | None:
        """Why `rows="auto"` does not place feature rows on devices; None: it does. "": the user said where rows are."""
        if self.rows != RowsSetting() or not self.stored_features:
            return ""
        if self.repartition_every is not None:
            return "not placed: parts change ranks (repartition_every)"
        if device_name(self.trainer) == "cpu":
            return NO_GPU
        features = self.store.features
        if features is None or not is_placeable(features):
            return "no dense ones to place"
        if self.store.fetched is not None:
            return "not placed: the store is fetched as it is read"
        if not self._reads_here:
            return "not placed: workers of other machines read them"
        return None

    @property
    def _reads_here(self) -> bool:
        """Whether batches are made on this machine."""
        return self.source.in_process or isinstance(self.source, Processes)

    @property
    def _evaluated_rows(self) -> BatchShape:
        features = self.store.features
        return BatchShape(feature_dim=0 if features is None else features.dim, fanouts=self.sampler.per_hop)

    def _settle_rows(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fill the tiers of feature rows once the first step is done; every rank gets here."""
        if self._placed.is_settled or ((batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch):
            return
        try:
            self._placed.settle(trainer)
        except PlacementError as error:
            if self.rows.placement is not None:
                raise
            rank_zero_warn(f"feature rows stay in the store's files (rows=mapped says so from the start): {error}")

    def _check_samples(self) -> None:
        """Refuse a store without the columns to sample by; warn where it has times that the sampler does not use."""
        check_requires(self.sampler.requires, self.store.has)
        self.sampler.check_schema(self.store.schema)
        times = [name for name in ("node_time", "edge_time") if self.store.has[name]]
        if times and self._sampled_by.temporal_strategy is None:
            rank_zero_warn(
                f"the store has {' and '.join(times)}, and neighbours of any time are sampled, also ones later than "
                "the target: say temporal_strategy=uniform or last to NeighborSampler, or write the store without times"
            )

    @property
    def num_edge_features(self) -> int | None:
        """Columns of the stored edge features that batches have; None without."""
        return super().num_edge_features if self.loader_options.edge_features else None

    @property
    def buffer(self) -> FeatureBuffer | TypedBuffers | None:
        """The placed features of this process while it trains; None without a placement."""
        return None if self._placed is None else self._placed.buffer

    @property
    def part_weights(self) -> np.ndarray:
        """(num_parts,) float64: training nodes of each part, the weights of model averaging."""
        return np.array([len(nodes) for nodes in part_targets(self.store, self.sampler).values()], np.float64)

    def parts_of_rank(self, rank: int, world_size: int) -> list[int]:
        """Return the parts of a rank, in the order of their visits: rank, rank + world_size, ..."""
        return parts_of_rank(self.store.num_parts, rank, world_size)

    @property
    def rank_of_part(self) -> np.ndarray:
        """(num_parts,) int64: the rank that owns each part, known once the store is open."""
        place = self._place()
        computed_by = np.empty(place.num_ranks, np.int64)
        for process in range(place.world_size):
            computed_by[list(place._replace(rank=process).ranks)] = process
        return computed_by[self.owners(place.num_ranks, self._weights)]

    def owners(self, world_size: int, weights: Any) -> np.ndarray:
        """Return (num_parts,) int64: the rank of so many that owns each part and trains its targets, under a policy."""
        trainable = self.sampler.trains_on_links or "train" in self.store.masks
        if self.scope_under(weights) != "graph" or not trainable:
            return np.arange(self.store.num_parts) % world_size
        counts = [len(nodes) for nodes in part_targets(self.store, self.sampler).values()]
        return rank_of_parts(counts, np.diff(self.store.part_offsets), world_size, self.store.num_machines)

    @property
    def _weights(self) -> Any:
        """The strategy's policy; under another strategy than this package's None, and a pass over each part."""
        return policy_of(self.trainer)

    def train_dataloader(self) -> PartLoader:
        """Return this rank's batches: a plain iterable that shards itself."""
        self._check_trainable()
        scope, place = self.scope_under(self._weights), self._place()
        self._tell_machines(scope, place)
        options, features = self.loader_options, self.buffer
        if self._gathers_on_device or not self.stored_features:
            features = None
        held = self._held_graph()
        reads_store = features is None and self.buffer is None and self.stored_features and held is None
        if reads_store:
            features = self.store.features if scope in ("graph", "alone") else self.store.part_features
        if self.trainer is not None and self.trainer.overfit_batches > 0:
            options = replace(options, shuffle=False)  # so that an epoch's first batches have the same seeds
        if features is not None and features is self.buffer:  # rows in this process: workers sample, its threads gather
            options = self._placed.loader_options(options, self.source.in_process)
        features = features if held is None else held.features
        loader = self._loader(self._weights, options, features, self.source, place, held)
        settle_column_reads(loader, place, self.rows.how)
        if reads_store and features is not None:
            hops = None if scope in ("graph", "alone") else self.halo_hops
            not_placed = self._not_placed or ""
            settle_row_reads(
                loader, self.store, self.source, place, self.rows.how, hops, not_placed, self._hidden_channels
            )
        loader.send_to(self._sending(self._placed if self._gathers_on_device else None))
        loader.sample_on(None if scope == "alone" else self._gpu)
        self._close_loader()
        self._train_loader = loader
        return loader

    @property
    def _hidden_channels(self) -> int:
        """Columns between the layers of the model that trains on this host's CPUs; 0: unknown, or there is none."""
        if self._gpu is not None or self._module is None:
            return 0
        width = BackboneTraits(ModuleTraits(self._module).backbone).hidden_channels
        return width if isinstance(width, int) else 0

    def _tell_machines(self, scope: str, place: RankPlace) -> None:
        """Say where parts that were made for some machines are owned by others."""
        made_for, machines = self.store.num_machines, 1 if self.trainer is None else self.trainer.num_nodes
        aligned = place.num_ranks % made_for == 0 and machines in (1, made_for)
        if scope == "graph" and place.world_size > 1 and not aligned:
            rank_zero_info(
                f"the store's parts are for {made_for} machines, and {machines} with {place.num_ranks} ranks train: "
                f"ranks own ranges of the parts. For a lower cut between machines: partitioner.num_machines={machines}"
            )

    def _sending(self, placed: PlacedTraining | None = None) -> DeviceBatches | None:
        """Return what copies batches to the Trainer's GPU ahead of their use; None: Lightning moves them.

        Args:
            placed: Gathers the rows of a batch that are on the GPU; None: batches come with theirs.
        """
        if self._gpu is None or not self.device_batches:
            return None
        if placed is None:
            return DeviceBatches(self._gpu, self.device_batches)
        foretell = placed.foretell if placed.settings.foretells else None
        return DeviceBatches(self._gpu, self.device_batches, placed.fill, foretell=foretell)

    @property
    def _gpu(self) -> torch.device | None:
        """The GPU of the Trainer, None on a CPU."""
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return device if device.type == "cuda" else None

    def trial_loader(self, place: RankPlace, weights: Any) -> PartLoader:
        """Return the batches that a rank would train on under a policy, without features, as threads here make them."""
        return self._loader(weights, replace(self.loader_options, prefetch_batches=None), None, Threads(), place)

    def predicted_reads(
        self, place: RankPlace, weights: Any, free_bytes: list[int], hidden_channels: int = 0
    ) -> list[RowReads]:
        """Return how a rank's batches would get their rows from the store, with so much memory free; for each of some.

        The processes of its machine have as much each, and share a sweep. hidden_channels: as of `settle_row_reads`.

        Cost: up to eight parts are loaded, a chunk of each is sampled, and for each size a sweep is tried, 1 to 2 s.
        """
        hops = None if self.scope_under(weights) in ("graph", "alone") else self.halo_hops
        with closing(self.trial_loader(place, weights)) as loader:
            return reads_by_memory(loader, self.store, hops, free_bytes, place.num_local, hidden_channels)

    def _targets_of(self, rank: int, world_size: int) -> np.ndarray:
        """Return the store ids of a rank's targets; of all where its batches mix chunks of all parts."""
        weights = self._weights
        if self.scope_under(weights) == "graph" and self.seed_order == "graph":
            place = self._place()._replace(rank=rank, world_size=world_size)
            shares = rank_targets(self.store, self.sampler, place.num_ranks)
            return np.concatenate([shares[one] for one in place.ranks])
        targets = part_targets(self.store, self.sampler)
        parts = targets if self._mixes(weights) else parts_of_rank(self.store.num_parts, rank, world_size)
        return np.concatenate([targets[part] for part in parts])

    def _nodes_sampled(self, rank: int, number: int) -> Iterator[np.ndarray]:
        """Yield the nodes of so many batches of a rank, from the first epoch on."""
        with closing(self.trial_loader(self._place()._replace(rank=rank), self._weights)) as loader:
            for epoch in itertools.count():
                loader.set_epoch(epoch)
                for step in itertools.islice(loader, number):
                    for batch in batches_of(step):
                        yield batch.n_id.numpy()
                number -= min(number, len(loader))
                if not number:
                    return

    def _loader(
        self, weights: Any, options: LoaderOptions, features, source, place: RankPlace, held=None
    ) -> PartLoader:
        """Return a rank's loader under a policy, of the scope that it takes."""
        scope = self.scope_under(weights)
        check_scope(scope, weights, self.sampler)
        check_edge_weights(self.sampler, self.store)
        if scope == "graph" and self.seed_order == "graph":
            return make_graph_loader(self.store, self.sampler, options, features, source, place, held)
        if scope == "alone":
            every = self.repartition_every
            return make_alone_loader(self.store, self.sampler, every, options, features, source, place)
        if self._mixes(weights):
            halo_hops = None if scope == "graph" else self.halo_hops
            given = (halo_hops, self.interleave_parts, options, features, source, place)
            return make_interleaved_loader(self.store, self.sampler, *given, together=scope == "parts")
        if weights is not None and weights.equal_batches:
            check_even_parts(part_targets(self.store, self.sampler), place.num_ranks)
        options = replace(options, passes=1 if weights is None else weights.passes_per_epoch)
        return make_part_loader(self.store, self.sampler, self.halo_hops, options, features, source, place)

    def val_dataloader(self) -> EvaluationLoader | PartLoader | list:
        """Return this rank's share of the validation nodes or links, or an empty list in a fit without any."""
        on_links = self.sampler.trains_on_links
        if "val" not in (self.links if on_links else self.store.masks):
            if on_links:
                return self._without_validation("links for it", "use hold_out_edges, or links=")
            return self._without_validation("a val mask", "write the store with masks={'val': ...}")
        if not on_links:
            self._check_labels("validation")
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationLoader | PartLoader:
        """Return this rank's share of the test nodes or links."""
        self._check_testable()
        return self._evaluation("test")

    def predict_dataloader(self) -> EvaluationLoader | PartLoader:
        """Return this rank's share of all nodes; of held-out edges, where the sampler and the module classify edges.

        Those are the test edges, or where there are none those for validation, with a class or without; `links` may
        name others as "test", edges of the store too. The sampler is a `LinkSampler` with labelled=True; the module has
        `predicts_edges = True`, as `EdgeClassifier` does. Other modules predict all nodes.

        Raises:
            StrategyError: no edges are held out.
        """
        return self._evaluation(self._predicted_edges(), is_scored=False)

    def _predicted_edges(self) -> str | None:
        """Return the split whose edges are predicted; None: nodes are."""
        module = self._module
        if not (self.sampler.labelled and (module is None or ModuleTraits(module).predicts_edges)):
            return None
        for split in ("test", "val"):
            if split in self.links and np.size(self.links[split].edges):
                return split
        raise StrategyError(
            "predicting classes of edges needs held-out edges, and there are none: use hold_out_edges, or "
            'EvaluationOptions(links={"test": LinkSet(edges)})'
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Gather the features of a training batch from all tiers, where it trains."""
        if self._gathers_on_device and isinstance(batch, MiniBatch) and not batch.has_features:
            self._placed.fill(batch, batch.n_id)
        return batch

    def set_locality_scale(self, scale: float) -> None:
        """Set the scale by which batches of the next epoch prefer near rows; `LocalityController` calls it.

        Raises:
            StrategyError: the sampler has no locality.
        """
        before, self.sampler = self.sampler, with_scale(self.sampler, scale)
        if self.sampler is not before and self._train_loader is not None:
            self._train_loader.set_sampler(self.sampler)

    def loading_share(self) -> float:
        """Return the share of the last epoch's time spent loading features, in [0, 1]; call it once an epoch.

        See `PlacedTraining.loading_share`. Without placed features it is the share spent waiting for batches.
        """
        loader = self._train_loader
        if loader is None or not loader.seconds:
            return 0.0
        if self._placed is None or self.buffer is None:
            return loader.waiting_share
        return self._placed.loading_share(loader.seconds, loader.waiting_share, loader.options.num_threads)

    def teardown(self, stage: str) -> None:
        """Remove the scratch folder, and release placed features."""
        if stage == "fit":
            self._close_loader()
            trim_heap()
            if self._placed is not None:
                self._placed.close(self.trainer)
            if self._settling is not None and self._settling in self.trainer.callbacks:
                self.trainer.callbacks.remove(self._settling)
            if self.rows.placement is None:
                self._placed = None
        if self._scratch is not None:
            StoreLayerSource(self.store, [], self._scratch).close()
            self._scratch = None
        if self._held is not None:
            self._held.close(0.0 if self._train_loader is None else self._train_loader.waiting_share)
            self._held = None

    @property
    def asks_owners(self) -> bool:
        """Whether the processes that train ask other machines for rows: `rows="owners"`."""
        return self.rows.owners is not None and self.source.in_process

    def _held_graph(self) -> "HeldGraph | None":
        """Return the graph as the run's machines hold it; None where the store is read. Every rank calls it."""
        place = self._place()
        if self.asks_owners and self._held is None and place.num_local < place.world_size:
            features = self.store.features if self.stored_features else None
            edge_features = self.loader_options.edge_features
            self._held = self.rows.owners.open(self.store, features, self.rank_of_part, self.sampler, edge_features)
        return self._held

    def scope_under(self, weights: Any) -> str:
        """Return the scope of batches under a weight policy: "part", "parts", "graph" or "alone"."""
        if self.repartition_every is not None:
            return "alone"
        if self.scope != "auto":
            return self.scope
        if weights is None or not weights.equal_batches or self.mode == "full_batch":
            return "part"
        owned_or_placed = self.rows.owners is not None or self.rows.placement is not None
        crosses = owned_or_placed or not mixes_parts(self.sampler)
        return "graph" if crosses else "part"

    def _mixes(self, weights: Any) -> bool:
        """Whether batches are chunks of several parts under a weight policy."""
        equal = weights is not None and weights.equal_batches
        return (self.scope_under(weights) == "graph" or equal) and mixes_parts(self.sampler)

    def mixed_parts(self, weights: Any) -> int:
        """Return how many parts a batch mixes under a weight policy, at most; 0: none. None: the default."""
        if self.repartition_every is not None:
            known = self._store is not None and self.trainer is not None
            return -(-self.store.num_parts // self._place().num_ranks) if known else self.interleave_parts
        mixed = mixes_parts(self.sampler) if weights is None else self._mixes(weights)
        return self.interleave_parts if mixed and self.scope_under(weights) != "graph" else 0

    def samples_whole(self, weights: Any) -> bool:
        """Whether batches sample the whole graph under a weight policy."""
        return self.scope_under(weights) == "graph"

    def _close_loader(self) -> None:
        if self._train_loader is not None:
            self._train_loader.close()

    def _place(self) -> RankPlace:
        trainer = self.trainer
        if trainer is None:
            return RankPlace()
        share, num_local = trainer.strategy.broadcast, trainer.world_size // trainer.num_nodes
        here = (trainer.global_rank, trainer.world_size, trainer.node_rank, trainer.local_rank, num_local, share)
        return RankPlace(*here, StrategyTraits(trainer.strategy).logical_ranks)

    @property
    def shares_by_process(self) -> str | None:
        """Why a process cannot train the batches of several logical ranks; None: it can."""
        locality = self.sampler.locality
        if locality is None:
            return None
        from .callbacks import LocalityController  # and pyarrow with it

        if self._placed is not None and self._placed.settings.locality_scale is not None:
            return "rows.locality_scale prefers rows by a placement on processes, by the memory that each has free"
        if any(isinstance(callback, LocalityController) for callback in self.trainer.callbacks):
            return "LocalityController chooses its scale by measured time"
        if len(locality.placement.groups) > 1:
            return "a sampler's locality prefers rows of one of the placement's groups of devices, a process's own"
        return None

    @property
    def _gathers_on_device(self) -> bool:
        return self._placed is not None and self._placed.gathers_on_device

    def _check_trainable(self) -> None:
        if not self.sampler.trains_on_links:
            super()._check_trainable()

    def _check_fit(self) -> None:
        self._check_trainable()
        self._check_samples()
        module = self._module
        check_model(module, self.store, self._hops)
        given = self.store.edge_column("edge_features", whole=False) if self.loader_options.edge_features else None
        check_edge_features(module, given)

    @property
    def _hops(self) -> int | None:
        """Hops around its seeds that a batch reaches, where the sampler has hops."""
        return len(self.sampler.per_hop) or self.sampler.num_layers

    def _check_testable(self) -> None:
        if not self.sampler.trains_on_links:
            super()._check_testable()
        elif "test" not in self.links:
            raise StrategyError("testing needs test links, and none are held out: use hold_out_edges, or links=")

    def _evaluation(self, split: str | None, is_scored: bool = True) -> EvaluationLoader | PartLoader:
        if self.sampler.direction == "both" and not self.store.symmetric:
            raise StrategyError(
                'direction="both" trains on edges in both directions, evaluation would follow one, and this store has '
                'edges without their reverse: write it with to_undirected=True, or say direction="in"'
            )
        rank, world_size = self._rank_and_world()
        links = None
        if split is not None and self.sampler.trains_on_links:
            labelled = self.sampler.labelled
            links = evaluation_links(
                self.store, self.links, split, 0 if labelled else self.evaluation.negatives, self.loader_options.seed,
                rank, world_size, self.evaluation.mode, self.sampler.by_time, is_scored,
            )  # fmt: skip
            if labelled and is_scored and links.label is None:
                raise StrategyError(f"links[{split!r}].label is missing, but edges are classified: give their classes")
            if not self.loader_options.edge_features:
                links = links._replace(features=None)
            if self.evaluation.mode == "sampled":
                features = self.store.features if self.stored_features else None
                loader = make_link_loader(
                    self.store, self._hops or 2, links, self.loader_options, features, rank, self.sampler
                )
                settle_evaluation_reads(loader, self.store, self._place(), self.rows.how)
                loader.send_to(self._sending())
                return loader
        if self.evaluation.mode == "sampled":
            held = self._held_graph()
            features = self.store.features if held is None else held.features
            features = features if self.stored_features else None
            loader = make_evaluation_loader(
                self.store, self._hops or 2, split, self.loader_options, features, rank, world_size, held, self.sampler
            )
            if held is None:
                settle_evaluation_reads(loader, self.store, self._place(), self.rows.how)
            else:
                settle_column_reads(loader, self._place(), self.rows.how)
            loader.send_to(self._sending())
            return loader
        if self.sampler.temporal_strategy is not None:
            raise StrategyError(
                'evaluation="layerwise" computes a node once, from neighbours of any time; the sampler goes by time: '
                'use evaluation="sampled"'
            )
        source = StoreLayerSource(
            self.store,
            self.parts_of_rank(rank, world_size),
            self._scratch,
            self.evaluation.block_edges,
            self.stored_features,
            self.loader_options.edge_features,
        )
        sample = self._sample(split) if split == "val" and self._is_fitting else None
        return EvaluationLoader(
            EvaluationPass(
                source,
                split,
                self.store.labels,
                self.store.masks,
                links,
                sample and NodeSet.of(sample.nodes, self.store.num_nodes),
                self.evaluation.table_dtype,
            )
        )

    @property
    def _is_fitting(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == "fit"

    def _sample(self, split: str) -> ValidationSample | None:
        """Return the nodes that validation during training uses, the same on every rank; None: all of the split."""
        if self.sampler.trains_on_links:
            if self.evaluation.sample not in ("auto", 1):
                raise StrategyError(
                    f"evaluation.sample={self.evaluation.sample} applies to node tasks only: leave it out for links"
                )
            return None
        sample = None
        if self._rank_and_world()[0] == 0:
            sample = self._chosen_sample(split)
        sample = self.trainer.strategy.broadcast(sample)
        if sample is not None and self.trainer.is_global_zero:
            _log.info("Validation during training uses %s; trainer.validate uses all nodes", sample)
            record(
                "validation_sample",
                num_sampled=len(sample.nodes),
                num_nodes=sample.num_nodes,
                work=sample.work,
                epoch_work=sample.epoch_work,
            )
        return sample

    def _chosen_sample(self, split: str) -> ValidationSample | None:
        if self.evaluation.sample == 1:
            return None
        num_layers = num_layers_of(self._module) or self._hops or 2
        whole = StoreLayerSource(self.store, list(range(self.store.num_parts)), self._scratch)
        ordered = sample_order(np.flatnonzero(self.store.masks[split]), self.store.original_nid, self.seed)
        work = None
        if self.evaluation.sample == "auto":
            weights = self._weights
            scope, passes = self.scope_under(weights), 1 if weights is None else weights.passes_per_epoch
            options = replace(self.loader_options, passes=passes)
            if (scope != "graph" or self.seed_order == "part") and self._mixes(weights):
                chunks = min(self.interleave_parts, self.store.num_parts)
                options = replace(options, batch_size=-(-options.batch_size // chunks))
            work = epoch_work(self.store, self.sampler, self.halo_hops, scope, options)
        return validation_sample(whole, ordered, num_layers, self.evaluation.sample, work)

    def _batch_shape(self) -> dict[str, Any]:
        seeds = self.loader_options.batch_size * self.sampler.seeds_per_item
        return {
            "batch_size": seeds if self.mode == "mini_batch" else None,
            "fanouts": self.sampler.per_hop,
            "prefetch_batches": self.loader_options.batches_ahead + 1,
            "device_batches": self.device_batches + 1,
            "mixed_parts": self.mixed_parts(self._weights),
            **({} if self._sampled_on == "auto" else {"sampled_on": self._sampled_on}),
            **({"sampled_together": True} if self.scope == "parts" or self.repartition_every else {}),
            **({"samples_whole": True} if self.samples_whole(self._weights) else {}),
            **({"grouped_edge_types": self._grouped_edge_types} if self._grouped_edge_types else {}),
            **({"grouped_weights": True} if self._sampled_by.weighted else {}),
            **self._planned_rows,
        }

    @property
    def _planned_rows(self) -> dict[str, Any]:
        """The arguments of `gs.plan` for placed rows."""
        if self._placed is not None:
            return self._placed.planned_rows
        by_itself = self.rows == RowsSetting() and self.stored_features and self._reads_here
        return {"placed_rows": "auto"} if by_itself else {}

    @property
    def _sampled_by(self) -> BatchSampler:
        """The sampler that samples neighbourhoods, of links too."""
        return self.sampler.sampler or self.sampler

    @property
    def _sampled_on(self) -> str:
        """Where neighbours are sampled if training is on a GPU: "auto", "cpu" or "cuda", see `gs.plan`."""
        return asked_device(self.sampler, isinstance(self.source, Threads))

    @property
    def _grouped_edge_types(self) -> int:
        """Number of edge types by which the sampler groups a part's edges; 0: it does not."""
        if not self._sampled_by.by_edge_type:
            return 0
        return 1 if self.schema is None else self.schema.num_edge_types


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {short(value)}")
