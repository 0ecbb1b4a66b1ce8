"""Predictions of a new version of a store: computed where the change can have altered them, else those of before."""

import logging

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import changed_outputs
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE
from tests.says import said

NUM, DIM = 300, 5


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A store of a long ring with chords, one way and both ways, and its next version."""
    made = {}
    for both in (False, True):
        rng, around = np.random.default_rng(1), np.arange(NUM)
        edges = np.concatenate([[around, (around + 1) % NUM], [around[::9], (around[::9] + 3) % NUM]], axis=1)
        stream = gs.open_edge_stream(edges, num_nodes=NUM, to_undirected=both)
        parts = gs.partition(stream, method="random", num_parts=3, seed=0)
        features = rng.standard_normal((NUM, DIM)).astype(np.float32)
        root = tmp_path_factory.mktemp("stores") / "ring"
        old = gs.write_partition_store(root, stream, parts, features=features)
        new = gs.update_store(
            old, nodes=[NUM, 17], features=rng.standard_normal((2, DIM)).astype(np.float32), removed_nodes=[50],
            edges=np.array([[100, NUM, 40], [NUM, 120, 200]]), removed_edges=np.array([[210], [211]]),
        )  # fmt: skip
        made[both] = old, new
    return made


def make(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    backbone = kind(DIM, 8, 3, num_layers=2, **({} if kind is SGC else {"dropout": 0.5}))
    return gs.NodeClassifier(backbone, predict_logits=True, **options).to(dtype)


def predict(module, store, path, earlier=()):
    """Write predictions, and return the nodes that were computed, and the table."""
    computed = []
    data = gs.PartitionDataModule(store=store, sampler=gs.NeighborSampler([-1, -1]))
    trainer = L.Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", precision="64-true" if module.dtype == torch.float64 else "32-true",
        callbacks=[gs.PredictionWriter(path, earlier=earlier)],
    )  # fmt: skip
    decide = module.decide
    module.decide = lambda outputs: computed.append(len(outputs)) or decide(outputs)
    try:
        trainer.predict(module, data)
    finally:
        del module.decide
    return sum(computed), pq.read_table(path)


def told(caplog):
    lines = (record.getMessage() for record in caplog.records if record.name == changed_outputs._log.name)
    return list(dict.fromkeys(lines))  # where Lightning's loggers do propagate, each comes twice


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger=changed_outputs._log.name)
    changed_outputs._log.addHandler(caplog.handler)  # Lightning's loggers may not propagate
    yield
    changed_outputs._log.removeHandler(caplog.handler)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, SGC])
def test_they_are_those_of_a_full_pass(versions, tmp_path, caplog, kind, both):
    (old, new), module = versions[both], make(kind)
    before, every, few = (tmp_path / f"{name}.parquet" for name in ("before", "every", "few"))
    assert predict(module, old, before)[0] == NUM
    num_all, expected = predict(module, new, every)
    num_few, joined = predict(module, new, few, [tmp_path / "none.parquet", before])
    assert num_all == new.num_nodes == NUM and 5 < num_few < 60
    assert joined["node"].equals(expected["node"])
    found, wanted = (np.array(table["prediction"].to_pylist()) for table in (joined, expected))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    (line,) = told(caplog)
    assert f"{num_few} of 300 nodes are computed again, what 1 new, 1 with changed features" in line


def test_no_row_less_is_computed_than_differs(versions, tmp_path):
    """Nodes whose outputs differ are all among those that are computed; in-degrees of sources reach one hop more."""
    (old, new), sizes = versions[False], {}
    for kind in (GraphSAGE, GCN):
        before, every = (predict(make(kind), one, tmp_path / "p.parquet")[1].to_pydict() for one in (old, new))
        earlier = dict(zip(before["node"], before["prediction"], strict=True))
        rows = zip(every["node"], every["prediction"], strict=True)
        differs = {node for node, row in rows if node not in earlier or not np.allclose(row, earlier[node], atol=1e-13)}
        source = changed_outputs.StoreLayerSource(new, [0, 1, 2], None)
        found = changed_outputs.altered_nodes(source, new.changes(), 2, kind.needs_degree)
        assert differs <= set(new.user_ids(found.within(0, NUM)).tolist())
        sizes[kind] = len(found)
    assert sizes[GraphSAGE] < sizes[GCN]


def test_all_are_computed_where_nothing_fits(versions, tmp_path, caplog):
    (old, new), module, path = versions[False], make(GCN), tmp_path / "some.parquet"
    before = tmp_path / "before.parquet"
    assert predict(module, new, path, [before])[0] == NUM  # no file
    predict(module, old, before)
    assert predict(module, old, path, [before])[0] == NUM
    other = make(GCN)
    torch.nn.init.ones_(next(other.parameters()))
    assert predict(other, new, path, [before])[0] == NUM
    predict(module, new, before)
    assert predict(module, new, path, [before])[0] == NUM
    ends = [line.partition("are computed: ")[2] for line in told(caplog)]
    assert ends == [
        "there are none of the version before",
        f"{old.root} is no update of another store",
        f"those of {before} are of another model or precision",
        f"those of {before} are of another version",
    ]


def test_a_change_that_reaches_most_is_computed_for_all(versions, tmp_path, caplog, monkeypatch):
    old, new = versions[False]
    predict(make(GCN), old, tmp_path / "before.parquet")
    monkeypatch.setattr(changed_outputs, "MOST", 0.01)
    assert predict(make(GCN), new, tmp_path / "all.parquet", [tmp_path / "before.parquet"])[0] == NUM
    assert "the change reaches more than half of them in 2 layers" in told(caplog)[0]


def test_a_file_that_lacks_a_node_is_refused(versions, tmp_path):
    old, new = versions[False]
    path = tmp_path / "before.parquet"
    predict(make(GCN), old, path)
    pq.write_table(pq.read_table(path).slice(3), path)
    with pytest.raises(GNNScaleError, match=said("before.parquet no prediction of node 0 changed=false")):
        predict(make(GCN), new, tmp_path / "new.parquet", [path])
