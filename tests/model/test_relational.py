"""Models over node types and edge types: PyG's values and gradients, trimmed batches, exact inference, refusals."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model.graphs import to_sparse
from model.test_node_classifier import Batches, trainer
from model.typed_graphs import EDGE_DIM, NUM_NODES, ONE_NODE_TYPE, SCHEMA, WIDTHS, TypedSource, hetero_graph
from torch_geometric.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.model import (
    GAT,
    HGT,
    RGAT,
    RGCN,
    GraphSAGE,
    NodeClassifier,
    layerwise_inference,
    rgcn,
)  # fmt: skip
from lightning_gnnscale.model.backbone_module import _described, make_backbone
from lightning_gnnscale.model.layer_source import NodeSet, closure
from lightning_gnnscale.model.node_inputs import InputSource
from lightning_gnnscale.model.relational import map_groups
from lightning_gnnscale.sampler.minibatch import RowsByNodeType
from tests.says import said
from tests.tiers import all_pairs, each_value

MODELS = [(RGCN, {}), (RGCN, {"num_bases": 2}), (RGAT, {"heads": 2}), (RGAT, {"heads": 2, "num_bases": 3})]
MODELS += [(HGT, {"heads": 2})]


def build(kind, schema=SCHEMA, out=4, layers=2, **options):
    torch.manual_seed(0)
    model = kind(WIDTHS if schema is SCHEMA else 7, 8, out, num_layers=layers, dropout=0.0, schema=schema, **options)
    for value in model.parameters():  # priors, gates and biases too
        torch.nn.init.normal_(value, std=0.5)
    return model.double().eval()


def compared(model, mine, theirs):
    """Outputs and the gradients of all parameters that both use."""
    found = []
    for compute in (mine, theirs):
        model.zero_grad()
        out = compute()
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found.append((out.detach(), {name: value.grad for name, value in model.named_parameters()}))
    (out, grads), (expected, other) = found
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert sum(grad is not None and grad.abs().sum() > 0 for grad in grads.values()) >= len(grads) - 1
    for name, grad in grads.items():
        one, two = (torch.zeros(1) if value is None else value for value in (grad, other[name]))
        torch.testing.assert_close(one.expand_as(two), two.expand_as(one), rtol=1e-9, atol=1e-9, msg=name)


def forward_of(model, batch, **options):
    names = ("indptr", "num_sampled_nodes", "edge_type", "node_type")
    given = {name: getattr(batch, name) for name in names} | options
    return model(batch.x, batch.edge_index, **given)


def layers_by_pyg(model, batch, layer_of, **options):
    """The same model, with PyG's layers in place of ours."""
    h = model.map_features(batch.x, batch.node_type)
    for index, layer in enumerate(model.convs):
        h = model.finish_layer(index, layer_of(index, layer, h))
    return h


def use(layer, names):
    """Let a layer of PyG compute with our parameters, so that gradients come to them."""
    for name, value in names.items():
        owner, _, last = name.rpartition(".")
        module = layer.get_submodule(owner)
        module._parameters.pop(last, None)
        module.__dict__[last] = value
    return layer


@all_pairs
@pytest.mark.parametrize("pyg", [RGCNConv, FastRGCNConv])
@pytest.mark.parametrize(
    ("schema", "num_bases"), [(SCHEMA, None), (SCHEMA, 2), (ONE_NODE_TYPE, None), (ONE_NODE_TYPE, 3)]
)
@pytest.mark.parametrize("out", [2, 13])  # narrower than the layers: maps come first where that costs less
def test_rgcn_is_that_of_pyg(pyg, schema, num_bases, out):
    typed = hetero_graph(schema)
    model, batch = build(RGCN, schema, out, num_bases=num_bases), typed.batch()

    def layer_of(index, layer, h):
        twin = pyg(8, layer.out_channels, schema.num_edge_types, num_bases, root_weight=False, bias=False).double()
        use(twin, {"weight": layer.weight, "comp": layer.comp})
        kinds = typed.node_type
        own = torch.einsum("ni,nio->no", h, layer.root.weight[kinds]) + layer.root.bias[kinds]
        return twin(h, batch.edge_index, batch.edge_type) + own

    compared(model, lambda: forward_of(model, batch), lambda: layers_by_pyg(model, batch, layer_of))


@pytest.mark.parametrize(
    ("form", "read", "num_bases", "out"),
    [("bases", 0, 2, 2), ("targets", 1e9, 2, 13), ("sources", 1e9, None, 2), ("targets", 0, None, 13)],
)
def test_each_order_of_maps_and_sums_gives_the_same(form, read, num_bases, out, monkeypatch):
    """The cost of a read decides which rows are mapped: none but sums by basis, pairs with targets, or with sources."""
    batch = hetero_graph(ONE_NODE_TYPE).batch()
    model = build(RGCN, ONE_NODE_TYPE, out, layers=1, num_bases=num_bases)
    layer, h = model.convs[0], model.map_features(batch.x, None)
    weight = layer.weight if num_bases is None else torch.einsum("rb,bio->rio", layer.comp, layer.weight)
    expected = h @ layer.root.weight[0] + layer.root.bias
    for relation in range(ONE_NODE_TYPE.num_edge_types):
        source, target = batch.edge_index[:, batch.edge_type == relation]
        sums = h.new_zeros(NUM_NODES, 8).index_add(0, target, h[source])
        expected = (
            expected + sums / torch.bincount(target, minlength=NUM_NODES).clamp(min=1)[:, None] @ weight[relation]
        )
    mapped = []
    monkeypatch.setattr(rgcn, "MULTIPLY_ADDS_PER_READ", read)
    monkeypatch.setattr(
        rgcn, "map_groups", lambda *given, **named: mapped.append(len(given[0])) or map_groups(*given, **named)
    )
    torch.testing.assert_close(forward_of(model, batch), expected, rtol=1e-10, atol=1e-10)
    ends = {"bases": None, "targets": batch.edge_index[1], "sources": batch.edge_index[0]}[form]
    pairs = 0 if ends is None else len(torch.stack([batch.edge_type, ends]).unique(dim=1)[0])
    assert mapped == [pairs] if pairs else not mapped


def test_a_weighted_mean_within_relations():
    typed = hetero_graph(ONE_NODE_TYPE)
    batch, weight = typed.batch(), torch.rand(typed.edge_type.shape, dtype=torch.float64) + 0.1
    for out in (2, 13):
        model = build(RGCN, ONE_NODE_TYPE, out, layers=1)
        h, total = model.map_features(batch.x, None), 0
        for relation in range(ONE_NODE_TYPE.num_edge_types):
            chosen = typed.edge_type == relation
            source, target = batch.edge_index[:, chosen]
            sums = h.new_zeros(NUM_NODES, 8).index_add(0, target, h[source] * weight[chosen, None])
            whole = h.new_zeros(NUM_NODES).index_add(0, target, weight[chosen]).clamp(min=1e-9)
            total = total + sums / whole[:, None] @ model.convs[0].weight[relation]
        expected = total + h @ model.convs[0].root.weight[0] + model.convs[0].root.bias
        torch.testing.assert_close(forward_of(model, batch, edge_weight=weight), expected, rtol=1e-10, atol=1e-10)


@all_pairs
@pytest.mark.parametrize("schema", [SCHEMA, ONE_NODE_TYPE])
@pytest.mark.parametrize("num_bases", [None, 2])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_rgat_is_that_of_pyg(schema, num_bases, edge_dim):
    typed = hetero_graph(schema)
    model, batch = build(RGAT, schema, heads=2, num_bases=num_bases, edge_dim=edge_dim), typed.batch()
    attr = {"edge_attr": typed.edge_attr} if edge_dim else {}

    def layer_of(index, layer, h):
        options = {"heads": 2, "concat": layer.concat, "edge_dim": edge_dim, "num_bases": num_bases}
        twin = RGATConv(8, layer.out_channels, schema.num_edge_types, **options).double()
        use(twin, {name: value for name, value in layer.named_parameters() if not name.startswith("root")})
        kinds = typed.node_type
        own = torch.einsum("ni,nio->no", h, layer.root.weight[kinds]) + layer.root.bias[kinds]
        return twin(h, batch.edge_index, batch.edge_type, **attr) + own

    compared(model, lambda: forward_of(model, batch, **attr), lambda: layers_by_pyg(model, batch, layer_of))


@pytest.mark.parametrize("schema", [SCHEMA, ONE_NODE_TYPE])
def test_hgt_is_that_of_pyg(schema):
    typed = hetero_graph(schema)
    model, batch = build(HGT, schema, heads=2), typed.batch()
    places = [torch.nonzero(typed.node_type == kind).flatten() for kind in range(schema.num_node_types)]
    local = torch.empty(NUM_NODES, dtype=torch.int64)
    for chosen in places:
        local[chosen] = torch.arange(len(chosen))
    edges = {
        name: local[batch.edge_index[:, batch.edge_type == number]] for number, name in enumerate(schema.edge_types)
    }

    def layer_of(index, layer, h):
        twin = HGTConv(8, 8, (list(schema.node_types), list(schema.edge_types)), heads=2).double()
        names = {}
        for kind, name in enumerate(schema.node_types):
            weight = torch.cat(
                [layer.key_value.weight[kind, :, :8], layer.query.weight[kind], layer.key_value.weight[kind, :, 8:]], 1
            )
            bias = torch.cat([layer.key_value.bias[kind, :8], layer.query.bias[kind], layer.key_value.bias[kind, 8:]])
            names |= {f"kqv_lin.lins.{name}.weight": weight.t(), f"kqv_lin.lins.{name}.bias": bias}
            names |= {f"out_lin.lins.{name}.weight": layer.out.weight[kind].t()}
            names |= {f"out_lin.lins.{name}.bias": layer.out.bias[kind]}
        names |= {"k_rel.weight": layer.key_maps.transpose(0, 1).flatten(0, 1)}
        names |= {"v_rel.weight": layer.value_maps.transpose(0, 1).flatten(0, 1)}
        use(twin, names)
        gates = {name: layer.skip[kind : kind + 1] for kind, name in enumerate(schema.node_types)}
        priors = {name: layer.prior[at : at + 1] for at, name in enumerate(schema.edge_types)}
        for name, values in (("skip", gates), ("p_rel", priors)):
            del twin._modules[name]
            twin.__dict__[name] = values
        out = twin({name: h[chosen] for name, chosen in zip(schema.node_types, places, strict=True)}, edges)
        whole = torch.empty_like(h)
        for kind, (name, chosen) in enumerate(zip(schema.node_types, places, strict=True)):
            gate = layer.skip[kind].sigmoid()  # PyG gives nothing of kinds that no edge type leads to
            whole[chosen] = out[name] if name in out else gate * layer.out.bias[kind] + (1 - gate) * h[chosen]
        return whole

    compared(model, lambda: forward_of(model, batch), lambda: layers_by_pyg(model, batch, layer_of))


@each_value
@pytest.mark.parametrize(("kind", "options"), MODELS)
@pytest.mark.parametrize("schema", [SCHEMA, ONE_NODE_TYPE])
def test_trimmed_batches_give_the_seeds_what_the_whole_graph_does(kind, options, schema):
    typed = hetero_graph(schema)
    model, seeds = build(kind, schema, **options), [3, 17, 8, NUM_NODES - 1]
    whole = forward_of(model, typed.batch())
    batch = typed.batch(seeds)
    trimmed = forward_of(model, batch)
    assert len(trimmed) == len(seeds)
    torch.testing.assert_close(trimmed, whole[seeds], rtol=1e-10, atol=1e-10)
    untrimmed = forward_of(model, batch, num_sampled_nodes=None)[: len(seeds)]
    torch.testing.assert_close(untrimmed, whole[seeds], rtol=1e-10, atol=1e-10)
    # a module gives the model all it names, and edges in any order are sorted
    torch.testing.assert_close(NodeClassifier(model)(batch_without_attr(batch)), whole[seeds], rtol=1e-10, atol=1e-10)
    order = torch.randperm(batch.num_edges)
    shuffled = model(batch.x, batch.edge_index[:, order], edge_type=batch.edge_type[order], node_type=batch.node_type)
    torch.testing.assert_close(shuffled[: len(seeds)], whole[seeds], rtol=1e-10, atol=1e-10)


def batch_without_attr(batch):
    batch = copy.copy(batch)
    batch.edge_attr = None
    return batch


@each_value
@pytest.mark.parametrize(("kind", "options"), MODELS)
@pytest.mark.parametrize(
    ("schema", "block_edges", "sparse"), [(SCHEMA, 9, False), (SCHEMA, None, True), (ONE_NODE_TYPE, 9, False)]
)
def test_layerwise_inference_equals_the_whole_graph(kind, options, schema, block_edges, sparse):
    typed, model = hetero_graph(schema), build(kind, schema, layers=3, norm="layer", **options)
    with torch.no_grad():
        expected = forward_of(model, typed.batch())
    source = TypedSource(typed, chunk=7, sparse=sparse)
    table = layerwise_inference(model, source, block_edges).table
    torch.testing.assert_close(torch.from_numpy(table).double(), expected, rtol=1e-4, atol=1e-4)
    chosen = np.array([1, 5, 30])
    needed = closure(source, NodeSet.of(chosen, NUM_NODES), 3, most=1.0)
    some = layerwise_inference(model, source, block_edges, needed=needed).read(chosen)
    torch.testing.assert_close(torch.from_numpy(some).double(), expected[chosen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), [(RGAT, {"heads": 2}), (HGT, {"heads": 2})])
def test_features_of_edges_are_read(kind, options):
    typed, model = hetero_graph(), build(kind, edge_dim=EDGE_DIM, **options)
    batch = typed.batch()
    expected = forward_of(model, batch, edge_attr=batch.edge_attr)
    assert not torch.allclose(expected, forward_of(model, batch, edge_attr=-batch.edge_attr))
    seeds = typed.batch([3, 17])
    found = forward_of(model, seeds, edge_attr=seeds.edge_attr)
    torch.testing.assert_close(found, expected[[3, 17]], rtol=1e-10, atol=1e-10)
    table = layerwise_inference(model, TypedSource(typed, chunk=7, edge_attr=True), 11).table
    torch.testing.assert_close(torch.from_numpy(table).double(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [RGAT, HGT, GAT])
def test_times_are_read_between_an_edge_and_its_seed(kind):
    schema = {} if kind is GAT else {"schema": GraphSchema(("n",), (("n", "r", "n"),))}
    torch.manual_seed(0)
    model = kind(3, 8, 2, num_layers=2, dropout=0.0, heads=2, time_channels=4, edge_dim=1, **schema).double().eval()
    # two trees of three nodes: a seed, its neighbour, and that one's
    x, edge_attr = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    edge_index, indptr = torch.tensor([[2, 3, 4, 5], [0, 1, 2, 3]]), torch.tensor([0, 1, 2, 3, 4])
    trees = {"seed_of": torch.tensor([0, 1, 0, 1, 0, 1]), "seed_time": torch.tensor([2**40, 2**40 + 7])}
    given = {"indptr": indptr, "num_sampled_nodes": [2, 2, 2], "edge_attr": edge_attr}
    times = torch.tensor([2**40 - 5, 2**40 + 2, 2**40 - 9, 2**40 - 2])
    with torch.no_grad():
        first = model(x, edge_index, edge_time=times, **trees, **given)
        later = {**trees, "seed_time": trees["seed_time"] + 3}
        torch.testing.assert_close(model(x, edge_index, edge_time=times + 3, **later, **given), first)
        moved = model(x, edge_index, edge_time=times - torch.tensor([0, 1, 0, 0]), **trees, **given)
        if kind is not GAT:  # one edge has all of the softmax: times show where there are two
            assert torch.equal(moved, first)
        else:  # beside its self-loop
            assert torch.equal(moved[0], first[0]) and not torch.allclose(moved[1], first[1])
    with pytest.raises(ValueError, match=said("batches edge_time seed_time seed_of")):
        model(x, edge_index, **given)
    with pytest.raises(ValueError, match=said('time_channels=4 DataModule evaluation="sampled"')):
        layerwise_inference(model, TypedSource(hetero_graph(ONE_NODE_TYPE)))


def test_times_change_the_attention_of_two_edges():
    for kind in (RGAT, HGT):
        torch.manual_seed(0)
        schema = GraphSchema(("n",), (("n", "r", "n"),))
        model = kind(3, 8, 2, num_layers=1, dropout=0.0, heads=2, time_channels=4, schema=schema).double().eval()
        x, edge_index = torch.randn(3, 3, dtype=torch.float64), torch.tensor([[1, 2], [0, 0]])
        given = {"seed_of": torch.zeros(3, dtype=torch.int64), "seed_time": torch.tensor([9])}
        one, two = (model(x, edge_index, edge_time=torch.tensor(times), **given)[0] for times in ([1, 8], [8, 1]))
        assert not torch.allclose(one, two)
        one.sum().backward()
        assert model.time.frequency.grad.abs().sum() > 0


def test_maps_of_groups_that_stand_empty():
    weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    values, group = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 0, 2, 2, 2])
    out = map_groups(values, group, weight)
    torch.testing.assert_close(out, torch.einsum("ni,nio->no", values, weight[group]))
    assert map_groups(values[:0], group[:0], weight).shape == (0, 2)
    out.sum().backward()
    assert weight.grad[1].abs().sum() == 0 and weight.grad[2].abs().sum() > 0


@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_a_graph_without_edges(kind, options):
    model, typed = build(kind, **options), hetero_graph()
    batch = typed.batch()
    none = torch.zeros(0, dtype=torch.int64)
    out = model(batch.x, torch.zeros(2, 0, dtype=torch.int64), edge_type=none)
    assert out.shape == (NUM_NODES, 4) and out.isfinite().all()
    out.sum().backward()


@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_a_checkpoint_says_how_to_make_the_model(kind, options):
    model = build(kind, **options)
    described = _described(model)
    assert described["schema"] == SCHEMA.as_json() and described["in_channels"] == WIDTHS
    twin = make_backbone(described).double().eval()
    twin.load_state_dict(model.state_dict())
    batch = hetero_graph().batch()
    torch.testing.assert_close(forward_of(twin, batch), forward_of(model, batch))
    again = kind(WIDTHS, 8, 4, schema=SCHEMA.as_json(), **options)
    assert again.schema == SCHEMA


def test_what_does_not_fit_is_refused_in_one_line():
    typed = hetero_graph()
    batch = typed.batch()
    with pytest.raises(ValueError, match=said("RGCN schema=")):
        RGCN(6, 8, 4)
    with pytest.raises(ValueError, match=said("in_channels columns node type")):
        RGCN({"paper": 6}, 8, 4, schema=SCHEMA)
    with pytest.raises(ValueError, match=said("features 'author' 5 RGCN 4")):
        forward_of(RGCN(WIDTHS | {"author": 4}, 8, 4, schema=SCHEMA).double(), batch)
    with pytest.raises(ValueError, match=said("features 'field' 0 RGCN 2")):
        forward_of(RGCN(WIDTHS | {"field": 2}, 8, 4, schema=SCHEMA).double(), batch)
    model = build(RGCN)
    with pytest.raises(ValueError, match=said("RGCN edge_type")):
        forward_of(model, batch, edge_type=None)
    with pytest.raises(ValueError, match=said("edge_type 5 7")):
        forward_of(model, batch, edge_type=batch.edge_type + 4)
    with pytest.raises(ValueError, match=said("RGCN features RGAT HGT")):
        forward_of(model, batch, edge_attr=batch.edge_attr)
    with pytest.raises(ValueError, match=said("num_bases 1")):
        RGCN(WIDTHS, 8, 4, schema=SCHEMA, num_bases=0)
    for kind in (RGAT, HGT):
        with pytest.raises(ValueError, match=said("hidden_channels multiple heads")):
            kind(WIDTHS, 8, 4, schema=SCHEMA, heads=3)
    with pytest.raises(ValueError, match=said("RGCN node types edge types")):
        model.row_edges(None, None, {})


def test_relations_are_never_dropped_in_silence():
    typed, one_kind = hetero_graph(), hetero_graph(ONE_NODE_TYPE)
    plain = NodeClassifier(GraphSAGE(7, 8, 4).double())
    with pytest.raises(StrategyError, match=said("GraphSAGE edge_type")):
        plain(batch_without_attr(one_kind.batch()))
    batch = batch_without_attr(typed.batch())
    batch.edge_type = batch.schema = None
    with pytest.raises(StrategyError, match=said("GraphSAGE table features")):
        plain(batch)
    with pytest.raises(StrategyError, match=said("GraphSAGE edge types graph")):
        layerwise_inference(plain.backbone, TypedSource(one_kind))
    single = batch_without_attr(one_kind.batch())
    single.edge_type, single.schema = torch.zeros_like(single.edge_type), None
    assert plain(single).shape == (NUM_NODES, 4)  # one edge type is a plain graph


class Rows:
    """Learned rows of all nodes, as `inputs=` takes them."""

    dim, num_nodes, num_rows, is_local = 3, NUM_NODES, NUM_NODES, True

    def __init__(self):
        self.table = torch.nn.Parameter(torch.randn(NUM_NODES, 3, dtype=torch.float64))
        self.calls = []

    def __call__(self, nodes):
        self.calls.append(nodes)
        return self.table[nodes]

    def pull(self, nodes):
        return self.table.detach()[torch.as_tensor(nodes)]


@pytest.mark.parametrize("behind", [False, True])
def test_learned_rows_are_features_of_node_types_without(behind):
    """And stand behind those of kinds whose columns count them."""
    typed = hetero_graph()
    widths = {"paper": 9 if behind else 6, "author": 5, "field": 3}
    torch.manual_seed(0)
    model = RGCN(widths, 8, 4, dropout=0.0, schema=SCHEMA).double().eval()
    module, seeds = NodeClassifier(model, inputs=Rows()), [3, 17, 8]
    batch = batch_without_attr(typed.batch(seeds))
    found = module(batch)
    (asked,) = module.inputs.calls
    takes = (0, 2) if behind else (2,)
    assert torch.equal(asked, batch.n_id[torch.isin(batch.node_type, torch.tensor(takes))])
    tables = list(typed.rows(torch.arange(NUM_NODES)).tables)
    rows = module.inputs.table
    tables[2] = rows[typed.node_type == 2]
    if behind:
        tables[0] = torch.cat([tables[0], rows[typed.node_type == 0]], 1)
    whole = typed.batch()
    expected = model(whole.x._replace(tables=tables), whole.edge_index, edge_type=whole.edge_type)
    torch.testing.assert_close(found, expected[seeds], rtol=1e-10, atol=1e-10)
    found.sum().backward()
    assert bool(rows.grad[typed.node_type == 2].any()) and bool(rows.grad[typed.node_type == 0].any()) == behind
    assert not rows.grad[typed.node_type == 1].any()
    source = InputSource(TypedSource(typed, chunk=7), module.inputs, model.type_channels)
    table = layerwise_inference(model, source, 9).table
    torch.testing.assert_close(torch.from_numpy(table).double(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [RGCN, RGAT, HGT])
def test_a_trainer_fits_and_validates(kind, precision):
    typed = hetero_graph(dtype=torch.float32)
    torch.manual_seed(0)
    model = kind(WIDTHS, 16, 4, norm="layer", dropout=0.1, input_dropout=0.1, schema=SCHEMA)
    masks = {name: torch.ones(NUM_NODES, dtype=torch.bool) for name in ("train", "val")}
    batches = []
    for start in range(0, NUM_NODES, 10):
        batch = batch_without_attr(typed.batch(list(range(start, start + 10))))
        batch.train_mask = masks["train"][batch.n_id]
        batches.append(batch)
    evaluation = SimpleNamespace(
        source=TypedSource(typed), split="val", labels=typed.graph.y.numpy(), to=lambda *device, **options: evaluation,
        masks={name: mask.numpy() for name, mask in masks.items()},
    )  # fmt: skip
    run, module = trainer(max_epochs=30, precision=precision), NodeClassifier(model, lr=0.02)
    run.fit(module, Batches(batches), Batches([evaluation]))
    assert run.callback_metrics["train_loss"] < 1.0  # 1.39 for a guess
    assert run.callback_metrics["val_acc"] > 0.5  # the same nodes


@pytest.mark.parametrize("sparse", [False, True])
def test_node_types_may_share_one_table(sparse):
    typed = hetero_graph()
    x = torch.randn(NUM_NODES, 7, dtype=torch.float64) * (torch.rand(NUM_NODES, 7) < 0.5)
    torch.manual_seed(0)
    model = RGCN(7, 8, 4, dropout=0.0, schema=SCHEMA).double().eval()
    batch = typed.batch()
    own = RowsByNodeType(typed.node_type, [x[typed.node_type == kind] for kind in range(3)])
    expected = model(own, batch.edge_index, edge_type=batch.edge_type)
    given = to_sparse(x) if sparse else x
    found = model(given, batch.edge_index, edge_type=batch.edge_type, node_type=typed.node_type)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    source = TypedSource(typed, chunk=7)
    source.gather = lambda nodes, table=None: (
        torch.from_numpy(table[nodes]) if table is not None else to_sparse(x[nodes]) if sparse else x[nodes]
    )
    table = layerwise_inference(model, source, 9).table
    torch.testing.assert_close(torch.from_numpy(table).double(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_nodes_without_any_features_have_the_vector_of_their_node_type():
    typed = hetero_graph(ONE_NODE_TYPE)
    batch = typed.batch()
    model = RGCN(0, 8, 4, dropout=0.0, schema=ONE_NODE_TYPE).double().eval()
    out = model(None, batch.edge_index, edge_type=batch.edge_type, node_type=typed.node_type)
    vector = model.type_vectors.expand(NUM_NODES, -1)
    torch.testing.assert_close(model.map_features(None, typed.node_type), vector.relu())
    assert out.shape == (NUM_NODES, 4)
    with pytest.raises(ValueError, match=said("RGCN inputs=DistributedEmbedding")):
        model(None, batch.edge_index, edge_type=batch.edge_type)
    several = RGCN(WIDTHS, 8, 4, schema=SCHEMA)
    with pytest.raises(ValueError, match=said("RGCN node_type")):
        several(torch.zeros(3, 6), torch.zeros(2, 0, dtype=torch.int64))
