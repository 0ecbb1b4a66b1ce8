import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel.row_counts import count_parts
from lightning_gnnscale.partitioner.multilevel.weighted_graph import PART_DTYPE, RowThreads
from tests.partitioner.graphs import simple_graphs
from tests.partitioner.multilevel.graphs import weighted_graph


def counted_slowly(num_nodes, edges, part, num_parts):
    inside, cut, halo, label = [0] * num_parts, [0] * num_parts, [set() for _ in range(num_parts)], [*range(num_nodes)]
    for u, v in edges:
        if part[u] == part[v]:
            inside[part[u]] += 1
            label = [label[u] if one == label[v] else one for one in label]
        else:
            cut[part[u]] += 1
            cut[part[v]] += 1
            halo[part[u]].add(v)
            halo[part[v]].add(u)
    components = [len({label[v] for v in range(num_nodes) if part[v] == p}) for p in range(num_parts)]
    return [inside, cut, [len(nodes) for nodes in halo], components]


@pytest.mark.parametrize("num_threads", [1, 3])
@given(graph=simple_graphs(), data=st.data())
def test_counts_equal_those_of_sets(graph, data, num_threads):
    num_nodes, edges = graph
    part = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes)), PART_DTYPE)
    threads = RowThreads(num_threads)
    found = count_parts(weighted_graph(num_nodes, edges), part, 3, threads, backwards=True)
    threads.close()
    assert [counts.tolist() for counts in found] == counted_slowly(num_nodes, edges, part.tolist(), 3)
