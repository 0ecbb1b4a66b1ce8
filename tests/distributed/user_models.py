"""Models of PyG's layers, and of a user's own, as full-graph training takes them; all called as (x, edge_index)."""

from functools import partial

import torch
import torch.nn.functional as F
from full_graph_runs import DIM, NUM_CLASSES
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import add_self_loops, degree, softmax

import lightning_gnnscale as gs

HIDDEN, EDGE_DIM = 8, 3
# Not Adam: some biases have no gradient but rounding, which it would make steps of.
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class TwoConvs(nn.Module):
    """conv, ELU, conv; edge features where `edges` names them."""

    def __init__(self, make, width=HIDDEN, **options):
        super().__init__()
        self.first, self.second = make(DIM, HIDDEN, **options), make(width, NUM_CLASSES, **options)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


class TwoEdgeConvs(TwoConvs):
    def forward(self, x, edge_index, edge_attr):
        return self.second(F.elu(self.first(x, edge_index, edge_attr)), edge_index, edge_attr)


class TutorialConv(pyg.MessagePassing):
    """The convolution of PyG's tutorial, which normalises by degrees that it counts itself."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class OwnAttention(pyg.MessagePassing):
    """Attention whose `update` reads the node's own row, under the name that `message` reads its neighbours' by."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.score = nn.Linear(in_channels, out_channels), nn.Linear(2 * out_channels, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, ptr, size_i):
        share = softmax(F.leaky_relu(self.score(torch.cat([x_i, x_j], dim=-1))), index, ptr, size_i)
        return F.dropout(share, 0.3, self.training) * x_j

    def update(self, inputs, x):
        return inputs + 0.5 * x


class Jumping(nn.Module):
    """A model with a forward of its own: a map, dropout, a convolution that is called twice, all layers joined."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, HIDDEN)
        self.conv = pyg.GraphConv(HIDDEN, HIDDEN, aggr="max")
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.last = pyg.TransformerConv(2 * HIDDEN, NUM_CLASSES, heads=2, concat=False, dropout=0.2)

    def forward(self, x, edge_index):
        x = F.dropout(self.inner(x), 0.2, self.training)
        one = self.norm(self.conv(x, edge_index)).relu()
        two = self.conv(F.dropout(one, 0.4, self.training), edge_index)
        return self.last(torch.cat([one, two], dim=-1), edge_index)


def mlp(in_channels, out_channels, norm=False):
    inner = [nn.Linear(in_channels, HIDDEN), *([nn.BatchNorm1d(HIDDEN)] if norm else []), nn.ELU()]
    return nn.Sequential(*inner, nn.Linear(HIDDEN, out_channels))


def two(make, **options):
    return lambda: TwoConvs(make, **options)


def pna(in_channels, out_channels):
    counts = torch.arange(20, 0, -1)
    return pyg.PNAConv(in_channels, out_channels, ["mean", "max", "std"], ["identity", "amplification"], counts)


def appnp(dropout=0.0):
    return pyg.Sequential(
        "x, edge_index",
        [(nn.Linear(DIM, NUM_CLASSES), "x -> x"), (pyg.APPNP(3, 0.1, dropout=dropout), "x, edge_index -> x")],
    )


# Name: what makes the model, the store it is for. The stores are those of test_full_graph_models.
MODELS = {
    "GIN": (two(lambda i, o: pyg.GINConv(mlp(i, o))), "undirected"),
    "GIN, BatchNorm within": (two(lambda i, o: pyg.GINConv(mlp(i, o, True), train_eps=True)), "undirected"),
    "SAGE, max": (two(pyg.SAGEConv, aggr="max"), "directed"),
    "SAGE, LSTM": (two(pyg.SAGEConv, aggr="lstm"), "undirected"),
    "SAGE, several": (two(pyg.SAGEConv, aggr=["mean", "std", "min"], project=True), "undirected"),
    "GAT": (two(pyg.GATConv, heads=2, concat=False, dropout=0.3), "directed"),
    "GATv2": (two(pyg.GATv2Conv, heads=2, concat=False), "undirected"),
    "Transformer": (two(pyg.TransformerConv, heads=2, concat=False, beta=True), "undirected"),
    "PNA": (two(pna), "directed"),
    "Edge": (two(lambda i, o: pyg.EdgeConv(mlp(2 * i, o))), "undirected"),
    "GCN": (two(pyg.GCNConv), "undirected"),
    "GCN, directed": (two(pyg.GCNConv), "directed"),
    "GCN, normalised once": (two(pyg.GCNConv, cached=True), "undirected"),
    "GCN, weights": (lambda: pyg.GCN(DIM, HIDDEN, 3, NUM_CLASSES), "weighted"),
    "Cheb": (two(pyg.ChebConv, K=3), "undirected"),
    "ARMA": (two(pyg.ARMAConv, num_stacks=2, num_layers=2), "undirected"),
    "TAG": (two(pyg.TAGConv, K=2), "directed"),
    "SG": (two(pyg.SGConv, K=2), "undirected"),
    "ResGated": (two(pyg.ResGatedGraphConv), "undirected"),
    "tutorial": (two(TutorialConv), "directed"),
    "own attention": (two(OwnAttention), "undirected"),
    "GINE": (lambda: TwoEdgeConvs(lambda i, o: pyg.GINEConv(mlp(i, o), edge_dim=EDGE_DIM)), "edges"),
    "GAT, edges": (lambda: TwoEdgeConvs(pyg.GATConv, edge_dim=EDGE_DIM), "edges"),
    "Transformer, edges": (lambda: TwoEdgeConvs(pyg.TransformerConv, edge_dim=EDGE_DIM), "edges"),
    "BasicGNN": (
        lambda: pyg.GraphSAGE(DIM, HIDDEN, 3, NUM_CLASSES, dropout=0.5, norm="batch", jk="cat"),
        "undirected",
    ),
    "Sequential, APPNP": (appnp, "undirected"),
    "own forward": (Jumping, "undirected"),
}


def make_user_model(name):
    torch.manual_seed(3)
    return MODELS[name][0]().double()


def classify(net):
    return gs.NodeClassifier(net, num_classes=NUM_CLASSES, optimizer=SGD)
