"""Any PyG model over the rows of one process: what its convolutions read of other nodes comes through exchanges.

The model is run as it is, on the rows that the process owns. Where a convolution reads values along edges, in
`propagate` or `edge_updater`, the rows of the halo are put behind the own ones. A convolution that looks at nodes
outside of these, as GCN does for its normalisation, is given own and halo rows, and edges that give the halo its
degrees in the full graph.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import StrategyError
from ..traits import named_by
from .dropout import RowDropout, mix64
from .row_layers import RowLayer, SentRows

EDGE_ARGUMENTS = ("edge_weight", "edge_attr")
# How a convolution is called: on its own rows; or on own and halo rows, where the degrees of the halo are made up by
# one edge with a weight, or by as many edges as are missing.
OWN, WEIGHTED, COUNTED = "own", "weighted", "counted"
NUM_GHOSTS = 2  # nodes that edges come from and go to which belong to no node of the block
ReadKey = tuple[str, int, int, str]  # convolution, its call in the pass, its propagation in the call, the argument


@dataclass(frozen=True)
class HaloEdges:
    """The in-edges of the nodes of a halo, as far as degrees need them.

    Attributes:
        loops: (num_loops,) int64, the position in the halo of each self-loop there.
        loop_weight: (num_loops,) float32, or None.
        counts: (num_halo,) int64, in-edges that are no self-loops.
        weights: (num_halo,) float64, the sums of their weights, or None.
        max_degree: The largest number of in-edges of any node of the full graph.
    """

    loops: Tensor
    loop_weight: Tensor | None
    counts: Tensor
    weights: Tensor | None
    max_degree: int


@dataclass(frozen=True)
class RowGraph:
    """The rows of one process as a model is given them: own nodes first, then the halo.

    Attributes:
        x: (num_own + num_halo, width) features, of the dtype of the model.
        edge_index: (2, num_edges) int64; targets are own nodes, ascending.
        num_own: Number of own nodes.
        node_ids: (num_own + num_halo,) int64; a node has the same number on every process.
        edges: The arguments of `EDGE_ARGUMENTS` that the model takes and the graph has, a row for each edge.
        symmetric: Whether every edge of the graph has its reverse, and none has a weight.
        read_halo_edges: Returns the `HaloEdges`; called once, where a convolution needs the degrees of the halo.
    """

    x: Tensor
    edge_index: Tensor
    num_own: int
    node_ids: Tensor
    edges: dict[str, Tensor]
    symmetric: bool
    read_halo_edges: Callable[[], HaloEdges]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def num_halo(self) -> int:
        return len(self.x) - self.num_own

    @cached_property
    def own(self) -> Tensor:
        """(num_own, width) features of the own nodes: the input of the model."""
        return self.x[: self.num_own]

    @cached_property
    def square_x(self) -> Tensor:
        """(num_own + num_halo + NUM_GHOSTS, width) features."""
        return torch.cat([self.x, padding(self.x, NUM_GHOSTS)])

    @cached_property
    def square_ids(self) -> Tensor:
        """(num_own + num_halo + NUM_GHOSTS,) int64 numbers of the nodes; those of the ghosts are below 0."""
        return torch.cat([self.node_ids, -1 - torch.arange(NUM_GHOSTS, device=self.node_ids.device)])

    @cached_property
    def halo_edges(self) -> HaloEdges:
        return self.read_halo_edges()

    def completing(self, mode: str) -> tuple[Tensor, Tensor | None]:
        """Return edges that give own and halo nodes their degrees in the full graph: (2, num) and (num,) weights.

        In-degrees are those of the full graph; under WEIGHTED, in a symmetric graph, out-degrees too. Under COUNTED
        there are no weights, and a ghost has as many in-edges as the node of the full graph that has most: an
        aggregation that pads rows to the longest pads them alike on every process.
        """
        if mode not in self.kept:
            self.kept[mode] = self._counted() if mode == COUNTED else self._weighted()
        return self.kept[mode]

    def _weighted(self) -> tuple[Tensor, Tensor]:
        edges, halo = self.halo_edges, self._halo
        sink, source = len(self.x), len(self.x) + 1
        rest = (edges.counts if edges.weights is None else edges.weights).double()
        loops = self.num_own + edges.loops
        loop_weight = torch.ones_like(loops).double() if edges.loop_weight is None else edges.loop_weight.double()
        chunks = [(loops, loops, loop_weight), (torch.full_like(halo, source), halo, rest)]
        if self.symmetric:
            crosses = self.edge_index[:, self.edge_index[0] >= self.num_own]
            read = torch.bincount(crosses.flatten(), minlength=len(self.x))
            missing = torch.cat([read[: self.num_own], edges.counts - read[self.num_own :]])
            nodes = torch.arange(len(self.x), device=halo.device)
            chunks.append((nodes, torch.full_like(nodes, sink), missing.double()))
        edge_index = torch.stack([torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])])
        weight = torch.cat([chunk[2] for chunk in chunks])
        return edge_index[:, weight != 0], weight[weight != 0]

    def _counted(self) -> tuple[Tensor, None]:
        edges, halo = self.halo_edges, self._halo
        sink, source = len(self.x), len(self.x) + 1
        loops = self.num_own + edges.loops
        into = torch.cat([loops, halo.repeat_interleave(edges.counts), halo.new_full((edges.max_degree,), sink)])
        out_of = torch.cat([loops, halo.new_full((len(into) - len(loops),), source)])
        order = torch.sort(into, stable=True).indices
        return torch.stack([out_of[order], into[order]]), None

    @property
    def _halo(self) -> Tensor:
        return torch.arange(self.num_own, len(self.x), device=self.x.device)


def padding(rows: Tensor, count: int) -> Tensor:
    """Return (count, ...) placeholder rows: copies of the first row, which any function takes."""
    first = rows[:1].detach() if len(rows) else rows.new_ones((1, *rows.shape[1:]))
    return first.expand(count, *rows.shape[1:])


@dataclass(frozen=True)
class RowPlan:
    """The result of trying a model out.

    Attributes:
        modes: Maps the name of a convolution to how it is called; OWN where it is not named.
        reads: The rows that come from other processes, in the order of the forward pass.
    """

    modes: dict[str, str]
    reads: tuple[ReadKey, ...]


def uncompiled(backbone: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped, which cannot be looked into; another one as it is."""
    return getattr(backbone, "_orig_mod", backbone)


class RowModel:
    """Runs a model of `MessagePassing` layers over the rows of one process.

    Args:
        backbone: Any module called as (x, edge_index), with those of `EDGE_ARGUMENTS` that its `forward` names.
    """

    def __init__(self, backbone: nn.Module):
        self.backbone = uncompiled(backbone)
        self.plan: RowPlan | None = None
        self.readers: dict[ReadKey, RowLayer] = {}

    @property
    def can_exchange(self) -> bool:
        """Whether the model has a layer whose rows can be exchanged."""
        return bool(convolutions(self.backbone))

    @property
    def layers(self) -> list[RowLayer]:
        """What the strategy gives exchanges to: the input, whose rows are at hand, then each row that is read."""
        return [RowLayer(), *self.readers.values()]

    def adopt(self, plan: RowPlan | None) -> None:
        """Take a plan, the same on every process; None: one process has all rows."""
        self.plan = plan
        self.readers = {key: RowLayer() for key in plan.reads} if plan is not None else {}

    @property
    def local_only(self) -> bool:
        """Whether training leaves out edges from other processes."""
        return any(reader.exchange.local_only for reader in self.readers.values())

    def graph(self, batch: Any, local_only: bool = False) -> RowGraph:
        """Return the rows of a `FullGraphBatch`, without the halo if local_only; made once, kept in `batch.memo`."""
        name, reference = ("row model", local_only), next(self.backbone.parameters(), batch.x)
        kept = batch.memo.get(name)
        if kept is not None and kept[0] is self and kept[1].x.dtype == reference.dtype:
            return kept[1]
        num_own, sources = batch.batch_size, batch.indices.long()
        rows = torch.arange(num_own, device=sources.device)
        targets = torch.repeat_interleave(rows, batch.indptr.diff(), output_size=len(sources))
        edges = self.edges(batch, reference.dtype)
        chosen = sources < num_own if local_only else slice(None)
        graph = RowGraph(
            x=(batch.x[:num_own] if local_only else batch.x).to(reference.dtype),
            edge_index=torch.stack([sources, targets])[:, chosen],
            num_own=num_own,
            node_ids=batch.n_id[:num_own] if local_only else batch.n_id,
            edges={name: value[chosen] for name, value in edges.items()},
            symmetric=batch.symmetric and batch.edge_weight is None,
            read_halo_edges=lambda: _halo_edges(batch),
        )
        batch.memo[name] = self, graph
        return graph

    def edges(self, batch: Any, dtype: torch.dtype, most: int | None = None) -> dict[str, Tensor]:
        """Return what the model takes of `EDGE_ARGUMENTS` and the graph has, (num_edges, ...) in floats of a dtype.

        most: Edges that are enough; None: all. StrategyError: the graph has edge weights that it does not take.
        """
        accepted = named_by(self.backbone, EDGE_ARGUMENTS)
        name = type(self.backbone).__name__
        if batch.edge_weight is not None and "edge_weight" not in accepted:
            raise StrategyError(
                f"{name}.forward takes no edge_weight, but the graph has edge weights: let forward take edge_weight, "
                "or write the store without"
            )
        found = {} if batch.edge_weight is None else {"edge_weight": batch.edge_weight[:most].to(dtype)}
        if batch.has_edge_attr and "edge_attr" not in accepted:
            rank_zero_warn(f"the store has edge features, and {name}.forward takes no edge_attr: they are not read")
        elif batch.has_edge_attr:
            rows = batch.read_edge_attr(most)
            found["edge_attr"] = rows.to(dtype) if rows.is_floating_point() else rows
        return found

    def __call__(self, batch: Any, training: bool) -> Tensor:
        """Return the (num_own, out_channels) outputs for a full-graph batch."""
        local_only = training and self.local_only
        graph = self.graph(batch, local_only)
        plan = None if local_only else self.plan
        fetch = None if plan is None else partial(self._fetch, training)
        with RowPass(self.backbone, graph, plan.modes if plan else {}, fetch):
            return self.backbone(graph.own, graph.edge_index, **graph.edges)

    def _fetch(self, training: bool, key: ReadKey, own: Tensor, held: Tensor | None) -> Tensor | None:
        """Return (num_own + num_halo, width) rows, those of the halo from their owners; None: they are held already."""
        reader = self.readers.get(key)
        if reader is not None:
            if not own.is_floating_point():
                raise StrategyError(f"{key[0] or 'the model'} reads {own.dtype} {key[3]} of other nodes: make it float")
            sent = SentRows(own, reader.exchange, training)
            return torch.cat([sent.rows, sent.halo()])
        if held is not None:
            return None
        raise StrategyError(
            f"{key[0] or 'the model'} reads {key[3]} of other nodes in a call that was not there when the model was "
            "tried out: forward must call the same convolutions each time"
        )


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's `MessagePassing` layers by name, each once."""
    from torch_geometric.nn import MessagePassing

    return {name: module for name, module in model.named_modules() if isinstance(module, MessagePassing)}


def _halo_edges(batch: Any) -> HaloEdges:
    """Return the store's figures of the halo's edges, on the device of the batch."""
    told = batch.halo_in_edges()
    values = (None if value is None else torch.as_tensor(value).to(batch.n_id.device) for value in told[:-1])
    return HaloEdges(*values, max_degree=told[-1])


class RowPass:
    """One forward pass of a model over a block of rows; within it, its convolutions read rows of the halo.

    Args:
        backbone: The model.
        graph: The block.
        modes: How convolutions are called, see `RowPlan`.
        fetch: Called as (key, own rows, held rows of the halo or None); returns own and halo rows, or None where those
            that are held are right. None: there is no halo.

    Attributes:
        depth: Number of convolutions that have begun and not ended.
    """

    def __init__(
        self,
        backbone: nn.Module,
        graph: RowGraph,
        modes: dict[str, str],
        fetch: Callable[[ReadKey, Tensor, Tensor | None], Tensor | None] | None,
    ):
        self.backbone, self.graph, self.modes, self.fetch = backbone, graph, modes, fetch
        self.depth, self.edges = 0, graph.edge_index
        self._calls: Counter = Counter()
        self._call, self._mode, self._reads = ("", 0), OWN, 0
        self._memo: dict[int, tuple[Tensor, Tensor]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "RowPass":
        self._stack.enter_context(_KeyedDropout(self))
        for name, conv in convolutions(self.backbone).items():
            for handle in (
                conv.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True),
                conv.register_forward_hook(self._end),
            ):
                self._stack.callback(handle.remove)
            self._stack.enter_context(_replaced(conv, "propagate", ("message", "aggregate", "update"), self._read))
            self._stack.enter_context(_replaced(conv, "edge_updater", ("edge_update",), self._read))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def ids_of(self, num_rows: int) -> Tensor | None:
        """Return the (num_rows,) numbers of the nodes or edges that so many rows stand for; None: neither."""
        graph = self.graph
        if num_rows == graph.num_own:
            return graph.node_ids[:num_rows]
        if num_rows == len(graph.square_ids) and self._mode != OWN:
            return graph.square_ids
        if num_rows == self.edges.shape[1]:
            return mix64(graph.square_ids)[self.edges[1]] + graph.square_ids[self.edges[0]]
        return None

    def _begin(self, name: str, conv: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self.depth += 1
        if self.depth > 1:  # the outermost convolution decides
            return None
        self._enter_call(name, self.modes.get(name, OWN))
        return None if self._mode == OWN else self._squared(conv, args, kwargs)

    def _enter_call(self, name: str, mode: str) -> None:
        self._call, self._mode, self._reads = (name, self._calls[name]), mode, 0
        self._calls[name] += 1
        self._memo.clear()

    def _end(self, conv: nn.Module, args: tuple, output: Any) -> Any:
        self.depth -= 1
        if self.depth:
            return None
        squared, self._mode, self.edges = self._mode != OWN, OWN, self.graph.edge_index
        self._memo.clear()
        return _each_tensor(output, self._own_rows) if squared else None

    def _own_rows(self, value: Tensor) -> Tensor:
        return value[: self.graph.num_own] if value.dim() and len(value) == len(self.graph.square_ids) else value

    def _squared(self, conv: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return a convolution's arguments over own, halo and ghost nodes, with the edges that complete degrees."""
        graph, bound = self.graph, inspect.signature(conv.forward).bind(*args, **kwargs)
        given = bound.arguments.get("edge_index")
        if not isinstance(given, Tensor) or given.is_sparse or given.shape[:1] != (2,):
            raise StrategyError("its edge_index is no (2, num_edges) tensor")
        extra, weight = graph.completing(self._mode)
        num_edges, missing = given.shape[1], len(graph.square_ids) - graph.num_own

        def widened(value: Tensor, of_edges: bool) -> Tensor:
            if value is graph.own:
                return graph.square_x
            if not of_edges and value.dim() and len(value) == graph.num_own:
                return torch.cat([value, padding(value, missing)])
            if value.dim() and len(value) == num_edges:
                return torch.cat([value, value.new_zeros((extra.shape[1], *value.shape[1:]))])
            return value

        for name, value in bound.arguments.items():
            bound.arguments[name] = _each_tensor(value, partial(widened, of_edges=name.startswith("edge_")))
        bound.arguments["edge_index"] = torch.cat([given, extra], dim=1)
        if weight is not None:
            own = bound.arguments.get("edge_weight")
            dtype = graph.x.dtype if own is None else own.dtype
            own = graph.x.new_ones(num_edges) if own is None else own[:num_edges]
            bound.arguments["edge_weight"] = torch.cat([own, weight.to(dtype)])
        return bound.args, bound.kwargs

    def _read(self, conv: nn.Module, names: list[str], plain: Callable, edge_index: Any, *args: Any, **kwargs: Any):
        """Call `propagate` or `edge_updater` with the rows of the halo behind what it reads along edges."""
        if args or not isinstance(edge_index, Tensor) or edge_index.is_sparse:
            raise StrategyError("it calls propagate otherwise than as (edge_index, name=value, ...)")
        if not self.depth:  # called by the model itself
            self._enter_call("", OWN)
        self.edges = edge_index
        source = 0 if conv.flow == "source_to_target" else 1
        key = (*self._call, self._reads)
        self._reads += 1
        widest = None
        for name in names:
            value = kwargs.get(name)
            pair = isinstance(value, tuple | list)
            rows = value[source] if pair else value
            if not isinstance(rows, Tensor):
                continue
            full = self._with_halo((*key, name), rows, conv.node_dim)
            if full is rows:
                continue
            if self._mode != OWN and not pair:
                kwargs[name] = full
                continue
            both = [full, value[1 - source] if pair else value]
            kwargs[name] = tuple(both if source == 0 else both[::-1])
            widest = full.shape[conv.node_dim] if self._mode == OWN else widest
        if widest is not None and kwargs.get("size") is not None:
            kwargs["size"] = (widest, self.graph.num_own)
        return plain(edge_index, **kwargs)

    def _with_halo(self, key: ReadKey, value: Tensor, node_dim: int) -> Tensor:
        """Return a tensor with the rows of the halo in their place, or itself where it has none or they are there."""
        graph, own = self.graph, self._mode == OWN
        count = graph.num_own if own else len(graph.square_ids)
        if self.fetch is None or value.dim() < max(1, -node_dim) or value.shape[node_dim] != count:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        moved = value.movedim(node_dim, 0)
        rows = moved.reshape(count, prod(moved.shape[1:]))
        held = rows[graph.num_own : len(graph.x)]
        if own:
            held = graph.x[graph.num_own :] if value is graph.own else None
        full = self.fetch(key, rows[: graph.num_own], held)
        if full is None:
            full = graph.x if own and value is graph.own else value
        else:
            full = torch.cat([full, rows[len(graph.x) :]]) if not own else full
            full = full.reshape(len(full), *moved.shape[1:]).movedim(0, node_dim)
        self._memo[id(value)] = value, full  # the tensor itself too, so that no other gets its id
        return full


@contextmanager
def _replaced(conv: nn.Module, name: str, functions: tuple[str, ...], read: Callable) -> Iterator[None]:
    """Let a method of a convolution call `read` first, and give it back as it was."""
    inspected = conv.inspector.get_flat_param_names(list(functions), exclude=list(conv.special_args))
    names = sorted({one[:-2] for one in inspected if one.endswith("_j")})
    before, plain = vars(conv).get(name), getattr(conv, name)
    object.__setattr__(conv, name, partial(read, conv, names, plain))
    try:
        yield
    finally:
        object.__delattr__(conv, name)
        if before is not None:
            object.__setattr__(conv, name, before)


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_each_tensor(one, change) for one in value)
    return value


class _KeyedDropout(TorchFunctionMode):
    """Within it, `dropout` drops the same values of a node or an edge on any number of processes.

    Args:
        rows: Tells the numbers of nodes and edges; values of neither are dropped as ever.
    """

    def __init__(self, rows: RowPass):
        super().__init__()
        self._rows = rows

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.dropout:
            return function(*args, **(kwargs or {}))
        return self._drop(function, *args, **(kwargs or {}))

    def _drop(self, function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        ids = self._rows.ids_of(len(input)) if training and 0 < p < 1 and input.dim() else None
        if ids is None:
            return function(input, p, training, inplace)
        return RowDropout.sample(p, True)(input.reshape(len(input), prod(input.shape[1:])), ids).reshape(input.shape)
