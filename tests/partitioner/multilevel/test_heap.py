from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel.cycle import empty_heap, heap_clear, heap_put, heap_take

NODES = 12
ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, NODES - 1), st.integers(-5, 5)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=80))
def test_equals_a_sorted_list_while_keys_change(actions):
    nodes, place, keys, size = empty_heap(NODES)
    expected = {}
    for action, v, key in actions:
        if action == "put":
            heap_put(nodes, place, keys, size, v, float(key))
            expected[v] = key
        elif action == "take" and expected:
            taken = heap_take(nodes, place, keys, size)
            assert expected.pop(taken) == max([keys[taken], *expected.values()])
        elif action == "clear":
            heap_clear(nodes, place, size)
            expected = {}
        assert size[0] == len(expected)
        assert sorted(nodes[: size[0]].tolist()) == sorted(expected)
        for i in range(NODES):
            assert (place[i] >= 0) == (i in expected)
            if i in expected:
                assert nodes[place[i]] == i
                assert keys[i] == expected[i]


def test_a_heap_of_many_nodes_sorts_them():
    nodes, place, keys, size = empty_heap(500)
    wanted = [(37 * v) % 500 for v in range(500)]
    for v in range(500):
        heap_put(nodes, place, keys, size, v, 0.0)
    for v in range(500):
        heap_put(nodes, place, keys, size, v, float(wanted[v]))
    assert [wanted[heap_take(nodes, place, keys, size)] for _ in range(500)] == list(range(499, -1, -1))
