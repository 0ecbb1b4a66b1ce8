"""Every dtype at every door: the value that goes in, or one line of refusal; nothing raises from inside a library."""

import decimal
import importlib.util

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from scipy.sparse import csr_array
from torch_geometric.data import Data

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import LinkSet
from lightning_gnnscale.dataset.columns import Columns, load_arrays
from lightning_gnnscale.dataset.value_checks import check_values
from lightning_gnnscale.edge_stream.table import listed_ids, rows_of
from lightning_gnnscale.errors import GNNScaleError

VALUES, NUM_NODES = [0, 1, 2, 3], 4
EDGES = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
WORDS = ["train", "val", "test", "train"]
SIGNED, UNSIGNED = ["int8", "int16", "int32", "int64"], ["uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

# What stands for the numbers 0 to 3, or for four words, by the sort of dtype that it has.
WHOLE = {dtype: np.array(VALUES, dtype) for dtype in SIGNED + UNSIGNED}
WHOLE |= {f"pandas {dtype}": pd.Series(VALUES, dtype=dtype) for dtype in ("int32[pyarrow]", "Int64", "UInt8", "object")}
WHOLE |= {
    f"torch {dtype}": torch.tensor(VALUES).to(getattr(torch, dtype)) for dtype in ("int8", "uint8", "int32", "uint64")
}
WHOLE |= {
    "big endian": np.array(VALUES, ">i8"),
    "polars": pl.Series("a", VALUES, pl.UInt16),
    "arrow": pa.array(VALUES, pa.int16()),
    # Of numbers: codes 3, 2, 1, 0.
    "pandas category of numbers": pd.Series(pd.Categorical(VALUES, [3, 2, 1, 0])),
    "arrow dictionary of numbers": pa.DictionaryArray.from_arrays(pa.array([3, 2, 1, 0]), pa.array([3, 2, 1, 0])),
    "arrow runs": pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], pa.array(VALUES)),
}
WHOLE_FLOATS = {dtype: np.array(VALUES, dtype) for dtype in FLOATS}
WHOLE_FLOATS |= {
    "pandas Float64": pd.Series(VALUES, dtype="Float64"),
    "arrow half": pa.array(np.array(VALUES, np.float16)),
    "torch grad": torch.arange(4.0, requires_grad=True),
    "torch bfloat16": torch.arange(4).bfloat16(),
}
if importlib.util.find_spec("ml_dtypes") is not None:
    ml_dtypes = importlib.import_module("ml_dtypes")
    WHOLE_FLOATS["ml_dtypes bfloat16"] = np.array(VALUES, ml_dtypes.bfloat16)
SOME = [False, True, True, True]
BOOLEANS = {
    "bool": np.array(SOME),
    "pandas boolean": pd.Series(SOME, dtype="boolean"),
    "polars bool": pl.Series("a", SOME),
    "arrow bool8": pa.array(SOME).cast(pa.bool8()),
    "torch bool": torch.tensor(SOME),
}
DATES = {unit: np.array(VALUES, f"M8[{unit}]") for unit in UNITS}
DATES |= {f"pandas {unit}": pd.Series(np.array(VALUES, f"M8[{unit}]")) for unit in UNITS}
DATES |= {f"polars {unit}": pl.Series("a", VALUES).cast(pl.Datetime(unit)) for unit in ("ms", "us", "ns")}
DATES |= {"arrow s": pa.array(VALUES, pa.timestamp("s", "UTC"))}
ONES = [decimal.Decimal(1)] * 4
OTHERS = {
    "timedelta": np.array(VALUES, "m8[s]"),
    "pandas timedelta": pd.Series(pd.to_timedelta(VALUES, unit="s")),
    "polars duration": pl.Series("a", VALUES).cast(pl.Duration("ms")),
    "complex": np.array(VALUES, complex),
    "decimals": np.array(ONES, object),
    "pandas decimal": pd.Series(ONES),
    "polars decimal": pl.Series("a", VALUES).cast(pl.Decimal(10, 2)),
    "arrow decimal": pa.array(ONES),
    "pandas interval": pd.Series(pd.interval_range(0, 4)),
    "polars int128": pl.Series("a", VALUES, pl.Int128),
    "polars list": pl.Series("a", [[0, 1], [1], [2], [3]]),
    "arrow null": pa.nulls(4),
    "arrow struct": pa.array([{"a": 1}] * 4),
    "arrow binary": pa.array([b"a"] * 4),
    "arrow time": pa.array(VALUES, pa.time32("s")),
    "pandas period": pd.Series(pd.period_range("1970-01", periods=4, freq="M")),
    "pandas periods": pd.PeriodIndex(pd.period_range("1970-01", periods=4, freq="M")),
    "period objects": np.array(pd.period_range("1970-01", periods=4, freq="M"), object),
}
TEXTS = {
    "strings": np.array(WORDS),
    "pandas string": pd.Series(WORDS, dtype="string"),
    "pandas category": pd.Series(WORDS, dtype="category"),
    "polars categorical": pl.Series("a", WORDS, pl.Categorical),
    "polars enum": pl.Series("a", WORDS, pl.Enum(["train", "val", "test"])),
    "arrow view": pa.array(WORDS, pa.string_view()),
    "arrow dictionary": pa.array(WORDS).dictionary_encode(),
    "arrow large": pa.array(WORDS, pa.large_string()),
    "arrow dictionary large": pa.array(WORDS, pa.large_string()).dictionary_encode(),
    "arrow dictionary view": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 2, 0]), pa.array(["train", "val", "test"], pa.string_view())
    ),
    "arrow runs of words": pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], WORDS),
    "pandas categorical": pd.Categorical(WORDS),
}
# Of torch and numpy, with no values one behind the other in memory: a layout, a device, a code, several in one.
STRANGE = {
    "torch sparse": torch.arange(4.0).to_sparse(),
    "torch csr": torch.eye(4)[:, :3].to_sparse_csr(),
    "torch meta": torch.zeros(4, dtype=torch.int64, device="meta"),
    "torch meta float": torch.zeros(4, device="meta"),
    "torch quantised": torch.quantize_per_tensor(torch.arange(4.0), 1.0, 0, torch.quint8),
    "torch nested": torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)]),
    "torch complex": torch.arange(4).to(torch.complex64),
    "torch float8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "structured": np.array([(0, 1.0)] * 4, [("a", "i8"), ("b", "f4")]),
    "records": np.rec.array([(0, 1.0)] * 4, [("a", "i8"), ("b", "f4")]),
    "void": np.zeros(4, "V8"),
    "bytes": np.array([b"a"] * 4),
}
GROUPS = {
    "STRANGE": STRANGE,
    "WHOLE": WHOLE,
    "OBJECTS": {"objects": np.array(VALUES, object)},
    "OF_PYTHON": {
        "pandas sparse": pd.Series(pd.arrays.SparseArray(VALUES)),
        "polars object": pl.Series("a", VALUES, pl.Object),
    },
    "WHOLE_FLOATS": WHOLE_FLOATS,
    "FRACTIONS": {f"{dtype} of fractions": np.array([0.5, 1, 2, 3], dtype) for dtype in FLOATS},
    "MISSING": {"nan": np.array([np.nan, 1, 2, 3]), "pandas NA": pd.Series([None, 1, 2, 3], dtype="Int64")},
    "NEGATIVE": {"negative": np.array([-5, 1, 2, 3])},
    "LARGE": {"2**63": np.array([2**63, 1, 2, 3], np.uint64)},
    "BOOLEANS": BOOLEANS,
    "DATES": DATES,
    "NO_DATE": {"NaT": np.array(["NaT", 1, 2, 3], "M8[s]"), "pandas NaT": pd.Series(pd.to_datetime([None, 1, 2, 3]))},
    "OTHERS": OTHERS,
    "TEXTS": TEXTS,
}
# One dtype of each sort at every door is in the first tier.
CELLS = [
    pytest.param(group, name, marks=[] if place == 0 else [pytest.mark.sweep])
    for group, forms in GROUPS.items()
    for place, name in enumerate(forms)
]


def stream():
    return gs.open_edge_stream(EDGES, num_nodes=NUM_NODES)


def stored(name, values):
    """Return the values of nodes or edges as a store's writer takes them."""
    given = dict.fromkeys(("features", "labels", "masks", "edge_weight", "edge_features")) | {name: values}
    found = load_arrays(stream(), Columns(**given))[name]
    values = given | {name: found}
    check_values(*(values[key] for key in ("features", "labels", "edge_weight", "edge_features")))
    return found


def table(values):
    frame = pl.DataFrame if isinstance(values, pl.Series) else pd.DataFrame
    return pa.table({"a": values}) if isinstance(values, pa.Array) else frame({"a": values})


def first_column(rows):
    if isinstance(rows, np.ndarray):
        return rows[:, 0]
    indptr, indices, values, shape = rows
    return csr_array((values, indices, indptr), shape).toarray()[:, 0]


def column(values):
    if isinstance(values, torch.Tensor) and (values.layout != torch.strided or values.is_nested):
        return values
    return values[:, None] if isinstance(values, np.ndarray | torch.Tensor) else rows_of(table(values))[:, None]


def read_edges(values, **options):
    chunks = gs.open_edge_stream((values, values), **options).chunks()
    return np.concatenate([chunk.src for chunk in chunks])


def dataset(**given):
    return gs.GraphDataset("g", stream(), **given)


def batch(values, **given):
    data = Data(edge_index=torch.tensor(EDGES), num_nodes=NUM_NODES, t=torch.arange(NUM_NODES))
    return next(iter(gs.NeighborLoader(data, [1], batch_size=NUM_NODES, **given | values)))


def seeds(values):
    found = batch({"input_nodes": values})
    return found.n_id[: found.batch_size]


def links(values):
    plain = isinstance(values, torch.Tensor) and values.layout == torch.strided and not values.is_nested
    both = torch.stack([values] * 2) if plain else [values, values]
    return dataset(links={"test": LinkSet(both)}).links["test"].edges[0]


def balanced(values):
    found = gs.partition(stream(), "random", num_parts=1, masks={"train": values}, balance={"train": 4})
    return found.quality.mask_per_part["train"]


DOORS = {
    "edges": read_edges,
    "relabelled edges": lambda values: read_edges(values, relabel=True),
    "nodes": lambda values: np.asarray(listed_ids(values)),
    "features": lambda values: first_column(stored("features", column(values))),
    "labels": lambda values: stored("labels", values),
    "targets": lambda values: dataset(labels=values, regression=True).labels[:, 0],
    "edge_label": lambda values: stored("edge_label", values),
    "edge_time": lambda values: stored("edge_time", values),
    "node_time": lambda values: dataset(node_time=values).node_time,
    "edge_weight": lambda values: stored("edge_weight", values),
    "mask": lambda values: stored("masks", {"train": values})["train"],
    "mask of rows": lambda values: stored("masks", dataset(masks={"train": values}).masks)["train"],
    "words": lambda values: dataset(masks=values).masks["train"],
    "edge_type": lambda values: dataset(edge_type=values).stream.edge_type_of(np.arange(4)),
    "seeds": seeds,
    "input_time": lambda values: batch({"input_time": values}, time_attr="t").seed_time,
    "links": links,
    "part_id": lambda values: np.repeat(VALUES, gs.evaluate_partitioning(stream(), values, 4).nodes_per_part),
    "balance": balanced,
}
EXACT = dict.fromkeys(("WHOLE", "OBJECTS"), VALUES)
TAKEN = {
    "edges": EXACT,
    "relabelled edges": EXACT | dict.fromkeys(("NEGATIVE", "LARGE"), VALUES) | {"TEXTS": [0, 1, 2, 0]},
    "nodes": EXACT | {"NEGATIVE": [-5, 1, 2, 3], "LARGE": [2**63, 1, 2, 3]},
    "features": {"WHOLE": VALUES, "WHOLE_FLOATS": VALUES, "FRACTIONS": [0.5, 1, 2, 3], "NEGATIVE": [-5, 1, 2, 3],
                 "LARGE": [2**63, 1, 2, 3], "BOOLEANS": [0, 1, 1, 1], "MISSING": [np.nan, 1, 2, 3]},
    "labels": {"WHOLE": VALUES, "WHOLE_FLOATS": VALUES, "MISSING": [np.nan, 1, 2, 3], "BOOLEANS": [0, 1, 1, 1]},
    "edge_label": {"WHOLE": VALUES, "BOOLEANS": [0, 1, 1, 1]},
    "edge_time": EXACT | {"NEGATIVE": [-5, 1, 2, 3]},
    "edge_weight": {"WHOLE": VALUES, "WHOLE_FLOATS": VALUES, "FRACTIONS": [0.5, 1, 2, 3], "NEGATIVE": [-5, 1, 2, 3],
                    "LARGE": [2**63, 1, 2, 3], "BOOLEANS": [0, 1, 1, 1]},
    "mask": {"BOOLEANS": [0, 1, 1, 1]},
    "mask of rows": {"WHOLE": [1, 1, 1, 1], "BOOLEANS": [0, 1, 1, 1]},
    "words": {"TEXTS": [1, 0, 0, 1]},
    "edge_type": {"WHOLE": VALUES},
    "seeds": EXACT | {"OF_PYTHON": VALUES, "BOOLEANS": [1, 2, 3]},
    "links": EXACT | {"OF_PYTHON": VALUES, "WHOLE_FLOATS": VALUES},
    "part_id": EXACT | {"OF_PYTHON": VALUES},
    "balance": {"WHOLE": [6], "OBJECTS": [6], "OF_PYTHON": [6], "BOOLEANS": [3]},
}  # fmt: skip
TAKEN["targets"] = TAKEN["features"]
TAKEN["node_time"] = TAKEN["input_time"] = TAKEN["edge_time"]
TIMES = ("edge_time", "node_time", "input_time")


def expected(door, group, name):
    """Return the values that a cell takes, None where it is refused."""
    if group == "DATES" and door in TIMES:
        return [value * UNITS[name.split()[-1]] for value in VALUES]
    if door == "features" and name == "torch csr":
        return [1, 0, 0, 0]
    return TAKEN[door].get(group)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("group", "name"), CELLS)
def test_a_cell_takes_the_values_or_refuses_in_one_line(door, group, name):
    given, wanted = GROUPS[group][name], expected(door, group, name)
    if wanted is not None:
        np.testing.assert_array_equal(np.asarray(DOORS[door](given), np.asarray(wanted).dtype), wanted)
        return
    with pytest.raises((ValueError, GNNScaleError)) as error:
        DOORS[door](given)
    assert "\n" not in str(error.value)
    raised_in = str(error.traceback[-1].path)
    assert "lightning_gnnscale" in raised_in or "triton_kernels" in raised_in
