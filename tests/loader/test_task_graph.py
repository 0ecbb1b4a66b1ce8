"""Task graphs: batches as `BatchMaker` makes them, links in three branches, orders of tasks."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.parts import small_world

import lightning_gnnscale as gs
from lightning_gnnscale.loader.batch_graph import BatchGraph, Task, batch_bytes
from lightning_gnnscale.loader.batch_maker import BatchMaker
from lightning_gnnscale.loader.operators import FanoutNeighborhood, LinkNegatives, LinkPositives
from lightning_gnnscale.loader.staged_part import PartStager, node_values
from lightning_gnnscale.loader.task_graph import Operators, Workflow
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import Column, CSRFeatures
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import NeighborSampler, Subgraph
from tests.says import said
from tests.tiers import all_pairs

WORLD = small_world(num_parts=3)
WEIGHT = np.random.default_rng(0).uniform(0.5, 2, WORLD.csc.num_edges).astype(np.float32)
PLACED = gs.Placement((np.arange(0, 300, 3),), ((0,),), 300, None, {}, (), "test", "")
SAMPLERS = {
    "uniform": NeighborSampler([4, 3, 2]),
    "all": NeighborSampler([-1, 2]),
    "replace": NeighborSampler([4, 3], replace=True),
    "locality": NeighborSampler([4, 3], locality=gs.LocalityBias(PLACED, 4.0, neighbor_set_size=30)),
}
KEY = batch_key(1, 2, 0, 3)


def stage(sampler, whole=False, part=0, edges=None):
    targets = {p: WORLD.targets(p) for p in range(3)}
    if whole:
        targets = {0: np.concatenate(list(targets.values()))}
    load_part = (lambda number: WholeGraph.of(WORLD.csc, number)) if whole else WORLD.load_part
    return PartStager(load_part, targets, sampler, node_values(WORLD.labels, WORLD.masks), 1, edges or {})(part)


def contents(batch) -> dict:
    values = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        tensors = value if isinstance(value, tuple) else (value,)
        values[field.name] = [v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for v in tensors]
    return values


def run(graph: BatchGraph, order=None):
    for number in range(len(graph.tasks)) if order is None else order:
        assert graph.tasks[number].cost() >= 0
        graph.tasks[number].run()
    return graph.result()


def random_order(graph: BatchGraph, sample) -> list[int]:
    """Any order that the dependencies allow."""
    done, order = set(), []
    while len(order) < len(graph.tasks):
        ready = [t.number for t in graph.tasks if t.number not in done and done.issuperset(t.dependencies)]
        order.append(sample(ready))
        done.add(order[-1])
    return order


def sparse_features() -> CSRFeatures:
    dense = np.random.default_rng(0).random((300, 20)) < 0.2
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=300))])
    return CSRFeatures(indptr, columns.astype(np.int32), np.ones(len(rows), np.float32), 20)


FEATURES = {"dense": WORLD.features, "sparse": sparse_features(), "none": None}


@all_pairs
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("edges", [False, True])
def test_a_supervised_batch_is_the_makers(name, whole, features, edges):
    sampler = SAMPLERS[name]
    staged = stage(sampler, whole, edges={"edge_weight": WEIGHT} if edges else None)
    maker = BatchMaker(sampler, FEATURES[features], return_e_id=edges)
    whole_hops, chunks = (Workflow(maker, Operators(FanoutNeighborhood(sampler)), chunks=n) for n in (1, 3))
    assert len(chunks.tasks) > len(whole_hops.tasks)
    for number, items in enumerate(staged.items(sampler, 16, False, 1, 0, True)):
        key = batch_key(1, 0, 0, number)
        expected = contents(maker.build(staged, items, key))
        # Fetching first wants space before the size is known; sampling first knows it.
        for flow in (whole_hops, chunks):
            graphs = [flow.instance(number, key, staged, items) for _ in range(2)]
            eager = random_order(graphs[0], lambda ready: min(ready, key=lambda n: flow.tasks[n].kind != "fetch"))  # noqa: B023
            assert contents(run(graphs[0], eager)) == contents(run(graphs[1])) == expected


LINKED = Operators(
    FanoutNeighborhood(SAMPLERS["uniform"]), positives=LinkPositives(gs.sampler.sample_positives),
    negatives=LinkNegatives(gs.sampler.sample_negatives, 4),
)  # fmt: skip


@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data(), linked=st.booleans())
def test_any_order_that_dependencies_allow_gives_the_same_batch(data, linked):
    staged = stage(SAMPLERS["uniform"])
    maker = BatchMaker(SAMPLERS["uniform"], WORLD.features)
    operators = LINKED if linked else Operators(FanoutNeighborhood(SAMPLERS["uniform"]))
    workflow = Workflow(maker, operators, chunks=data.draw(st.sampled_from([1, 2, 5])))
    items = staged.state.targets[:20]
    expected = contents(run(Workflow(maker, operators).instance(0, KEY, staged, items)))
    graph = workflow.instance(1, KEY, staged, items)
    order = random_order(graph, lambda ready: data.draw(st.sampled_from(ready)))
    assert contents(run(graph, order)) == expected


def test_dependencies_of_the_logical_graph():
    """A hop is sampled after the one before it, fetched after it is sampled, and the end comes last."""
    for operators in (LINKED, Operators(FanoutNeighborhood(SAMPLERS["uniform"]))):
        workflow = Workflow(BatchMaker(SAMPLERS["uniform"], WORLD.features), operators)
        tasks = workflow.tasks
        before = [set(task.dependencies) for task in tasks]
        for number, task in enumerate(tasks):
            assert all(other < number for other in task.dependencies)
            for other in task.dependencies:
                before[number] |= before[other]
        found = {(t.kind, t.branch, t.hop): n for n, t in enumerate(tasks)}
        assert len(found) == len(tasks)
        first = ("seeds", "positives", "negatives")
        for branch in range(workflow.num_branches):
            for hop in range(4):
                sampled = found["neighborhood" if hop else first[branch], branch, hop]
                fetched = found["fetch", branch, hop]
                assert sampled in before[fetched]
                later = [found["neighborhood", b, h] for b in range(workflow.num_branches) for h in range(hop + 1, 4)]
                assert not before[fetched].intersection(later)
                if hop:
                    assert found["neighborhood" if hop > 1 else first[branch], branch, hop - 1] in before[sampled]
        assert before[-1] == set(range(len(tasks) - 1))


def test_costs_are_neighbours_and_values():
    staged = stage(SAMPLERS["uniform"])
    maker = BatchMaker(SAMPLERS["uniform"], WORLD.features)
    workflow = Workflow(maker, Operators(FanoutNeighborhood(SAMPLERS["uniform"])))
    graph = workflow.instance(0, KEY, staged, staged.state.targets[:16])
    costs = []
    for task in graph.tasks:
        costs.append(task.cost())
        task.run()
    batch = graph.result()
    starts = np.cumsum([0, *batch.num_sampled_nodes])
    place = {int(node): i for i, node in enumerate(staged.graph.nodes)}
    degree = np.diff(staged.graph.csc.indptr)[[place[int(node)] for node in batch.n_id]]
    for number, task in enumerate(workflow.tasks):
        if task.kind == "neighborhood":
            assert costs[number] == degree[starts[task.hop - 1] : starts[task.hop]].sum()
        elif task.kind == "fetch":
            assert costs[number] == batch.num_sampled_nodes[task.hop] * 16


def rows_of(batch) -> dict[int, list]:
    """Sources of each target by position."""
    indptr, n_id = batch.indptr.tolist(), batch.n_id.tolist()
    return {
        t: [n_id[s] for s in batch.edge_index[0, indptr[t] : indptr[t + 1]].tolist()] for t in range(len(indptr) - 1)
    }


@pytest.mark.parametrize("whole", [False, True])
def test_links_have_three_branches_side_by_side(whole):
    staged = stage(SAMPLERS["uniform"], whole, edges={"edge_weight": WEIGHT})
    maker = BatchMaker(SAMPLERS["uniform"], WORLD.features, return_e_id=True)
    seeds = staged.state.targets[:20]
    graph = Workflow(maker, LINKED).instance(0, KEY, staged, seeds)
    batch = run(graph)
    n_id = batch.n_id.numpy()
    np.testing.assert_array_equal(batch.x.numpy(), WORLD.features.array[n_id])
    np.testing.assert_array_equal(batch.y.numpy(), WORLD.labels[n_id])
    np.testing.assert_array_equal(np.diff(batch.indptr).sum(), batch.num_edges)
    assert batch.edge_index[1].tolist() == sorted(batch.edge_index[1].tolist())
    assert sum(batch.num_sampled_nodes) == batch.num_nodes
    assert sum(batch.num_sampled_edges) == batch.num_edges
    assert batch.num_targets == batch.num_nodes - batch.num_sampled_nodes[-1]
    source, target = n_id[batch.edge_index.numpy()]
    np.testing.assert_array_equal(WORLD.csc.indices[batch.e_id.numpy()], source)
    local = batch.n_id[: len(seeds)].numpy()
    np.testing.assert_array_equal(local, staged.graph.core_start + seeds)
    for seed, other in batch.pairs.T.tolist():
        row = WORLD.csc.indices[WORLD.csc.indptr[n_id[seed]] : WORLD.csc.indptr[n_id[seed] + 1]]
        assert n_id[other] in row and seed < len(seeds) <= other
    assert batch.negatives.shape == (batch.pairs.shape[1], 4)
    assert int(batch.negatives.min()) > int(batch.pairs.max())
    assert int(batch.negatives.max()) < batch.batch_size
    # The branch of the seeds is the batch that the seeds alone would be.
    alone = run(Workflow(maker, Operators(FanoutNeighborhood(SAMPLERS["uniform"]))).instance(0, KEY, staged, seeds))
    joined, single = rows_of(batch), rows_of(alone)
    for target in range(len(seeds)):
        assert joined[target] == single[target]
    assert batch_bytes(batch) == graph.num_bytes() > batch.x.nbytes


def test_branches_of_the_whole_batch_stay_apart():
    """Following edges from a seed reaches the nodes of its own branch alone."""
    staged = stage(SAMPLERS["uniform"])
    maker = BatchMaker(SAMPLERS["uniform"], WORLD.features)
    batch = run(Workflow(maker, LINKED).instance(0, KEY, staged, staged.state.targets[:20]))
    label = np.full(batch.num_nodes, -1)
    label[:20] = 0
    label[20 : int(batch.negatives.min())] = 1
    first_negative = len(np.unique(batch.pairs[1].numpy())) + 20
    label[: batch.batch_size] = np.where(np.arange(batch.batch_size) < 20, 0, 1)
    label[first_negative : batch.batch_size] = 2
    for source, target in batch.edge_index.T.tolist():
        assert label[source] in (-1, label[target])
        label[source] = label[target]
    assert (label >= 0).all()
    assert len({(int(n), int(b)) for n, b in zip(batch.n_id, label, strict=True)}) == batch.num_nodes


class FirstNeighbors:
    """A user's own neighbourhood: the first neighbour of every node, one hop."""

    num_hops = 1

    def begin(self, staged, seeds, key, workspace, return_e_id):
        return _First(staged.graph.csc, seeds)


class _First:
    def __init__(self, csc, seeds):
        self.csc, self.nodes, self.rows = csc, list(seeds), []
        self.newest, self.num_neighbors = np.asarray(seeds), len(seeds)

    def sample(self):
        seeds = list(self.nodes)
        for seed in seeds:
            row = self.csc.indices[self.csc.indptr[seed] : self.csc.indptr[seed + 1]][:1]
            self.rows.append([int(u) for u in row])
            self.nodes += [int(u) for u in row if int(u) not in self.nodes]
        self.newest = np.array(self.nodes[len(seeds) :], np.int64)

    def collect(self, allocate):
        indptr = np.cumsum([0] + [len(row) for row in self.rows])
        edges = [(self.nodes.index(u), t) for t, row in enumerate(self.rows) for u in row]
        num = len(self.rows)
        edge_index = np.array(edges, np.int64).T.copy()
        counts = [num, len(self.nodes) - num]
        return Subgraph(np.array(self.nodes), edge_index, indptr, num, None, counts, [len(edges)])


class EveryOther:
    """A user's own seeds: every other item."""

    def sample(self, staged, items, key):
        return items[::2]


class Doubled(Column):
    """A user's own rows: twice the stored ones."""

    is_sparse, dim, dtype = False, 16, np.dtype(np.float32)

    def read(self, nodes, out=None):
        out[:] = 2 * WORLD.features.array[nodes]
        return out


def test_a_users_operators_take_the_place_of_ours():
    staged = stage(SAMPLERS["uniform"])
    maker = BatchMaker(SAMPLERS["uniform"], WORLD.features)
    operators = Operators(FirstNeighbors(), seeds=EveryOther(), fetch=Doubled())
    items = staged.state.targets[:10]
    batch = run(Workflow(maker, operators).instance(0, KEY, staged, items))
    assert batch.n_id[:5].tolist() == (staged.graph.core_start + items[::2]).tolist()
    np.testing.assert_array_equal(batch.x.numpy(), 2 * WORLD.features.array[batch.n_id.numpy()])
    for target, row in rows_of(batch).items():
        node = int(batch.n_id[target])
        assert row == WORLD.csc.indices[WORLD.csc.indptr[node] : WORLD.csc.indptr[node + 1]][:1].tolist()


def test_bad_graphs_are_refused():
    nothing = lambda: None  # noqa: E731
    with pytest.raises(ValueError, match=said("number 0 [1]")):
        BatchGraph([Task(0, 0, "a", [1], nothing, nothing), Task(0, 1, "b", [], nothing, nothing)], nothing)
    with pytest.raises(ValueError, match="at least one task"):
        BatchGraph([], nothing)
    with pytest.raises(ValueError, match=said("negatives=None")):
        Operators(FanoutNeighborhood(SAMPLERS["uniform"]), positives=LINKED.positives)
    with pytest.raises(ValueError, match=said("num_negatives 1 0")):
        LinkNegatives(None, 0)
