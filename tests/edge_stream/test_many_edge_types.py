"""Graphs of very many edge types: linear work, and a bound that is told before anything is made of them."""

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.graph import MOST_EDGE_TYPES, GraphSchema
from tests.says import said

ENDS = np.array([[0, 1, 2], [1, 2, 0]])


class CountedName(str):
    """A name that counts how often it is compared with another one."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedName.compared += 1
        return str.__eq__(self, other)


def dataset(edge_type, to_undirected=False, **options):
    stream = gs.open_edge_stream(ENDS, num_nodes=3, to_undirected=to_undirected)
    return gs.GraphDataset("g", stream, edge_type=edge_type, **options)


@pytest.mark.parametrize("largest", [2**40, 2**63 - 1, MOST_EDGE_TYPES])
def test_one_relation_of_a_large_number_is_refused_before_names_are_made(largest):
    with pytest.raises(ValueError, match=said(f"edge_type 65536 {largest + 1} 0")):
        dataset(np.array([0, largest, 1], np.uint64))


def test_reverses_count_towards_the_bound():
    assert dataset(np.array([0, 40_000, 1])).schema.num_edge_types == 40_001
    with pytest.raises(ValueError, match=said("65536 edge types reverses included 80002")):
        dataset(np.array([0, 40_000, 1]), to_undirected=True)


def test_the_largest_number_that_is_taken_reaches_the_stream():
    found = dataset(np.array([0, MOST_EDGE_TYPES - 1, 1]))
    assert found.stream.edge_type_of(np.arange(3)).tolist() == [0, MOST_EDGE_TYPES - 1, 1]
    with pytest.raises(ValueError, match=said("65536 edge types")):
        GraphSchema(("a",), tuple(("a", str(number), "a") for number in range(MOST_EDGE_TYPES + 1)))


def test_a_schema_compares_its_names_a_bounded_number_of_times_each():
    num = 2000
    names = [CountedName(f"r{number}") for number in range(num)]
    CountedName.compared = 0
    schema = GraphSchema(("a", "b"), tuple(("a", name, "b") for name in names))
    assert [schema.edge_type_number(("a", f"r{number}", "b")) for number in range(num)] == list(range(num))
    assert schema.sources.tolist() == [0] * num and schema.targets.tolist() == [1] * num
    assert CountedName.compared < 20 * num


def test_an_unknown_relation_among_many_is_told_with_some_of_them():
    schema = GraphSchema(("a",), tuple(("a", f"r{number}", "a") for number in range(1000)))
    with pytest.raises(ValueError, match=said("'x' a,r0,a a,r49,a 1000")) as error:
        schema.edge_type_number("x")
    assert len(str(error.value)) < 1000


def test_names_that_stand_twice_are_told():
    with pytest.raises(ValueError, match="each once, got .*b"):
        GraphSchema(("a", "b", "b"), (("a", "r", "b"),))
    with pytest.raises(ValueError, match="must be one of"):
        GraphSchema(("a", "b"), (("a", "r", "b"), ("b", "r", "a"))).edge_type_number("r")
