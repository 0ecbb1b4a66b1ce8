"""Digests of a run: the same twice, and what differs is named."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from tests.digests import RUNS, arrays_of, differences, digest_of


@pytest.mark.sweep
def test_a_recipe_gives_the_same_digests_twice(tmp_path):
    words = [sys.executable, "-m", "tests.digests", "--only", "temporal_sage"]
    for more in ([tmp_path / "a.json"], [tmp_path / "b.json", "--compare", tmp_path / "a.json"]):
        where = {"cwd": Path(__file__).parent.parent, "env": os.environ | {"GNNSCALE_COMPILE_AHEAD": "0"}}
        command = [*words[:3], str(more[0]), *words[3:5], *(str(word) for word in more[1:])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, **where)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip().endswith("1 runs, all as before")


def test_names_change_nothing_and_values_do():
    ids, rows = torch.arange(4), torch.ones(4, 2)
    digests = [sorted(map(digest_of, arrays_of(one))) for one in (Data(x=rows, n_id=ids), {"ids": [ids], "x": rows})]
    assert digests[0] == digests[1] and len(digests[0]) == 2
    assert sorted(map(digest_of, arrays_of([ids, rows * 2]))) != digests[0]


def test_differences_are_named():
    before = {"demo": {"store": {"labels.npy": "a"}, "weights": ["b"]}}
    now = copy.deepcopy(before)
    assert list(differences(before, now)) == []
    now["demo"]["store"]["labels.npy"] = "c"
    assert list(differences(before, now)) == ["/demo/store/labels.npy"]


def test_every_recipe_has_a_run():
    from lightning_gnnscale.cli.recipes import available_recipes, bench_of, recipes_folder

    trained = {name for name in available_recipes() if bench_of(recipes_folder() / f"{name}.yaml") is None}
    tried = {words[0].removeprefix("recipe=") for words in RUNS.values()}
    assert trained - tried == {"relbench"}, "which reads a database that is not here"
