"""`gnnscale update STORE`: files of what came, changed and went; one line where they do not fit."""

from pathlib import Path

import numpy as np
import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.dataset import hetero_graph
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import PartitionStore, load_store, write_partition_store
from tests.partition_store.small_graphs import Given

NAMES = np.array(list("abcdefgh"))
RING = np.stack([np.arange(8), (np.arange(8) + 1) % 8])


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    """A ring of eight named nodes in two parts, and files of a change."""
    monkeypatch.chdir(tmp_path)
    stream = open_edge_stream(NAMES[RING], nodes=NAMES, to_undirected=True)
    columns = {"features": np.eye(8, 2), "labels": np.arange(8) % 2, "masks": {"train": np.arange(8) < 4}}
    write_partition_store("ring", stream, Given(np.arange(8) // 4, 2), **columns)
    Path("new.csv").write_text("src,dst\ni,a\nb,d\n")
    Path("nodes.csv").write_text("id,x,y,label,split\ni,1,2,1,train\na,1,0,1,none\n")
    Path("gone.csv").write_text("src,dst\na,b\n")
    Path("gone_nodes.csv").write_text("id\nh\n")


ALL = ["change.edges=new.csv", "change.nodes=nodes.csv:id", "change.features=nodes.csv:x,y", "drift=9",
       "change.labels=nodes.csv:label", "change.masks=nodes.csv:split"]  # fmt: skip


def test_files_make_the_next_version(capsys):
    main(["update", "ring", *ALL, "change.removed_edges=gone.csv", "change.removed_nodes=gone_nodes.csv:id"])
    told = capsys.readouterr().out
    assert (
        "ring-v1: version 1" in told and ": 1 new nodes, 1 removed nodes, 1 nodes with changed labels or masks" in told
    )
    store = PartitionStore.open("ring-v1")
    names = store.user_ids(np.arange(store.num_nodes))
    assert sorted(names) == list("abcdefgi") and store.num_edges == 2 * (8 - 2 - 1 + 2)
    assert sorted(names[store.masks["train"]]) == ["b", "c", "d", "i"]
    main(["update", "ring-v1", "change.removed_edges=new.csv", "output=other", "drift=9"])
    assert PartitionStore.open("other").version["number"] == 2
    main(["inspect", "ring-v1"])
    assert "version 1 of ring" in capsys.readouterr().out


def test_a_data_set_is_a_change(capsys):
    words = ["dataset=files", "dataset.edges=new.csv", "dataset.nodes=nodes.csv:id", "dataset.features=nodes.csv:x,y"]
    Path("new.csv").write_text("src,dst\ni,a\n")
    main(["update", "ring", *words, "change.removed_nodes=gone_nodes.csv:id", "drift=9"])
    assert "1 new nodes, 1 removed nodes, 1 new edges" in capsys.readouterr().out


def test_a_version_is_partitioned_anew_without_its_data_set(capsys):
    main(["update", "ring", *ALL])
    words = ["num_parts=3", "partitioner=random", "output=again", "pack_halo=false"]
    main(["partition", "dataset=store", "dataset.store=ring-v1", *words])
    again, before = PartitionStore.open("again"), PartitionStore.open("ring-v1")
    assert again.num_parts == 3 and again.num_edges == before.num_edges and again.manifest["to_undirected"]
    assert sorted(again.user_ids(np.arange(9))) == list("abcdefghi")
    assert load_store(again).name == "again"


def test_a_store_that_is_in_the_way_is_told_by_the_settings(capsys):
    main(["update", "ring", "change.removed_nodes=gone_nodes.csv:id", "drift=9"])
    told = refused(capsys, "update", "ring", "change.removed_edges=gone.csv")
    assert "replace it with overwrite=true or choose another output=" in told
    assert "output must be another folder than the store's" in refused(capsys, "update", "ring", "output=ring")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["ring", "change.edges=new.csv"], "node 'i' is neither in the store nor among the new nodes"),
        (["ring", "change.edges=missing.csv"], "missing.csv"),
        (["none", "change.edges=new.csv"], "no such partition store"),
        (["ring", "other"], "update takes one store, got ring other"),
        (["ring", "change.edge=new.csv"], "change.edge"),
        (["ring", "slack=-1"], "slack must be a number of at least 0, got -1"),
        (
            ["ring", *ALL, "dataset=files", "dataset.edges=new.csv", "dataset.relabel=true"],
            "is given besides a data set",
        ),
        ([], "store"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(capsys, words, part):
    assert part in refused(capsys, "update", *words)
    assert not list(Path().glob("ring-v1*"))


@pytest.fixture
def shop():
    """A store of users and items with times and names, reverses added, and files of a change."""
    nodes = {
        "user": {"nodes": ["a", "b"], "features": np.eye(2, 3)},
        "item": {"nodes": ["x", "y", "z"], "time": [1, 2, 3]},
    }
    bought = {"edges": (np.array(["a", "b"]), np.array(["x", "y"])), "time": [4, 5]}
    graph = hetero_graph(nodes, {"user,buys,item": bought, "item,beside,item": (np.array(["x"]), np.array(["z"]))},
                         separate_reverses=True)  # fmt: skip
    write_partition_store("shop", graph.stream, Given(np.arange(5) % 2, 2), graph)
    Path("buys.csv").write_text("src,dst,when\nc,x,7\na,z,8\n")
    Path("users.csv").write_text("id,p,q,r\nc,1,2,3\na,9,9,9\n")
    Path("gone_items.csv").write_text("id\ny\n")


TYPED = [
    'change.edges=[{type:"user,buys,item",edges:buys.csv,time:"buys.csv:when"}]',
    'change.nodes={user:{nodes:"users.csv:id",features:"users.csv:p,q,r"}}',
    'change.removed_nodes={item:"gone_items.csv:id"}',
    'change.removed_edges=["item,beside,item=beside.csv"]',
    "drift=9",
]


def test_files_by_node_type_and_edge_type_make_the_next_version(shop, capsys):
    Path("beside.csv").write_text("src,dst\nx,z\n")
    main(["update", "shop", *TYPED])
    said = "1 new nodes, 1 removed nodes, 1 nodes with changed features, 2 new edges, 2 removed edges"
    assert said in capsys.readouterr().out
    store = PartitionStore.open("shop-v1")
    names = store.user_ids(np.arange(5))
    assert sorted(names) == list("abcxz") and store.type_sizes == {"user": 3, "item": 2}
    times = dict(zip(names, store.node_time.tolist(), strict=True))
    assert times["z"] == 3 and sorted(store.edge_time.tolist()) == [4, 4, 7, 7, 8, 8]
    main(["stores", "paths.stores=."])
    assert "shop-v1" in capsys.readouterr().out


def test_types_that_do_not_fit_are_told_in_one_line(shop, capsys):
    for word, part in (
        ("change.edges=buys.csv", "give them by edge type"),
        ('change.edges=["user,likes,item=buys.csv"]', "edge type 'user,likes,item' must be one of"),
        ('change.nodes={shop:"users.csv:id"}', "node type 'shop' must be one of the store's"),
        ('change.edges=["user,buys,item=buys.csv"]', "'c' of node type user is neither in the store"),
        ('change.removed_edges=["user,buys,item=gone_items.csv"]', "gone_items.csv"),
    ):
        assert part in refused(capsys, "update", "shop", word)
        assert not list(Path().glob("shop-v1*"))


def test_a_file_with_a_column_of_edge_types_is_a_change(tmp_path, capsys):
    Path("deps.csv").write_text("package,requires,kind\na,b,needs\nb,c,wants\nc,a,needs\n")
    Path("packages.csv").write_text("id,size\na,1\nb,2\nc,3\n")
    words = [
        "dataset=files",
        "dataset.edge_type=kind",
        "dataset.nodes=packages.csv:id",
        "dataset.features=packages.csv:size",
    ]
    main(["partition", *words, "dataset.edges=deps.csv", "num_parts=1", "output=deps", "partitioner=random"])
    Path("deps.csv").write_text("package,requires,kind\na,d,wants\n")
    Path("packages.csv").write_text("id,size\na,1\nd,4\n")
    capsys.readouterr()
    main(["update", "deps", *words, "dataset.edges=deps.csv"])
    assert ": 1 new nodes, 1 new edges" in capsys.readouterr().out
    store = PartitionStore.open("deps-v1")
    assert store.num_edges == 8 and store.schema.edge_types == PartitionStore.open("deps").schema.edge_types
    main(["update", "deps-v1", 'change.removed_edges=[{type:"node,*,node",edges:deps.csv,relation:kind}]'])
    assert "2 removed edges" in capsys.readouterr().out
    Path("deps.csv").write_text("package,requires,kind\na,d,hates\n")
    assert "hates" in refused(
        capsys, "update", "deps-v1", 'change.edges=[{type:"node,*,node",edges:deps.csv,relation:kind}]'
    )
