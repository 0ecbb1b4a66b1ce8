import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from tests.oracles.dbh import place_dbh
from tests.oracles.full_parts import filled
from tests.oracles.masters import master_parts
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import listed, simple_graphs, stream_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts, seed = data.draw(st.integers(1, num_nodes)), data.draw(st.integers(0, 2**40))
    rule = data.draw(st.sampled_from(["majority", "last", "random"]))
    stream = stream_of(
        directed_edges, num_nodes, layout=layout if edges else "auto", chunk_edges=data.draw(st.integers(1, 20))
    )
    p = partition(stream, "dbh", num_parts, seed=seed, masters=rule, evaluate=False)
    placed = place_dbh(simple_edges(directed_edges, p.notes["layout"]), num_nodes, num_parts, seed)
    assert p.part_id.tolist() == filled(master_parts(placed, num_nodes, num_parts, rule, seed), num_parts)
    assert p.notes["edges_per_part"] == np.bincount([e[2] for e in placed], minlength=num_parts).tolist()


def test_a_leaf_is_never_cut():
    star = [(0, v) for v in range(1, 200)]
    p = partition(stream_of(star, 200, layout="once"), "dbh", 8)
    leaves = [e[2] for e in place_dbh(star, 200, 8)]
    assert p.part_id[1:].tolist() == leaves
    assert len(set(leaves)) == 8
