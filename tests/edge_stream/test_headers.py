"""The first line of a text file whose ids are words: names of columns, or an edge, and what is said of it."""

import warnings

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said

TAKEN = "is taken for the names of the columns and left out: say header=True if that is right, header=False if it is"


def written(folder, *lines):
    path = folder / "edges.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def edges(path, **options) -> list[tuple[str, str]]:
    stream = open_edge_stream(path, relabel=True, **options)
    found = [(chunk.src, chunk.dst) for chunk in stream.chunks()]
    names = np.asarray(stream.node_ids)
    return [(str(names[src]), str(names[dst])) for pair in found for src, dst in zip(*pair, strict=True)]


LINES = {
    "words that columns are called by": ["package,requires", "numpy,python", "scipy,numpy", "torch,numpy"],
    "parts of names": ["Citing_Paper\tcited-paper", "abc\tdef", "def\tghi"],
    "ids with digits below": ["aa,bb", "p1,p2", "p2,p3", "p3,p1"],
    "a word above numbers": ["aa,bb,cc", "x,y,1", "y,z,2.5e-3"],
}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_names_are_found_and_told(tmp_path, lines):
    path = written(tmp_path, *lines)
    with pytest.warns(UserWarning, match=r"edges.csv: line 1 \(.*\) " + TAKEN):
        found = edges(path)
    assert len(found) == len(lines) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert edges(path, header=True) == found
        assert len(edges(path, header=False)) == len(lines)
        assert (
            open_edge_stream(path, relabel=True, header=True).fingerprint()
            != open_edge_stream(path, relabel=True, header=False).fingerprint()
        )


@pytest.mark.parametrize(
    "lines",
    [
        ["numpy,python", "scipy,numpy", "torch,scipy"],
        ["package,requires", "requires,setuptools", "pip,package"],  # ids of the graph
        ["aa,bb", "p1,aa", "p2,p3", "p3,p1"],
        ["aa,bb", "p1,p2"],  # too few to tell
    ],
)
def test_edges_of_words_stay_edges(tmp_path, lines):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(edges(written(tmp_path, *lines))) == len(lines)


def test_a_first_line_that_stands_alone_is_told(tmp_path):
    lines = ["alpha,omega", "numpy,python", "scipy,numpy", "torch,scipy"]
    path = written(tmp_path, *lines)
    with pytest.warns(UserWarning, match=said("'alpha' 'omega'")):
        assert len(edges(path)) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(edges(path, header=False)) == 4
        assert len(edges(written(tmp_path, *lines, "alpha,numpy"))) == 5


def test_listed_ids_tell_for_sure(tmp_path):
    path = written(tmp_path, "alpha,omega", "numpy,python", "scipy,numpy")
    nodes = ["numpy", "python", "scipy"]
    with pytest.warns(UserWarning, match=r"line 1 \(alpha, omega\) " + TAKEN):
        assert edges(path, nodes=nodes) == [("numpy", "python"), ("scipy", "numpy")]
    with pytest.raises(EdgeStreamError, match=said("'alpha' 3 nodes=")):
        edges(path, nodes=nodes, header=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(edges(path, nodes=[*nodes, "alpha", "omega"])) == 3
    with pytest.raises(EdgeStreamError, match=said("'scipy' 2 nodes=")):
        edges(path, nodes=["numpy", "python"], header=True)
    with pytest.raises(ValueError, match=said("header True False None")):
        open_edge_stream(path, relabel=True, header="yes")
    with pytest.raises(ValueError, match=said("nodes 3 num_nodes=4")):
        open_edge_stream(path, relabel=True, header=True, nodes=nodes, num_nodes=4)


def test_integers_with_names_above_are_read_without_a_word(tmp_path):
    path = written(tmp_path, "package,requires", "1,2", "2,3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = open_edge_stream(path)
        assert stream.count() == (4, 2)
