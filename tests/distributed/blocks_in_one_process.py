"""The oracle of full-graph training: a GCN in one process, over dense edges, with a replica of its weights a block."""

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.partition_store.block_rows import load_block_rows


@dataclass
class Graph:
    """What a store holds, dense.

    Attributes:
        edges: (num_nodes, num_nodes) float64, edges[v, u] the number of edges u -> v.
        x, y, train: features, labels, and which nodes the loss goes over.
        offsets: rank r owns the nodes in [offsets[r], offsets[r + 1]).
    """

    edges: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    train: torch.Tensor
    offsets: list

    @property
    def ranks(self):
        return range(len(self.offsets) - 1)

    @property
    def owner(self):
        """(num_nodes,) the rank of each node."""
        return torch.bucketize(torch.arange(len(self.y)), torch.tensor(self.offsets[1:]), right=True)

    @property
    def crossing(self):
        """(num_nodes, num_nodes) whether two nodes have different owners."""
        return self.owner[:, None] != self.owner[None, :]

    @property
    def boundary(self):
        """(num_nodes,) whether another rank reads the node's rows."""
        return (self.crossing & (self.edges > 0)).any(dim=0)

    def normalized(self, crossing=True):
        """Return the edges with self-loops as GCN weighs them; without those between ranks, by what is left."""
        edges = self.edges if crossing else self.edges * ~self.crossing
        edges = edges.clone().fill_diagonal_(1)  # a loop of the graph replaces the one that GCN adds
        root = edges.sum(dim=1).rsqrt()
        return root[:, None] * edges * root


def read_graph(root, world_size):
    store = PartitionStore.open(root)
    rows = load_block_rows(store, 0, 1)
    target = torch.repeat_interleave(torch.arange(store.num_nodes), torch.from_numpy(rows.csc.indptr).diff())
    edges = torch.zeros(store.num_nodes, store.num_nodes, dtype=torch.float64)
    edges.index_put_((target, torch.from_numpy(rows.csc.indices).long()), torch.ones(()).double(), accumulate=True)
    return Graph(
        edges,
        torch.from_numpy(store.features.read(rows.nodes)).double(),
        torch.from_numpy(store.labels[:].astype("int64")),
        torch.from_numpy(store.masks["train"][:].copy()),
        load_block_rows(store, 0, world_size).offsets.tolist(),
    )


@dataclass
class Held:
    """Rows of one layer as the others last got them.

    Attributes:
        due: (epoch, fresh rows, what is held) -> (num_nodes,) bool: which rows are sent.
        extrapolate: what is held goes on along its last change.
    """

    due: object
    extrapolate: bool = False
    sent: list = field(default_factory=list)  # (epoch, rows sent then) of each node
    flags: list = field(default_factory=list)  # what was sent in each epoch

    def read(self, epoch, fresh):
        """Return what the others read of the rows in an epoch."""
        self.sent = self.sent or [[] for _ in fresh]
        flags = self.due(epoch, fresh, torch.stack([self._row(v, epoch, fresh) for v in range(len(fresh))]))
        for v in flags.nonzero().flatten().tolist():
            self.sent[v].append((epoch, fresh[v]))
        self.flags.append(flags)
        return torch.stack([self._row(v, epoch, fresh) for v in range(len(fresh))])

    def _row(self, v, epoch, fresh):
        if not self.sent[v]:
            return torch.zeros_like(fresh[v])
        last, row = self.sent[v][-1]
        if not self.extrapolate or len(self.sent[v]) == 1:
            return row
        before, earlier = self.sent[v][-2]
        return row + (row - earlier) / (last - before) * (epoch - last)


@dataclass
class Flow:
    """Gradients that one rank sends back in one layer: as they are, unless said otherwise; exactly in epoch 0.

    Attributes:
        due: (epoch, gradient, what was sent last) -> whether it is sent; None: always.
        late: what came in the epoch before is added.
        largest: norm that it is clipped to.
    """

    due: object = None
    late: bool = False
    largest: float = float("inf")
    sent: object = None
    before: object = None

    def __call__(self, epoch, grad):
        if epoch > 0 and grad.norm() > self.largest:
            grad = grad * (self.largest / grad.norm())
        if self.due is None or self.due(epoch, grad, torch.zeros_like(grad) if self.sent is None else self.sent):
            self.sent = grad
        before, self.before = self.before, self.sent
        return before if self.late and epoch > 0 else self.sent


class _Remote(torch.autograd.Function):
    """Zeros, through which the gradient of rows of other ranks flows back."""

    @staticmethod
    def forward(ctx, h, flow, epoch):
        ctx.flow, ctx.epoch = flow, epoch
        return torch.zeros_like(h)

    @staticmethod
    def backward(ctx, grad):
        return ctx.flow(ctx.epoch, grad), None, None


def always(epoch, fresh, held):
    return torch.ones(len(fresh), dtype=torch.bool)


class Simulation:
    """Full-graph training of a GCN on several processes, told in one.

    Args:
        graph: of `read_graph`.
        model: a NodeClassifier around a GCN without dropout; it stays as it is.
        due, extrapolate: see `Held`; make_due makes one for each layer, where what is due hangs on what was.
        remote_gradient: gradients flow back to the rows of other ranks.
        make_flow: rank -> how; None: as they are.
        crossing: edges between ranks are read.
        own_count: a rank's loss is divided by its own labels, not by all of them.
    """

    def __init__(
        self, graph, model, due=always, extrapolate=False, remote_gradient=True, crossing=True, own_count=False,
        make_due=None, make_flow=None,
    ):  # fmt: skip
        self.graph, self.edges, self.remote_gradient = graph, graph.normalized(crossing), remote_gradient
        self.own_count = own_count
        self.replicas = [copy.deepcopy(model.backbone) for _ in graph.ranks]
        self.optimizers = [
            model.make_optimizer(net.parameters())
            if model.make_optimizer
            else torch.optim.Adam(net.parameters(), 0.005)
            for net in self.replicas
        ]
        layers = range(1, model.backbone.num_layers)
        self.held = [Held(make_due() if make_due else due, extrapolate) for _ in layers]
        self.flows = [[make_flow(rank) if make_flow else Flow() for rank in graph.ranks] for _ in layers]
        self.losses = []

    def forward(self, epoch):
        """Return the (num_nodes, num_classes) outputs, each rank's rows by its own replica."""
        h = self.graph.x
        for layer in range(self.replicas[0].num_layers):
            if layer == 0:
                read = h
            else:
                h = F.relu(h)
                read = self.held[layer - 1].read(epoch, h.detach())
            rows = []
            for rank, net in enumerate(self.replicas):
                own = self.graph.owner == rank
                conv = net.convs[layer]
                seen = read
                if layer and self.remote_gradient:
                    seen = read + _Remote.apply(h, self.flows[layer - 1][rank], epoch)
                summed = self.edges[own][:, own] @ h[own] + self.edges[own][:, ~own] @ seen[~own]
                rows.append(summed @ conv.lin.weight.t() + conv.bias)
            h = torch.cat(rows)
        return h

    def backward(self, epoch):
        """Give every replica the gradient that its process computes."""
        outputs, train = self.forward(epoch), self.graph.train
        losses = F.cross_entropy(outputs, self.graph.y, reduction="none") * train
        shares = []
        for rank in self.graph.ranks:
            own = self.graph.owner == rank
            count = (train & own).sum() if self.own_count else train.sum()
            shares.append(losses[own].sum() / count.clamp(min=1))
        sum(shares).backward()
        self.losses.append(float(sum(shares).detach()))

    def step(self, epoch, join):
        """Train one epoch; join(simulation, epoch) changes gradients (and weights) before the steps."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(epoch)
        join(self, epoch)
        for optimizer in self.optimizers:
            optimizer.step()

    def parameters(self):
        """Return, for each parameter, the tensors of all replicas."""
        return list(zip(*(net.parameters() for net in self.replicas), strict=True))

    def weights(self, rank=0):
        return {f"backbone.{name}": value.clone() for name, value in self.replicas[rank].state_dict().items()}


def add_up(simulation, epoch):
    """What every exact policy of weights does: all replicas step with the sum of all gradients."""
    for tensors in simulation.parameters():
        total = sum(tensor.grad for tensor in tensors)
        for tensor in tensors:
            tensor.grad = total.clone()


@torch.no_grad()
def average(tensors):
    """Set tensors to their mean."""
    mean = sum(tensors) / len(tensors)
    for tensor in tensors:
        tensor.copy_(mean)
