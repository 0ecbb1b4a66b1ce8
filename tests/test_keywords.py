"""Keywords that a function passes on: shown in its signature, and refused where nobody takes them."""

import inspect

import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.keywords import passes_on
from tests.says import said


def store(edges, root=None, *, pack=True, seed=0):
    return edges, root, pack, seed


@passes_on(store, pack=False)
def front(name, *, seed=1, **options):
    return name, seed, options


def test_the_signature_shows_what_is_passed_on_with_the_fronts_own_defaults():
    found = inspect.signature(front).parameters
    assert list(found) == ["name", "seed", "root", "pack"]
    assert [found[name].default for name in ("seed", "root", "pack")] == [1, None, False]


def test_own_defaults_are_passed_on_and_given_values_win():
    assert front("x", root="r") == ("x", 1, {"pack": False, "root": "r"})
    assert front("x", pack=True) == ("x", 1, {"pack": True})


def test_a_keyword_of_nobody_is_refused_by_the_fronts_name():
    with pytest.raises(TypeError, match=said("front keyword 'pcak'")):
        front("x", pcak=True)
    with pytest.raises(TypeError, match=said("PartitionDataModule 'bach_size' batch_size")):
        gs.PartitionDataModule(bach_size=4)
    with pytest.raises(TypeError, match=said("'nun_parts' did you mean num_parts?)")):
        gs.PartitionDataModule("stores/x", nun_parts=4)


def test_a_datamodule_shows_what_a_store_is_made_from():
    shown = inspect.signature(gs.PartitionDataModule).parameters
    assert {"store", "sampler", "stream", "features", "partitioner", "num_parts", "pack_halo"} <= set(shown)


def test_what_a_front_gives_itself_is_no_keyword_of_it():
    assert "source" not in inspect.signature(gs.dataset.load_files).parameters
    with pytest.raises(TypeError, match=said("generate keyword 'source'")):
        gs.dataset.generate(10, 20, "folder", source="x")


class Mine(gs.PartitionDataModule):
    def __init__(self, **options):
        super().__init__(**options)


def test_a_subclass_may_pass_keywords_beside_a_store(tmp_path):
    assert Mine(store=tmp_path, pack_halo=False, num_parts="auto").store_source is None
    with pytest.raises(ValueError, match=said("num_parts store=")):
        Mine(store=tmp_path, num_parts=4)
