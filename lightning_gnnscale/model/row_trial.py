"""Whether a model computes the same rows on blocks of a graph as on the whole, tried on a small graph before training.

The model is run on a small whole graph, and the inputs and outputs of its layers are recorded. Then it is run on two
blocks of that graph, with the recorded values for rows of the other block. This shows how each convolution must be
called, which rows must be sent, and which layer cannot be computed by blocks.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import StrategyError
from .layer_inputs import as_input, dense_rows, head_rows
from .row_model import COUNTED, OWN, WEIGHTED, HaloEdges, ReadKey, RowGraph, RowModel, RowPass, RowPlan, convolutions

NUM_NODES, CUT = 24, 14  # of the small graph; its second block begins at CUT
LOOKED_AT = 512  # rows of features, and of edge features, among which different ones are looked for
CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
OTHER_ROWS = "it makes other rows on a block of the graph than on the whole"
NORM_REMEDIES = {"LayerNorm": 'LayerNorm(mode="node")'}


class _Differs(Exception):
    """A layer, by name, whose rows on a block are not those on the whole graph, and why: what was seen."""

    def __init__(self, name: str, why: str):
        super().__init__(name)
        self.name, self.why = name, why


def try_out(row_model: RowModel, batch: Any) -> RowPlan:
    """Return how a model is run over blocks, so that it computes what it computes on the whole graph.

    A copy of it is run, without gradient, as it trains and as it is evaluated, on a small graph with features of nodes
    and edges of the batch, a `FullGraphBatch`.

    Raises:
        StrategyError: a layer cannot be computed by blocks, or the model fails; one line with the layer and the remedy.

    Cost: about 2 passes over a graph of 24 nodes for each layer of the model.
    """
    device = batch.n_id.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        return _Trial(row_model, batch).plan()


# What was seen on the whole graph: rows by read, rows into and out of each layer by call, and the model's own.
_Noted = tuple[dict[ReadKey, Tensor], dict[tuple[str, str, int], Tensor], Tensor]


class _Trial:
    def __init__(self, row_model: RowModel, batch: Any):
        try:
            self.model = copy.deepcopy(row_model.backbone).to(batch.n_id.device)
        except Exception as error:
            raise StrategyError(
                f"{type(row_model.backbone).__name__} cannot be copied, to be tried out before training: {_line(error)}"
            ) from error
        self.convs = convolutions(self.model)
        self.whole, self.blocks = _small_graphs(row_model, batch)
        self.candidates = {name: _modes_of(conv) for name, conv in self.convs.items()}

    def plan(self) -> RowPlan:
        for name, conv in self.convs.items():
            if conv.flow != "source_to_target":
                raise StrategyError(
                    f'{self._called(name)} has flow="{conv.flow}", and a process has the edges into its nodes alone: '
                    "write the graph reversed, or train on parts with PartitionDataModule"
                )
        noted = self._run_whole(training=False)
        modes = dict.fromkeys(self.convs, OWN)
        reads = None
        while reads is None:
            try:
                reads = self._run_blocks(noted, modes, training=False)
            except _Differs as found:
                following = self._following(found.name, modes.get(found.name))
                if following is None:
                    raise StrategyError(self._refusal(found.name, found.why)) from None
                modes[found.name] = following
        modes, reads = self._with_fewer_reads(noted, modes, reads)
        return RowPlan(modes, tuple(reads | self._training_reads(modes)))

    def _following(self, conv: str, mode: str | None) -> str | None:
        modes = self.candidates.get(conv, [])
        place = modes.index(mode) + 1 if mode in modes else len(modes)
        return modes[place] if place < len(modes) else None

    def _with_fewer_reads(self, noted: _Noted, modes: dict, reads: dict) -> tuple[dict, dict]:
        """Let convolutions that map the features before they read them map those of the halo too."""
        for name, mode in modes.items():
            before = [key for key in reads if key[0] == name]
            for other in self.candidates[name][1:] if mode == OWN and before else ():
                try:
                    found = self._run_blocks(noted, {**modes, name: other}, training=False)
                except _Differs:
                    continue
                if not any(key[0] == name for key in found):
                    modes, reads = {**modes, name: other}, found
                    break
        return modes, reads

    def _training_reads(self, modes: dict) -> dict[ReadKey, None]:
        """Return what is read while training; warn where rows are then not those of one process."""
        noted = self._run_whole(training=True)
        found: dict[ReadKey, None] = {}
        try:
            return self._run_blocks(noted, modes, training=True, found=found)
        except _Differs as differs:
            if differs.why.startswith("it fails"):
                raise StrategyError(self._refusal(differs.name, differs.why)) from None
            rank_zero_warn(
                f"{self._called(differs.name)} gives other rows while it trains than on one process, as random "
                "sampling does; only dropout of nodes and of attention is the same on any number of processes"
            )
        return self._run_blocks(noted, modes, training=True, strict=False)

    def _run_whole(self, training: bool) -> _Noted:
        reads, rows = {}, {}

        def note(key: ReadKey, own: Tensor, held: Tensor | None) -> None:
            reads[key] = own.clone()

        def keep(name: tuple[str, str, int], seen: Tensor, blamed: str) -> None:
            rows[name] = seen.clone()

        try:
            out = self._run(self.whole, {}, note, training, keep)
        except _Differs as found:
            raise StrategyError(
                f"{self._called(found.name)}: {found.why}, on a small graph of {NUM_NODES} nodes with rows of these "
                "features, which models are tried on before several processes train them"
            ) from None
        if not isinstance(out, Tensor) or out.dim() < 1 or len(out) != NUM_NODES:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise StrategyError(
                f"{type(self.model).__name__} returns {shape} for {NUM_NODES} nodes, not a row for each: it must "
                "not pool or split nodes"
            )
        return reads, rows, out

    def _run_blocks(
        self, noted: _Noted, modes: dict, training: bool, found: dict | None = None, strict: bool = True
    ) -> dict[ReadKey, None]:
        """Return the keys of what blocks read of each other.

        Raises:
            _Differs: `strict`, and a layer gives other rows than on the whole graph; or it fails.
        """
        found = {} if found is None else found
        whole_reads, whole_rows, whole_out = noted
        for graph in self.blocks:
            own, halo = graph.node_ids[: graph.num_own], graph.node_ids[graph.num_own :]

            def fetch(key, rows, held, halo=halo):
                whole = whole_reads.get(key)
                if whole is None:
                    raise StrategyError(f"it reads {key[3]} of other nodes on a block, and not on the whole graph")
                theirs = whole[halo]
                if held is not None and _equal(held, theirs):
                    return None
                found.setdefault(key)
                return torch.cat([rows, theirs.to(rows.dtype)])

            def compare(name, rows, blamed, own=own, num_own=graph.num_own):
                whole = whole_rows.get(name)
                if whole is None or len(whole) != NUM_NODES or not strict:
                    return
                if len(rows) != num_own or not _equal(rows, whole[own]):
                    raise _Differs(blamed, OTHER_ROWS)

            out = self._run(graph, modes, fetch, training, compare)
            if strict and not (isinstance(out, Tensor) and _equal(out, whole_out[own])):
                raise _Differs("", OTHER_ROWS)
        return found

    def _run(self, graph: RowGraph, modes: dict, fetch: Callable, training: bool, look: Callable) -> Any:
        """Run the model.

        Args:
            look: Called with ("in" or "out", layer, call), the rows that the layer takes or gives, and the layer that
                made them; not for layers within convolutions.
        """
        model, begun, calls = self.model.train(training), [], Counter()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()  # its statistics are those of all processes, and tried elsewhere
            for cache in CACHES:
                if getattr(module, cache, None) is not None:
                    setattr(module, cache, None)
        torch.manual_seed(1)
        rows = RowPass(model, graph, modes, fetch)

        def seen(way, name, values, blamed):
            value = values[0] if isinstance(values, tuple) and values else values
            if not rows.depth and isinstance(value, Tensor) and value.dim():
                look((way, name, calls[way, name]), value, blamed)
                calls[way, name] += 1

        def begin(name, module, args):
            seen("in", name, args, begun[-1] if begun else "")
            begun.append(name)

        def end(name, module, args, output):
            begun.pop()
            seen("out", name, output, name)

        handles = []
        with rows:
            for name, module in model.named_modules():
                handles += [
                    module.register_forward_pre_hook(partial(begin, name), prepend=True),  # before it is widened
                    module.register_forward_hook(partial(end, name)),
                ]
            try:
                return model(graph.own, graph.edge_index, **graph.edges)
            except _Differs:
                raise
            except Exception as error:
                within = next((name for name in begun if name in self.convs), begun[-1] if begun else "")
                raise _Differs(within, f"it fails: {_line(error)}") from None
            finally:
                for handle in handles:
                    handle.remove()

    def _called(self, name: str) -> str:
        module = self.model.get_submodule(name)
        return f"{f'backbone.{name}' if name else 'the backbone'} ({type(module).__name__})"

    def _refusal(self, name: str, why: str) -> str:
        module = self.model.get_submodule(name)
        kind, parts = type(module).__name__, "train on parts with PartitionDataModule"
        if name in self.convs:
            inner = [one for one, part in module.named_modules() if isinstance(part, _BatchNorm)]
            norm = f", and keep BatchNorm ({name}.{inner[0]}) out of it" if inner else ""
            remedy = f"let it read other nodes, but for their in-degrees, in propagate alone, as x_j{norm}, or {parts}"
        elif "norm" in kind.lower():
            other = NORM_REMEDIES.get(kind, "BatchNorm or torch.nn.LayerNorm")
            remedy = f"use {other}, or {parts}"
        else:
            remedy = f"only in MessagePassing layers may nodes be read by others: put it into one, or {parts}"
        return f"{self._called(name)} cannot be computed by blocks: {why}; {remedy}"


def _modes_of(conv: nn.Module) -> list[str]:
    """Return how a convolution may be called, the plainest first."""
    if any(isinstance(module, _BatchNorm) for module in conv.modules()):
        return [OWN]  # in the others rows that are made up would be in its statistics
    takes_weight = "edge_weight" in inspect.signature(conv.forward).parameters
    return [OWN, *([WEIGHTED] if takes_weight else []), COUNTED]


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether values are the same but for the order of sums."""
    if one.shape != two.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, two)
    finite = two[two.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    allowed = 1e3 * torch.finfo(one.dtype).eps * max(scale, torch.finfo(one.dtype).tiny)
    return torch.allclose(one, two.to(one.dtype), rtol=0, atol=allowed, equal_nan=True)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _small_graphs(row_model: RowModel, batch: Any) -> tuple[RowGraph, list[RowGraph]]:
    """Return a small graph of the kind of a given one, whole and in two blocks."""
    device, dtype = batch.n_id.device, next(row_model.backbone.parameters(), torch.empty(0)).dtype
    stored = batch.x_dense if batch.x_csr is None else batch.x_csr
    rows = head_rows(as_input(stored, torch.empty(0, dtype=dtype, device=device)), min(batch.batch_size, LOOKED_AT))
    sampled = row_model.edges(batch, dtype, LOOKED_AT)
    symmetric = batch.symmetric and batch.edge_weight is None
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, NUM_NODES - 1, (2, 40))  # the last node has no edges
    hub = np.arange(0, NUM_NODES - 1, 2)  # a node of the second block has the most in-edges
    source, target = np.append(source, hub), np.append(target, np.full(len(hub), CUT + 3))
    kept = source != target
    directed_edges = np.stack([source[kept], target[kept]])
    directed_edges = np.concatenate([directed_edges, directed_edges[::-1]], axis=1) if symmetric else directed_edges
    loops = np.array([[1, CUT + 1]] * 2)
    directed_edges = np.unique(np.concatenate([directed_edges, loops], axis=1), axis=1)
    directed_edges = directed_edges[:, np.lexsort((directed_edges[0], directed_edges[1]))]
    edges = {
        name: _sample(value, directed_edges.shape[1], positive=name == "edge_weight") for name, value in sampled.items()
    }
    x, edge_index = _sample(dense_rows(rows), NUM_NODES), torch.from_numpy(directed_edges).to(device)
    whole = RowGraph(x, edge_index, NUM_NODES, torch.arange(NUM_NODES, device=device), edges, symmetric, _nothing)
    return whole, [_block(whole, begin, end) for begin, end in ((0, CUT), (CUT, NUM_NODES))]


def _nothing() -> HaloEdges:
    raise AssertionError("the whole graph has no halo")


def _block(whole: RowGraph, begin: int, end: int) -> RowGraph:
    """Return the block of the nodes in [begin, end)."""
    x, edges, weighted = whole.x, whole.edges, "edge_weight" in whole.edges
    source, target = whole.edge_index
    chosen = (target >= begin) & (target < end)
    outside = torch.unique(source[chosen])
    halo = outside[(outside < begin) | (outside >= end)]
    nodes = torch.cat([torch.arange(begin, end, device=x.device), halo])
    local = torch.full((NUM_NODES,), -1, device=x.device)
    local[nodes] = torch.arange(len(nodes), device=x.device)
    loops = source == target
    place = {int(node): position for position, node in enumerate(halo)}
    of_halo = loops & torch.isin(target, halo)
    weight = edges.get("edge_weight", torch.ones_like(source, dtype=x.dtype)).double()
    rest = torch.zeros(NUM_NODES, dtype=torch.float64, device=x.device)
    rest.index_add_(0, target[~loops], weight[~loops])
    directed_edges = HaloEdges(
        loops=torch.tensor([place[int(node)] for node in target[of_halo]], dtype=torch.int64, device=x.device),
        loop_weight=weight[of_halo] if weighted else None,
        counts=torch.bincount(target[~loops], minlength=NUM_NODES)[halo],
        weights=rest[halo] if weighted else None,
        max_degree=int(torch.bincount(target).max()),
    )
    return RowGraph(
        x=x[nodes],
        edge_index=local[whole.edge_index[:, chosen]],
        num_own=end - begin,
        node_ids=nodes,
        edges={name: value[chosen] for name, value in edges.items()},
        symmetric=whole.symmetric,
        read_halo_edges=lambda: directed_edges,
    )


def _sample(rows: Tensor, count: int, positive: bool = False) -> Tensor:
    """Return (count, ...) of the rows, different ones where there are; floats are moved a bit, so that none are equal.

    The added values are in [0, 1/4): whole numbers keep their integer part.
    """
    if positive:
        return torch.rand(count, dtype=rows.dtype, device=rows.device) + 0.5
    if len(rows):
        rows = torch.unique(rows, dim=0)
        rows = rows[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]
    else:
        rows = rows.new_zeros((count, *rows.shape[1:]))
    return rows + torch.rand(rows.shape, dtype=rows.dtype, device=rows.device) / 4 if rows.is_floating_point() else rows
