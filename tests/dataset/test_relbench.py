"""Databases in RelBench's form: rows, keys, times and tasks become nodes, edges, times and labels."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import load_relbench
from lightning_gnnscale.values import ALWAYS
from tests.says import said

DAY = np.timedelta64(1, "D").astype("timedelta64[ns]")
START = np.datetime64("2020-01-01", "ns")


def write(path, columns: dict, key=None, time=None, foreign=None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"pkey_col": key, "time_col": time, "fkey_col_to_pkey_table": foreign or {}}
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata({name: json.dumps(value) for name, value in facts.items()}), path)


@pytest.fixture
def folder(tmp_path):
    rng, root = np.random.default_rng(0), tmp_path / "rel-shop"
    users, items, reviews = np.array([f"u{i}" for i in range(60)]), np.arange(20) * 3 + 5, 400
    people = {"user": users, "age": rng.integers(18, 80, 60), "land": ["a", "b", None] * 20}
    write(root / "db/users.parquet", people, "user")
    goods = {"item": items, "price": rng.random(20), "text": [f"word {i}" for i in range(20)]}
    write(root / "db/items.parquet", goods, "item")
    when = START + rng.integers(0, 300, reviews) * DAY
    of_user = [None if i % 40 == 0 else str(users[i % 60]) for i in range(reviews)]
    columns = {"user": of_user, "item": rng.choice(items, reviews), "stars": rng.integers(1, 6, reviews), "at": when}
    write(root / "db/reviews.parquet", columns, None, "at", {"user": "users", "item": "items"})
    for split, first in (("train", 100), ("val", 200), ("test", 250)):
        asked = START + np.full(60, first) * DAY
        rows = {"date": asked, "user": users, "churn": rng.integers(0, 2, 60), "spent": rng.random(60)}
        write(root / f"tasks/user-churn/{split}.parquet", rows, None, "date", {"user": "users"})
    return root


@pytest.mark.filterwarnings("ignore:.*not read")
def test_tables_keys_and_tasks_are_node_types_relations_and_seeds(folder):
    data = load_relbench(str(folder), "user-churn", target="churn")
    assert data.schema.node_types == ("items", "reviews", "users", "task")
    assert data.schema.edge_types[:3] == (
        ("reviews", "f2p_user", "users"),
        ("reviews", "f2p_item", "items"),
        ("users", "asked", "task"),
    )
    counts = np.diff(data.stream.type_offsets).tolist()
    assert counts == [20, 400, 60, 180]
    reviews = pq.read_table(folder / "db/reviews.parquet").to_pydict()
    users = pq.read_table(folder / "db/users.parquet").to_pydict()["user"]
    edges = [(chunk.src, chunk.dst, chunk.first_edge) for chunk in data.stream.chunks()]
    src, dst = (np.concatenate([chunk[end] for chunk in edges]) for end in (0, 1))
    relation = data.stream.edge_type_of(np.arange(len(src)))
    first = data.stream.type_offsets
    mine = {(int(u), int(v)) for u, v in zip(src[relation == 0] - first[1], dst[relation == 0] - first[2], strict=True)}
    assert mine == {(row, users.index(user)) for row, user in enumerate(reviews["user"]) if user is not None}
    assert (relation == 1).sum() == 400 and (relation == 2).sum() == 180
    seconds = np.array(reviews["at"], "datetime64[s]").astype(np.int64)
    assert np.array_equal(data.node_time[first[1] : first[2]], seconds)
    assert (data.node_time[: first[1]] == ALWAYS).all()
    assert np.array_equal(data.edge_time[relation == 0], seconds[src[relation == 0] - first[1]])
    assert data.masks["train"].sum() == data.masks["val"].sum() == data.masks["test"].sum() == 60
    assert data.feature_dims == {"items": 21, "reviews": 2, "users": 3, "task": 0}


def test_what_is_not_read_is_named(folder):
    goods = {"item": np.arange(20) * 3 + 5, "price": np.ones(20), "tags": [["a"]] * 20}
    write(folder / "db/items.parquet", goods, "item")
    with pytest.warns(UserWarning, match=said("items.tags")):
        load_relbench(str(folder), "user-churn", target="churn")


@pytest.mark.filterwarnings("ignore:.*not read", "ignore:.*listed more often")
@pytest.mark.parametrize(("target", "regression"), [("churn", False), ("spent", True)])
def test_batches_of_a_task_look_at_the_past_alone(folder, tmp_path, target, regression):
    data = load_relbench(str(folder), "user-churn", target=target, regression=regression)
    sampler = gs.NeighborSampler({"*": [5, 5], "rev_asked": [0, 0]}, temporal_strategy="uniform")
    options = {"sampler": sampler, "evaluation": "sampled", "batch_size": 16}
    dm = gs.PartitionDataModule(dataset=data, root=tmp_path / "store", num_parts=2, **options)
    dm.prepare_data()
    dm.setup("fit")
    assert dm.store.regression is regression and dm.num_classes == (1 if regression else 2)
    seen = 0
    for batch in dm.train_dataloader():
        assert (batch.edge_time <= batch.seed_time[batch.seed_of[batch.edge_index[1]]]).all()
        assert (batch.node_type[: batch.batch_size] == 3).all()
        seen += batch.batch_size
        if regression:
            assert batch.y.shape == (batch.num_nodes, 1) and batch.y[: batch.batch_size].isfinite().all()
    assert seen == 60


def test_a_task_or_a_key_that_there_is_not_is_one_line(folder):
    with pytest.raises(FileNotFoundError, match=said("'user-ltv' user-churn")):
        load_relbench(str(folder), "user-ltv")
    with pytest.raises(ValueError, match="name one of them"):
        load_relbench(str(folder), "user-churn")
    columns = {"user": ["u0", "nobody"], "item": [5, 8], "stars": [1, 2], "at": np.array([START, START])}
    write(folder / "db/reviews.parquet", columns, None, "at", {"user": "users", "item": "items"})
    with pytest.raises(ValueError, match=said("reviews.user 'nobody'")):
        load_relbench(str(folder), "user-churn", target="churn")
    with pytest.raises(FileNotFoundError, match="holds no tables"):
        load_relbench(str(folder / "tasks"), "user-churn")
