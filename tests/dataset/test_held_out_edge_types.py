"""Links held out of heterogeneous graphs:

none comes back, by any edge type, and negatives are of the right node type.
"""

import lightning as L
import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset, load_pyg
from tests.says import said

COUNTS = {"author": 70, "paper": 90, "inst": 12}
RELATIONS = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("author", "at", "inst")]
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:.*does not have many workers")


def edges_by_relation(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        (a, name, b): np.unique(np.stack([rng.integers(0, COUNTS[a], 700), rng.integers(0, COUNTS[b], 700)]), axis=1)
        for a, name, b in RELATIONS
    }


def description(edges=None, **options) -> gs.GraphDataset:
    rng = np.random.default_rng(1)
    nodes = {node_type: {"features": rng.random((count, 4), np.float32)} for node_type, count in COUNTS.items()}
    return gs.hetero_graph(nodes, edges_by_relation() if edges is None else edges, **options)


def offsets() -> dict[str, int]:
    return dict(zip(COUNTS, np.cumsum([0, *COUNTS.values()])[:-1].tolist(), strict=True))


def triples_of(dataset: GraphDataset) -> set:
    """Listed edges of a stream, as (source, edge type, target)."""
    found, at = set(), 0
    for chunk in dataset.stream.chunks():
        relation = dataset.stream.edge_type_of(np.arange(at, at + len(chunk.src)))
        found |= set(zip(chunk.src.tolist(), relation.tolist(), chunk.dst.tolist(), strict=True))
        at += len(chunk.src)
    return found


def links_of(links: gs.LinkSet) -> set:
    return set(zip(links.edges[0].tolist(), links.edge_type.tolist(), links.edges[1].tolist(), strict=True))


def without_order(triples: set, relation: int) -> set:
    return {(*sorted((a, b)), r) if r == relation else (a, b, r) for a, r, b in triples}


def stored(root, dataset, parts=3):
    p = gs.partition(dataset.stream, "random", parts, evaluate=False)
    return gs.write_partition_store(root, dataset.stream, p, features=dataset.features)


def edges_of(store) -> set:
    """All edges of a store in original ids, with their edge types."""
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    ends = np.asarray(store.original_nid)[np.stack([np.asarray(store.csc.indices), target])]
    return set(zip(ends[0].tolist(), store.edge_type.tolist(), ends[1].tolist(), strict=True))


@pytest.mark.parametrize("options", [{}, {"separate_reverses": True}, {"to_undirected": False}])
def test_no_held_out_link_is_in_the_store_by_any_relation(tmp_path, options):
    given = description(**options)
    held = gs.hold_out_edges(given, val=0.1, test=0.2, seed=3)
    store, schema = stored(tmp_path / "s", held), held.stream.schema
    edges = edges_of(store)
    sets = {name: links_of(links) for name, links in held.links.items()}
    assert not sets["val"] & sets["test"]
    for (a, r, b), split in ((triple, name) for name, triples in sets.items() for triple in triples):
        assert (a, r, b) not in edges, split
        assert not schema.reverse or (b, schema.reverse[r], a) not in edges, split
    before, after = without_order(triples_of(given), 1), without_order(triples_of(held), 1)
    apart = [without_order(triples, 1) for triples in sets.values()]
    assert after | apart[0] | apart[1] == before and not after & (apart[0] | apart[1])
    for number in range(3):  # 4 standard deviations of a binomial over 600 are below 0.07
        total = len([one for one in before if one[2] == number])
        assert abs(len([one for one in sets["test"] if one[1] == number]) / total - 0.2) < 0.07


def test_relations_that_are_named_are_held_out_alone():
    given = description()
    for relations in (["writes"], [0], [("author", "writes", "paper")]):
        held = gs.hold_out_edges(given, test=0.3, relations=relations)
        assert {r for _, r, _ in links_of(held.links["test"])} == {0}
    assert {one for one in triples_of(given) if one[1]} == {one for one in triples_of(held) if one[1]}
    node_types = offsets()
    assert (held.links["test"].edges[0] < node_types["paper"]).all()
    assert (
        (held.links["test"].edges[1] >= node_types["paper"]) & (held.links["test"].edges[1] < node_types["inst"])
    ).all()


@pytest.mark.parametrize("named", [False, True])
def test_reverses_that_the_graph_lists_go_with_their_edges(named):
    edges = edges_by_relation()
    writes = edges["author", "writes", "paper"]
    back = "written_by" if named else "rev_writes"
    edges["paper", back, "author"] = np.ascontiguousarray(writes[::-1])
    data = HeteroData()
    for node_type, count in COUNTS.items():
        data[node_type].num_nodes = count
    for edge_type, ends in edges.items():
        data[edge_type].edge_index = torch.from_numpy(ends)
    given = load_pyg(data)
    reverses = {"written_by": "writes"} if named else None
    held = gs.hold_out_edges(given, val=0.1, test=0.2, reverses=reverses)
    kept = triples_of(held)
    assert {r for _, r, _ in kept} == {0, 1, 2, 3}
    assert {(b, a) for a, r, b in kept if r == 3} == {(a, b) for a, r, b in kept if r == 0}
    assert {r for links in held.links.values() for _, r, _ in links_of(links)} == {0, 1, 2}


def test_order_and_chunks_change_no_split_and_values_follow_their_edges():
    rng = np.random.default_rng(4)
    edges = edges_by_relation()
    weighted = {name: {"edges": ends, "weight": ends[0] * 1000.0 + ends[1]} for name, ends in edges.items()}
    reference = gs.hold_out_edges(description(weighted), seed=5)
    shuffled = {name: ends[:, rng.permutation(ends.shape[1])] for name, ends in edges.items()}
    for chunk_edges in (50, 1 << 20):
        other = gs.hold_out_edges(description(shuffled, chunk_edges=chunk_edges), seed=5)
        assert triples_of(other) == triples_of(reference)
        for split, links in reference.links.items():
            # of two edges that are each other's reverse within a node type, the first that is listed stands for both
            assert without_order(links_of(other.links[split]), 1) == without_order(links_of(links), 1)
    node_types, weights, at = offsets(), reference.edge_weight, 0
    for chunk in reference.stream.chunks():
        relation = reference.stream.edge_type_of(np.arange(at, at + len(chunk.src)))
        first = np.array([node_types[RELATIONS[r][0]] for r in relation])
        second = np.array([node_types[RELATIONS[r][2]] for r in relation])
        found = weights[at : at + len(chunk.src)]
        assert np.array_equal(found, (chunk.src - first) * 1000.0 + chunk.dst - second)
        at += len(chunk.src)
    assert at == len(weights)


def test_a_knowledge_graph_holds_out_triples():
    rng = np.random.default_rng(2)
    triples = np.unique(np.stack([rng.integers(0, 50, 900), rng.integers(0, 4, 900), rng.integers(0, 50, 900)]), axis=1)
    stream = gs.open_edge_stream(np.ascontiguousarray(triples[[0, 2]]), num_nodes=50)
    given = GraphDataset("kg", stream, edge_type=triples[1])
    held = gs.hold_out_edges(given, val=0.1, test=0.1)
    assert triples_of(held) == set(
        zip(*(held_edges(held)[0].tolist(), held.edge_type.tolist(), held_edges(held)[1].tolist()), strict=True)
    )
    sets = [links_of(links) for links in held.links.values()] + [triples_of(held)]
    assert set.union(*sets) == set(map(tuple, triples.T.tolist())) and sum(map(len, sets)) == triples.shape[1]


def held_edges(dataset) -> np.ndarray:
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in dataset.stream.chunks()], axis=1)


class Ends(torch.nn.Module):
    """Scores that follow from node numbers: the other end alone decides, differently for each edge type."""

    def forward(self, source, other, relation=None):
        return (source * other).sum(-1)


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize(
    "options",
    [
        {"positives": "neighbor", "negatives": "uniform"},
        {"positives": "walk", "corrupt": "both"},
        {"positives": "edge", "corrupt": "both"},
        {"positives": "edge", "share_negatives": True, "relations": [0, 1]},
        {"positives": "edge", "negatives": "all", "relations": [1], "corrupt": "both"},
    ],
)
def test_false_ends_are_of_the_node_type_that_they_stand_for(tmp_path, options, scope):
    store = stored(tmp_path / "s", description(), parts=2)
    sampler = gs.LinkSampler(gs.NeighborSampler([3]), num_negatives=4, **options)
    dm = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=32, scope=scope)
    dm.setup("fit")
    seen = set()
    for source in (gs.Threads(), gs.TaskGraphs()):
        dm.source = source
        for batch in dm.train_dataloader():
            node_types, size = batch.node_type, batch.pairs.shape[1]
            wanted = node_types[batch.pairs[1]][:, None]
            assert (node_types[batch.negatives].expand(size, -1) == wanted).all()
            if batch.source_negatives is not None:
                assert (
                    node_types[batch.source_negatives].expand(size, -1) == node_types[batch.pairs[0]][:, None]
                ).all()
            seen |= set(node_types[batch.pairs[1]].tolist())
            assert batch.negatives.numel()
    assert seen == ({1} if "relations" in options else {0, 1, 2} if options["positives"] != "edge" else {1, 2})


def test_shared_false_ends_of_several_node_types_are_refused(tmp_path):
    store = stored(tmp_path / "s", description(), parts=2)
    for options in ({"positives": "edge", "negatives": "all"}, {"share_negatives": True}):
        dm = gs.PartitionDataModule(store=store, sampler=gs.LinkSampler(gs.NeighborSampler([2]), **options))
        with pytest.raises(ValueError, match=said("shares negatives node type")):
            dm.setup("fit")


@pytest.mark.parametrize("negatives", ["auto", 7])
def test_links_are_ranked_among_nodes_of_the_node_type(tmp_path, monkeypatch, negatives):
    held = gs.hold_out_edges(description(), val=0, test=0.1, relations=["writes", "at"])
    store = stored(tmp_path / "s", held)
    mode = "layerwise" if negatives == "auto" else "sampled"
    options = gs.EvaluationOptions(mode, links=held.links, negatives=negatives)
    sampler = gs.LinkSampler(gs.NeighborSampler([2]), "edge")
    dm = gs.PartitionDataModule(store=store, sampler=sampler, evaluation=options)
    dm.setup("test")
    if negatives == 7:
        for batch in dm.test_dataloader():
            node_types = batch.node_type
            assert (node_types[batch.negatives] == node_types[batch.pairs[1]][:, None]).all()
            assert torch.equal(node_types[batch.pairs[1]], torch.where(batch.pair_type == 0, 1, 2))
        return
    torch.manual_seed(0)
    widths = dict.fromkeys(COUNTS, 4)
    backbone = gs.model.RGCN(widths, 8, 6, num_layers=1, schema=store.schema.as_json())
    module = gs.LinkPredictor(backbone, hits=[1], decoder=Ends())
    run = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    ranked, update = [], module._update

    def kept(split, ranks, losses):
        ranked.append(ranks)
        update(split, ranks, losses)

    monkeypatch.setattr(module, "_update", kept)
    run.test(module, dm, verbose=False)
    (predicted,) = run.predict(module, dm)
    table = torch.empty_like(predicted["prediction"])
    table[torch.from_numpy(np.asarray(store.original_nid)[predicted["nodes"]])] = predicted["prediction"]
    expected, links, true = [], held.links["test"], links_of(held.links["test"]) | triples_of(held)
    node_types = [*offsets().values(), sum(COUNTS.values())]
    for reverse in (False, True):
        for head, tail, relation in zip(*links.edges.tolist(), links.edge_type.tolist(), strict=True):
            known, answer = (tail, head) if reverse else (head, tail)
            node_type = list(COUNTS).index(RELATIONS[relation][0 if reverse else 2])
            false = [
                node for node in range(node_types[node_type], node_types[node_type + 1])
                if node != answer and ((node, relation, tail) if reverse else (head, relation, node)) not in true
            ]  # fmt: skip
            scores = table[false] @ table[known]
            score = table[answer] @ table[known]
            expected.append(1 + int((scores > score + 1e-6).sum()) + int(((scores - score).abs() <= 1e-6).sum()) / 2)
    assert len(set(expected)) > 10
    assert np.sort(torch.cat(ranked).numpy()) == pytest.approx(np.sort(expected))


def test_it_is_chosen_by_config(tmp_path):
    edges = {",".join(name): ends for name, ends in edges_by_relation().items()}
    held = gs.hetero_graph(nodes=COUNTS, edges=edges, hold_out={"test": 0.2, "val": 0, "relations": ["at"]})
    assert set(held.links) == {"test"} and set(held.links["test"].edge_type.tolist()) == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relations": ["reads"]}, "edge type 'reads'"),
        ({"relations": [5]}, "hold_out.relations 5"),
        ({"relations": "writes"}, "hold_out.relations 'writes'"),
        ({"reverses": {"cites": "writes"}}, "hold_out.reverses paper,cites,paper lead"),
        ({"by_time": True}, "hold_out.by_time=True edge_time"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(options, message):
    edges = {",".join(name): ends for name, ends in edges_by_relation().items()}
    with pytest.raises(ValueError, match=said(message)):
        gs.hetero_graph(nodes=COUNTS, edges=edges, hold_out=options)
    plain = GraphDataset("g", gs.open_edge_stream(np.array([[0, 1], [1, 2]])))
    with pytest.raises(ValueError, match=said("relations graph edge types")):
        gs.hold_out_edges(plain, relations=["writes"])
