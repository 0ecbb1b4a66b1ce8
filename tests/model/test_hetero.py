"""A plain model of PyG on heterogeneous batches: the values of `to_hetero`, in the batch's order."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from model.typed_graphs import EDGE_DIM, NUM_NODES, ONE_NODE_TYPE, SCHEMA, WIDTHS, hetero_graph
from torch import nn
from torch_geometric.nn import GATConv, GraphSAGE, SAGEConv, to_hetero

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.model import Hetero, NodeClassifier
from tests.says import said

BACK = GraphSchema(SCHEMA.node_types, (*SCHEMA.edge_types, ("paper", "rev_names", "field")))


class Plain(nn.Module):
    def __init__(self, attention=False):
        super().__init__()
        if attention:
            self.first = GATConv((-1, -1), 8, add_self_loops=False, edge_dim=EDGE_DIM)
            self.second = GATConv((8, 8), 4, add_self_loops=False, edge_dim=EDGE_DIM)
        else:
            self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((8, 8), 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Attending(Plain):
    def __init__(self):
        super().__init__(True)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def without_attr(batch):
    batch = copy.copy(batch)
    batch.edge_attr = None
    return batch


def wrapped(schema=BACK, **options):
    torch.manual_seed(0)
    return Hetero(Plain(), schema, WIDTHS, vector_channels=3, **options).double()


@pytest.mark.parametrize("seeds", [None, [3, 17, 8]])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_rows_are_those_of_to_hetero(seeds, aggr):
    typed, model = typed_graph_back(), wrapped(aggr=aggr)
    batch = typed.batch(seeds)
    batch.batch_size = 0  # to_hetero of the batch wants seeds of one node type
    data = batch.to_hetero()
    field = int((batch.node_type == 2).sum())
    x = data.x_dict | {"field": model.type_vectors[0].expand(field, -1)}
    expected = model.model(x, data.edge_index_dict)
    found = model(batch.x, batch.edge_index, edge_type=batch.edge_type, node_type=batch.node_type)
    for node_type, name in enumerate(BACK.node_types):
        torch.testing.assert_close(found[batch.node_type == node_type], expected[name])
    batch.batch_size = NUM_NODES if seeds is None else len(seeds)
    torch.testing.assert_close(NodeClassifier(model, num_classes=4)(without_attr(batch)), found)
    found.sum().backward()
    assert model.type_vectors[0].grad.abs().sum() > 0


def typed_graph_back():
    """The graph of SCHEMA under one edge type more, which has no edge in it."""
    return hetero_graph()._replace(schema=BACK)


def test_the_whole_graphs_values_of_seeds():
    typed, model, seeds = typed_graph_back(), wrapped().eval(), [3, 17, 8]
    both = [typed.batch(chosen) for chosen in (None, seeds)]
    whole, some = (model(b.x, b.edge_index, edge_type=b.edge_type, node_type=b.node_type) for b in both)
    torch.testing.assert_close(some[: len(seeds)], whole[seeds], rtol=1e-10, atol=1e-10)


def test_features_of_edges_reach_a_model_that_names_them():
    torch.manual_seed(0)
    typed, model = typed_graph_back(), Hetero(Attending(), BACK, WIDTHS | {"field": 0}, edge_dim=EDGE_DIM).double()
    batch = typed.batch()
    module = NodeClassifier(model, num_classes=4)
    assert module.reads_edge_features and not NodeClassifier(wrapped(), num_classes=4).reads_edge_features
    found = module(batch)
    batch.edge_attr = -batch.edge_attr
    assert found.shape == (NUM_NODES, 4) and not torch.allclose(found, module(batch))
    with pytest.raises(ValueError, match=said("layer Hetero edge features")):
        NodeClassifier(wrapped(), num_classes=4)(batch)


def test_a_model_of_pyg_with_one_node_type():
    typed = hetero_graph(ONE_NODE_TYPE)
    torch.manual_seed(0)
    model = Hetero(partial(GraphSAGE, 7, 8, 2), ONE_NODE_TYPE, 7, out_channels=4).double()
    assert (model.out_channels, model.num_layers) == (4, 2)
    batch = without_attr(typed.batch())
    metadata = (list(ONE_NODE_TYPE.node_types), list(ONE_NODE_TYPE.edge_types))
    twin = to_hetero(GraphSAGE(7, 8, 2, 4), metadata).double()
    twin.load_state_dict(model.model.state_dict())
    edges = {name: batch.edge_index[:, batch.edge_type == at] for at, name in enumerate(ONE_NODE_TYPE.edge_types)}
    expected = twin({"entity": batch.x}, edges)["entity"]
    torch.testing.assert_close(NodeClassifier(model)(batch), expected)


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match=said("field add reverse")):
        Hetero(Plain(), SCHEMA, WIDTHS)
    with pytest.raises(ValueError, match=said("GraphSAGE out_channels=4 5")):
        Hetero(GraphSAGE(7, 8, 2, 4), ONE_NODE_TYPE, 7, out_channels=5)
    model, batch = wrapped(), typed_graph_back().batch()
    with pytest.raises(ValueError, match=said("Hetero(Plain) node_type edge_type")):
        model(batch.x, batch.edge_index)
    with pytest.raises(ValueError, match=said("Plain edge_weight")):
        model(batch.x, batch.edge_index, edge_type=batch.edge_type, edge_weight=torch.ones(batch.num_edges))
    batch.x_by_node_type.tables[2] = torch.zeros(len(batch.x_by_node_type.places(2)), 2)
    with pytest.raises(ValueError, match=said("features 'field' 2 0")):
        model(batch.x, batch.edge_index, edge_type=batch.edge_type)
    share = SimpleNamespace(source=object(), split="val")
    with pytest.raises(StrategyError, match=said('layer evaluation="sampled"')):
        NodeClassifier(model, num_classes=4).validation_step(share)
    with pytest.raises(StrategyError, match=said("full-graph training")):
        NodeClassifier(model, num_classes=4)(SimpleNamespace(full_graph=True))
