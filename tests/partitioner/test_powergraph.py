import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from tests.oracles.full_parts import filled
from tests.oracles.masters import master_parts
from tests.oracles.powergraph import place_powergraph
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import listed, simple_graphs, stream_of
from tests.partitioner.test_spring import random_edges

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, num_nodes))
    rule = data.draw(st.sampled_from(["majority", "last", "random"]))
    stream = stream_of(
        directed_edges, num_nodes, layout=layout if edges else "auto", chunk_edges=data.draw(st.integers(1, 20))
    )
    p = partition(stream, "powergraph", num_parts, masters=rule, evaluate=False)
    placed = place_powergraph(simple_edges(directed_edges, p.notes["layout"]), num_nodes, num_parts)
    assert p.part_id.tolist() == filled(master_parts(placed, num_nodes, num_parts, rule), num_parts)
    assert p.notes["edges_per_part"] == np.bincount([e[2] for e in placed], minlength=num_parts).tolist()


@pytest.mark.parametrize("num_parts", [3, 32, 33, 100])
@pytest.mark.parametrize("order", ["as sampled", "by source"])
def test_replica_sets_of_any_width_equal_the_oracle(num_parts, order):
    edges = random_edges()
    if order == "by source":
        edges = edges[np.argsort(edges[:, 0], kind="stable")]
    p = partition(stream_of(edges, 300, layout="once"), "powergraph", num_parts, evaluate=False)
    placed = place_powergraph([tuple(e) for e in edges.tolist()], 300, num_parts)
    assert p.part_id.tolist() == filled(master_parts(placed, 300, num_parts), num_parts)
