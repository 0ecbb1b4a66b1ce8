"""`gnnscale train` on a store with node types and edge types: what models are told of them, and what is refused."""

import json
import os

import numpy as np
import pytest
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph

import lightning_gnnscale as gs
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.datamodule.stored_graph import StoredGraphDataModule
from tests.tiers import first

WORDS = [
    "train", "store=kinds", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.enable_progress_bar=false",
    "trainer.max_epochs=1", "sampler.fanouts=[2,2]", "model.backbone.hidden_channels=4", "datamodule.batch_size=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a store of two node types, one of them without features, and a graph without node types."""
    folder, rng = tmp_path_factory.mktemp("relations"), np.random.default_rng(0)
    labels = np.arange(30) % 2
    typed = gs.hetero_graph(
        {"paper": {"num_nodes": 30, "features": np.eye(30, 6, dtype=np.float32), "labels": labels}, "author": 12},
        {
            "paper,cites,paper": np.unique(rng.integers(0, 30, (2, 90)), axis=1),
            "author,writes,paper": np.unique(np.stack([rng.integers(0, 12, 60), rng.integers(0, 30, 60)]), axis=1),
        },
    )
    parts = gs.partition(typed.stream, method="random", num_parts=2, seed=0)
    given = {"features": typed.features, "labels": typed.labels, "masks": typed.masks}
    gs.write_partition_store(folder / "kinds", typed.stream, parts, **given)
    features = typed.features | {"author": np.ones((12, 2), np.float32)}
    gs.write_partition_store(folder / "featured", typed.stream, parts, **given | {"features": features})
    here = os.getcwd()
    os.chdir(folder)
    write_tiny_graph()
    yield folder
    os.chdir(here)


@first(1)
@pytest.mark.parametrize("words", [["model=rgcn", "model.backbone.num_bases=2"], ["model=rgat"], ["model=hgt"]])
def test_a_run_fills_in_node_types_and_relations_and_its_checkpoint_opens(folder, words):
    run = folder / words[0].removeprefix("model=")
    main([*WORDS, *words, f"hydra.run.dir={run}"])
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["metrics"]["test_acc"] <= 1
    (checkpoint,) = [path for path in (run / "checkpoints").glob("*.ckpt") if path.name != "last.ckpt"][:1]
    backbone = gs.NodeClassifier.load_from_checkpoint(checkpoint).backbone
    assert backbone.schema.node_types == ("paper", "author") and backbone.in_channels == {"paper": 6, "author": 0}
    main(["test", str(run)])


@pytest.mark.sweep
def test_learned_rows_are_those_of_node_types_without_features(folder):
    inputs = "+model.inputs={_target_:lightning_gnnscale.embedding.DistributedEmbedding,dim:3}"
    main([*WORDS, "model=rgcn", inputs, "hydra.run.dir=learned", "test=false"])
    (checkpoint,) = (folder / "learned" / "checkpoints").glob("last.ckpt")
    inputs = gs.DistributedEmbedding.for_store(gs.PartitionStore.open("kinds"), 3, node_types=["author"])
    backbone = gs.NodeClassifier.load_from_checkpoint(checkpoint, inputs=inputs).backbone
    assert backbone.in_channels == {"paper": 6, "author": 3}
    assert inputs.loaded and inputs.num_rows == 12


def rows_of_run(run):
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {line["num_rows"] for line in lines if line.get("event") == "rows"}


def test_rows_are_those_of_the_node_types_that_read_them(folder, capsys):
    """Of node types without features where nothing is said; of those chosen, behind the features of one."""
    main([*WORDS, "model=rgcn", "+model.inputs.dim=3", "hydra.run.dir=few"])
    assert rows_of_run(folder / "few") == {12}
    written = sum(path.stat().st_size for path in (folder / "few" / "checkpoints").glob("last.ckpt.rows/rows-*"))
    assert 12 * 3 * 4 < written < 30 * 3 * 4 + 2 * 128, "and so many are in the checkpoint"
    main(["test", "few"])
    words = [
        *WORDS,
        "model=rgcn",
        "+model.inputs.dim=3",
        "+model.inputs.node_types=[author,paper]",
        "hydra.run.dir=both",
    ]
    main(words)
    assert rows_of_run(folder / "both") == {42}
    (checkpoint,) = (folder / "both" / "checkpoints").glob("last.ckpt")
    inputs = gs.DistributedEmbedding(42, 3)
    backbone = gs.NodeClassifier.load_from_checkpoint(checkpoint, inputs=inputs).backbone
    assert backbone.in_channels == {"paper": 9, "author": 3} and inputs.loaded
    main(["test", "both"])
    main([*words[:-2], "+model.inputs.node_types=[paper]", "hydra.run.dir=behind"])
    assert rows_of_run(folder / "behind") == {30}
    told = refused(capsys, *WORDS, "model=rgcn", "+model.inputs.dim=3", "resume=both", "trainer.max_epochs=2")
    assert "holds rows for every node, the embedding has them for nodes of author" in told
    assert "model.inputs.node_types=[paper,author]" in told


def test_inspect_names_the_edge_types(folder, capsys):
    main(["inspect", "featured"])
    names = [",".join(name) for name in gs.PartitionStore.open("featured").schema.edge_types]
    assert f"{len(names)}: {'; '.join(names)}" in " ".join(capsys.readouterr().out.split())


def test_the_plan_counts_the_rows_of_these_node_types(folder, capsys, monkeypatch):
    asked, make_plan = [], StoredGraphDataModule.make_plan

    def told(self, *args, **options):
        asked.append(options)
        return make_plan(self, *args, **options)

    monkeypatch.setattr(StoredGraphDataModule, "make_plan", told)
    for words in ([], ["+model.inputs.node_types=[author,paper]"]):
        main(["plan", *WORDS[1:], "model=rgcn", "+model.inputs.dim=3", *words])
    assert [(one["embedding_dim"], one["embedding_rows"]) for one in asked] == [(3, 12), (3, 42)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS, "model=rgcn", "+model.inputs.dim=3", "+model.inputs.node_types=[writer]"],
         "model.inputs.node_types must be some of paper, author, got 'writer'"),
        ([*WORDS, "model=rgcn", "+model.inputs.dim=3", "+model.inputs.node_types=author"],
         "model.inputs.node_types must be a list of some of paper, author, got 'author'"),
        (["train", *TINY, "+model.inputs.dim=3", "+model.inputs.node_types=[author]"],
         "model.inputs.node_types=['author']: the graph has one node type, and all its nodes have rows: leave it out"),
        (["train", *WORDS[2:], "store=featured", "model=rgcn", "+model.inputs.dim=3"],
         "model.inputs: all node types have features (paper, author): name those that have learned rows"),
    ],
)  # fmt: skip
def test_node_types_that_cannot_have_rows_are_refused(folder, capsys, words, told):
    assert told in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS, "model=gcn"], "model: GCN reads no edge types, and the graph has 3 between 2 node types: say"),
        ([*WORDS, "model=rgcn", "+model.backbone.schema=x"], "model.backbone.schema"),
        (["train", *TINY, "model=rgcn"], "model: RGCN reads edge types, and the graph has none: say model=graphsage"),
        ([*WORDS, "model=hgt", "model.backbone.heads=3"], "hidden_channels must be a multiple of heads (3), got 4"),
    ],
)
def test_what_does_not_go_together_is_one_line(folder, capsys, words, told):
    assert told in refused(capsys, *words)
