"""What this package reads of objects that users may write themselves, each with the value that stands for absence.

A trait is read by name in one place, here: `BackboneTraits(backbone).num_layers` is the backbone's own, or None. A name
that no trait declares is an `AttributeError`, so that a misspelt one is found where it is written.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ANY = "any"  # of `edge_dim`: an object that does not say takes what there is


class Traits:
    """A view of an object, or of None: what it has of the attributes of this class, and their defaults for the rest."""

    def __init__(self, own: Any):
        self._own = own

    def __getattribute__(self, name: str) -> Any:
        declared = object.__getattribute__(self, name)
        return declared if name.startswith("_") else getattr(self._own, name, declared)


def arguments_of(called: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a module's `forward`, or of a function."""
    return inspect.signature(BackboneTraits(called).forward or called).parameters


def named_by(backbone: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of some arguments a module's `forward` names: all, if it takes any keyword."""
    parameters = inspect.signature(backbone.forward).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names
    return tuple(name for name in names if name in parameters)


class BackboneTraits(Traits):
    """Of a backbone: a `Backbone`, a model of PyG, or any module called as (x, edge_index).

    Attributes:
        num_layers: Layers, one a hop; None: unknown.
        in_channels, out_channels: Columns that it reads, of all node types alike, and that it gives; None: unknown.
        hidden_channels: Columns between its layers; None: unknown.
        type_channels: Columns that it reads by node type number; None: of all alike.
        edge_dim: Columns of the edge features that it reads; None: it reads none.
        time_channels: Columns that encode times of edges; None: it reads none.
        takes_negative_weights: Whether edge weights below 0 mean something to it.
        averages: Whether it averages over neighbours, so that weights 1 / degree are the plain ones.
        accepts_sparse: Whether `x` may be sparse rows.
        reads_edge_types: Whether it reads node types and edge types.
        supports_edge_weight, supports_edge_attr: Whether it uses what its `forward` names so; models of PyG tell.
        forward_rows: Runs it over the rows of one process on the full graph; None: `RowModel` does.
        layer: Computes one layer of a block; None: it is evaluated on sampled batches alone.
        forward: What is called; None: the object itself is a function.
        requires: What the graph must have, as `BatchSampler.requires`.
    """

    num_layers = in_channels = out_channels = hidden_channels = type_channels = time_channels = None
    edge_dim: Any = ANY
    takes_negative_weights = averages = True
    accepts_sparse = reads_edge_types = False
    supports_edge_weight = supports_edge_attr = True
    forward_rows = layer = forward = None
    requires: Mapping[str, str] = MappingProxyType({})


class ModuleTraits(Traits):
    """Of a LightningModule.

    Attributes:
        backbone: What it trains. inputs: Rows by node that it reads beside the features (`NodeInputs`).
        multilabel: Whether a node has several classes; None: it predicts no classes of nodes.
        num_classes: Classes; None: unknown.
        num_targets: Numbers that it predicts for a node; None: it predicts no numbers.
        predicts_edges: Whether it predicts classes of edges. trains_on_links: Whether its batches are links; of a
            sampler's class, whether it samples such.
        reads_edge_features: Whether it reads edge features; None: unknown, and not compared.
        check_edge_types: Refuses edge types that it does not read; None: nothing is refused.
        requires: What the graph must have, as `BatchSampler.requires`.
        row_model: Runs PyG's layers over rows of the full graph (`RowModel`).
        make_optimizer: Makes the optimizer of some parameters.
        backbone_settings: How the backbone was made; the command line sets it where it is declared.
        write_predictions: Takes predicted rows; `PredictionWriter` sets it where it is declared.
        save_inputs: Writes learned rows beside a checkpoint.
        on_step_begin: Takes the batches of a step, none where there is no batch, before any is computed.
    """

    backbone = inputs = multilabel = num_classes = num_targets = reads_edge_features = row_model = None
    predicts_edges = trains_on_links = False
    check_edge_types = make_optimizer = save_inputs = on_step_begin = None
    backbone_settings: Any = ANY
    write_predictions: Any = ANY
    requires: Mapping[str, str] = MappingProxyType({})


class InputsTraits(Traits):
    """Of rows by node, beside what `NodeInputs` asks of all.

    Attributes:
        dim: Columns of a row; 0 without inputs.
        node_types: `NodeTypesWithRows`; None: every node has a row.
        num_pushes: Gradients that have arrived; loaded: whether rows were read from a checkpoint.
        save, load: Write and read learned rows; None: they are not learned.
        files_read: Names of the files that `load` reads; None: it opens what it needs itself.
        settle: Waits for gradients under way; None: none ever are.
        end_pulls: Serves ranks that still ask for rows outside of steps; None: no call waits for another rank.
        begin, announce: Take the nodes of a step, and of a coming one; None: each call asks for its own rows.
        batches_ahead: How many batches ahead `announce` is worth while.
        exact: Whether the rows do not depend on the number of processes; told: counts for the log.
    """

    dim = batches_ahead = 0
    node_types = save = load = files_read = settle = end_pulls = begin = announce = told = None
    exact = False
    num_pushes = 1
    loaded = True


class DecoderTraits(Traits):
    """Of a decoder of links.

    Attributes:
        penalty: Norm of the rows of a link, for a penalty. pairwise: Whether a link's score is a sum over columns.
        against: Scores ends against all nodes at once. forward: What is called.
    """

    penalty = against = forward = None
    pairwise = True


class StreamTraits(Traits):
    """Of a stream of edges.

    Attributes:
        node_ids: The user's ids by node number (`NodeIds`); None: nodes are numbers. schema: Node types and edge types;
            None: one of each.
        source_files: Returns the files that it reads.
    """

    node_ids = schema = None
    source_files = staticmethod(tuple)


class PartitioningTraits(Traits):
    """Of a partitioning, beside its `part_id` and `num_parts`: how it came about.

    Attributes:
        seed, method, options: Of the partitioner. quality: `Quality`, where it was measured.
        edge_files: State of the files of the edges when they were read.
    """

    seed = 0
    method = "given"
    options = quality = None
    edge_files = ()


class DataTraits(Traits):
    """Of a DataModule.

    Attributes:
        store: Partition store. trains_full_graph: Whether it gives the full graph, and not parts.
        blocks: Blocks of the full graph, once it is set up; None: it gives parts.
        scope: Whether neighbours are those of a part or of the graph; None: it gives the full graph.
        num_features: Columns of the one table of features. feature_dims: Columns by node type. schema: Node types and
            edge types; None: one of each.
        rank_of_part: Rank that trains most targets of each part.
        check_processes: Refuses numbers of processes that it cannot serve.
        shares_by_process: Why a process cannot train the batches of several ranks; None: it can.
        sampler: Sampler of training. set_locality_scale, loading_share: What `LocalityControl` turns, and reads.
    """

    store = blocks = scope = feature_dims = schema = rank_of_part = check_processes = None
    num_features = 0
    trains_full_graph = False
    shares_by_process: str | None = "its data are shared out to processes, which PartitionDataModule does by rank"
    sampler = set_locality_scale = loading_share = None


class StrategyTraits(Traits):
    """Of a strategy.

    Attributes:
        weights, exchange: Policies of `GNNScaleStrategy`; None under another strategy.
        logical_ranks: Ranks by which batches are shared out; None: as many as processes.
        parallel_devices: Devices of the processes here; None: one.
        start_method: How processes are started.
    """

    weights = exchange = parallel_devices = logical_ranks = None
    start_method = "popen"


class CheckpointTraits(Traits):
    """Of a checkpoint callback of Lightning: the metric that it keeps the best of, and where."""

    dirpath = monitor = save_last = None
    mode = "max"
    save_on_exception = False


class LoaderTraits(Traits):
    """Of a loader: announce_steps tells of each step before it is yielded, see `PartLoader`; None: it does not."""

    announce_steps = None


ASKING_THREADS = 4  # where no number is given: a thread waits for rows of other machines most of the time


class SourceTraits(Traits):
    """Of a source of batches.

    Attributes:
        connect: Makes what prepares batches; settings of a source have it. asking: Settings whose workers ask the
            owners of rows.
        owners: Whom its workers ask for rows; None: nobody.
        machine_bytes: Bytes of parts that the workers of a machine hold at most; None: no cap.
        num_threads: Threads that sample.
        batches_ahead, parts_further: Batches, and parts, that it holds beyond what the loader has asked for.
    """

    connect = asking = owners = machine_bytes = None
    num_threads = 1
    batches_ahead = parts_further = 0
