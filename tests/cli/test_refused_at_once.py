"""Wrong words are refused before torch is imported, with the name that was meant; recipes as the command line."""

import json
import subprocess
import sys

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.errors import did_you_mean

WRONG = {
    "train datset=npz": "datset is not a setting (did you mean dataset?)",
    "trian": "no command 'trian' (did you mean train?)",
    "train recipe=demoo": "recipe=demoo: no such recipe (did you mean demo?)",
    "train model.lrr=1": "model.lrr is not a setting (did you mean lr?)",
    "train trainer.max_epoch=1": "trainer.max_epoch is not a setting (did you mean max_epochs?)",
    "train partitioner=lgd": "partitioner=lgd: no such choice (did you mean ldg?)",
    "train partitioner=ldg partitioner.pases=2": "partitioner.pases is not a setting (did you mean passes?)",
    "train dataset.num_node=2": "dataset.num_node is not a setting (did you mean num_nodes?)",
    "train dataset.edges=e.csv": "dataset.edges is a setting of dataset=files or dataset=hetero: say one of them too",
    "train sampler.clusters_per_batch=3": "sampler.clusters_per_batch is a setting of sampler=cluster: say that too",
    "train model.backbone.heads=2": "model=gat, model=hgt, model=rgat and 9 more choices: say one of them too",
    "train rows.alpha=2": "rows.alpha is a setting of rows=tiered: say that too",
    "train placement=rule": "placement is not a setting (it is rows now)",
    "train datamodule.row_reads=mapped": "datamodule.row_reads is not a setting (it is rows now)",
    "train source=ray source.construction=local": "source.construction is not a setting (it is rows=owners now)",
    "train partitioner.gamma=3": "partitioner.gamma is a setting of partitioner=fennel: say that too",
    "train strategy.weights.every_n_epochs=3": "a setting of strategy/weights=model_averaging: say that too",
    "train callbacks.early_stopping.patience=3": "a setting of callbacks=early_stopping or callbacks=locality: say one",
    "train dataset.nodez=3": "train, val, name, hold_out, num_communities",  # not progress, which nobody sets
    "train --num_parts 4": "--num_parts is not a flag: say num_parts=4",
    "train --num-parts=4 seed=1": "--num-parts is not a flag: say num_parts=4",
    "train --max_epochs 5": "--max_epochs is not a flag: say trainer.max_epochs=5",
    "train max_epochs=5": "max_epochs is not a setting (did you mean trainer.max_epochs?)",
    "train lr=0.003": "lr is not a setting (did you mean model.lr?)",
    "train model.heads=2": "model.heads is not a setting (did you mean model.backbone.heads?)",
    "train --overwrite seed=1": "--overwrite is not a flag: say overwrite=...",
    "train seed=-1": "seed must be an integer in [0, 4294967295], got -1",
    "train model.lr=-1": "model.lr must be a number above 0, got -1",
    "partition datamodule.batch_size=many": "datamodule.batch_size must be an integer, got 'many'",
    "train dataset=files dataset.edges=none.csv": "dataset.edges: none.csv: no such file or folder",
    "train recipe=demo resume=none.ckpt": "resume: none.ckpt: no such checkpoint",
    "train --resum x": "--resum is not a flag: say resum=x",
    "predict nowhere": "nowhere: no such run",
    "stores lst": "stores lst: no such action (did you mean list?)",
    "stores recipe=demo": "stores takes no recipe: leave recipe= out",
    "stores action=lst": "stores lst: no such action (did you mean list?)",
    "completion bsh": "one of bash, zsh, fish, got bsh (did you mean bash?)",
    "bench smaple": "no benchmark 'smaple' (did you mean sample?)",
}
CODE = """
import contextlib, io, json, sys
from lightning_gnnscale.cli.main import main
said = {}
for line in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(line.split())
    said[line] = err.getvalue().strip()
print(json.dumps([said, [name for name in ("torch", "lightning", "torch_geometric") if name in sys.modules]]))
"""


def test_nothing_heavy_is_imported_for_an_error(tmp_path):
    words = [sys.executable, "-c", CODE, json.dumps(list(WRONG))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    for line, part in WRONG.items():
        assert part in said[line] and "\n" not in said[line], said[line]
    assert imported == []


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return "recipe=mine.yaml"

    return write


START = "defaults: [/train, _self_]\n"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (START + "foo: 3\n", "foo is not a setting; the top level takes dataset"),
        (START + "sead: 3\n", "sead is not a setting (did you mean seed?)"),
        (START + "paths: {run: x}\n", "paths.run is not a setting (did you mean runs?)"),
        (START + "model: {lrr: 0.1}\n", "model.lrr is not a setting (did you mean lr?)"),
        (START + "callbacks: {mine: {patience: 3}}\n", "callbacks.mine is not a setting"),
        (START + "machines: {link_gbits: 3}\n", "machines.link_gbits is not a setting (did you mean link_gbit?)"),
        ("model: {lr: 0.1}\n", "mine.yaml has no list of defaults", ),
        ("- 1\n", "mine.yaml has no list of defaults"),
        ("defaults: [_self_]\nmodel: {lr: 0.1}\n", "begin its defaults with /train"),
        (START + "model: {lr: 0.1\n", "mine.yaml: no YAML ("),
        ("defaults: [/train, override /model: gcnn, _self_]\n", "model=gcnn: no such choice (did you mean gcn?)"),
    ],
)  # fmt: skip
def test_a_recipe_is_checked_as_the_command_line_is(capsys, recipe, text, part):
    assert part in refused(capsys, "train", recipe(text))


def test_a_recipe_may_name_a_value_that_it_refers_to(capsys, recipe):
    """It passes the check of keys, and ends at the next one."""
    line = refused(
        capsys, "train", recipe(START + "width: 4\nmodel: {backbone: {hidden_channels: '${width}'}}\nseed: -1\n")
    )
    assert line == "gnnscale: seed must be an integer in [0, 4294967295], got -1"


def test_a_name_far_from_all_is_no_hint():
    assert did_you_mean("xyz", ["dataset", "seed"]) == ""
    assert did_you_mean("Sedd", ["dataset", "seed"]) == " (did you mean seed?)"
