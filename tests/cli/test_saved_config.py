"""A run's folder is data: what its config may have made, and what it may refer to."""

import pytest
import yaml
from cli.refusals import refused

from lightning_gnnscale.cli.commands import locate
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.run_paths import known_targets
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.report.run_files import read_settings
from tests.says import said

COPY = {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": "trap"}
PLAIN = {"name": "run", "dataset": {"_target_": "lightning_gnnscale.dataset.load_files", "edges": "e.npy"}}
PLAIN |= {"model": {"_target_": "lightning_gnnscale.model.NodeClassifier", "lr": 1.0e-3}}
CONFIGS = {
    "a callback": {"callbacks": {"evil": COPY}},
    "a data set": {"dataset": COPY},
    "within a model": {"model": {"_target_": "lightning_gnnscale.model.NodeClassifier", "backbone": COPY}},
    "within a list": {"trainer": {"_target_": "lightning.Trainer", "plugins": [COPY]}},
    "an argument by place": {"sampler": {"_target_": "lightning_gnnscale.sampler.NeighborSampler", "_args_": [COPY]}},
    "no text": {"dataset": {"_target_": ["shutil.copyfile"]}},
    "own, and no part": {"dataset": {"_target_": "lightning_gnnscale.model.checkpoint_file.remove_rows"}},
    "a method": {"dataset": {"_target_": "lightning.Trainer.save_checkpoint"}},
    "a benchmark": {"dataset": {"_target_": "lightning_gnnscale.bench.memory.run"}},
    "text that PyG runs": {"model": {"_target_": "torch_geometric.nn.Sequential", "input_args": "x"}},
    "hydra's callbacks": {"hydra": {"callbacks": {"evil": COPY}}},
    "hydra's search path": {"hydra": {"searchpath": ["file:///tmp"]}},
    "hydra's logging": {"hydra": {"job_logging": {"handlers": {"x": {"class": "logging.FileHandler"}}}}},
    "defaults": {"defaults": ["/train", "_self_"]},
    "a group": {"callbacks@evil": {"x": 1}},
    "a secret": {"dataset": {"edges": "${oc.env:HOME}"}},
    "a secret within": {"dataset": {"options": [{"a": "x ${oc.env:HOME,y} z"}]}},
    "another resolver": {"name": "${hydra:runtime.cwd}"},
    "of itself": {"name": "${name}"},
    "a flag": {"dataset": {"_target_": "lightning_gnnscale.dataset.load_files", "_partial_": "yes"}},
    "a folder that PyG unpickles": {"dataset": {"_target_": "lightning_gnnscale.dataset.load_pyg", "root": "mine"}},
    "a cluster": {"source": {"_target_": "lightning_gnnscale.remote.RayWorkers", "address": "evil:6379"}},
    "trust of its own": {"trust_config": True, "callbacks": {"evil": COPY}},
}


def write(folder, content) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"x")
    (folder / "config.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("words", [["predict", "."], ["test", "checkpoints/last.ckpt"], ["train", "resume=."]])
def test_what_no_list_names_is_refused(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, PLAIN | CONFIGS[name])
    line = refused(capsys, *words)
    assert "config.yaml: " in line and ("say trust_config=true" in line or " must be " in line)
    assert not (tmp_path / "trap").exists()


def test_trust_is_said_by_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, PLAIN | {"callbacks": {"evil": COPY}})
    told = locate("predict", [".", "trust_config=true"])
    assert not [word for word in told.words if "trust_config" in word]
    for words in (["trust_config=false"], ["callbacks.other=null"], ["callbacks.evil.dst=there"]):
        with pytest.raises(UsageError, match=said("callbacks.evil._target_=shutil.copyfile run")):
            locate("predict", [".", *words])
    with pytest.raises(UsageError, match=said("trust_config true false maybe")):
        locate("predict", [".", "trust_config=maybe"])


@pytest.mark.parametrize("word", ["~callbacks.evil", "callbacks.evil=null", "++callbacks.evil=null", "~callbacks"])
def test_what_the_user_sets_or_removes_is_theirs(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, PLAIN | {"callbacks": {"evil": COPY}})
    told = locate("predict", [".", word])
    assert "copyfile" not in open(f"{told.config_dir}/config.yaml").read()  # noqa: SIM115


TEXTS = {
    "a bomb of aliases": "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*b{i - 1}, *b{i - 1}]\n" for i in range(1, 40)),
    "a recursive alias": "a: &a\n  b: *a\n",
    "a merge of itself": "a: &a\n  <<: *a\n",
    "an object": "a: !!python/object/apply:os.system ['touch trap']\n",
    "a name": "a: !!python/name:os.system\n",
    "a tag": "a: !own x\n",
    "a nest": "a: " + "[" * 5000 + "]" * 5000,
    "a nest of names": "a: " + "{a: " * 200 + "1" + "}" * 200,
    "many entries": "a: [" + "1," * 200_000 + "]",
    "many references": "a: " + "${" * 3000 + "x" + "}" * 3000,
    "half a reference": "a: ${oc.env:X\n",
    "digits": "a: " + "9" * 5000,
    "no names": "[1, 2]",
    "a word": "hello",
    "nothing": "",
    "half": "a: [1, 2",
    "bytes": "a: \x00\n",
    "a name twice": "a: 1\na: 2\n",
    "a list as a name": "? [1, 2]\n: 3\n",
    "a date": "a: 2020-01-01\n",
    "large": "a: " + "x" * (5 << 20),
}


@pytest.mark.timeout(30)  # a bomb would take hours
@pytest.mark.parametrize("name", TEXTS)
def test_no_text_hangs_or_makes_anything(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TEXTS[name])
    if name in ("a date", "nothing", "a word"):  # which are plain
        assert isinstance(read_settings(tmp_path / "config.yaml"), dict)
        return
    with pytest.raises(GNNScaleError, match=r"config.yaml: [^\n]{1,300}$"):
        read_settings(tmp_path / "config.yaml")
    assert not (tmp_path / "trap").exists()


def test_the_list_holds_what_ships_and_no_benchmark():
    assert {"lightning_gnnscale.dataset.load_files", "lightning.Trainer"} <= known_targets()
    assert {"lightning_gnnscale.model.GCN", "torch_geometric.nn.GAT", "torch.optim.AdamW"} <= known_targets()
    assert not [name for name in known_targets() if ".bench." in name]
