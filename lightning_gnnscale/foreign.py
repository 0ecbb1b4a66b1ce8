"""What a value of another library is, by what it has; no library is imported for the answer.

Everything that a user may pass for edges, rows or ids is recognised here, and nowhere else.
"""

import sys
from typing import Any

_CSR = ("indptr", "indices", "data", "shape")
_IN_MEMORY = ("iloc", "get_column", "column_names", "to_numpy")  # of tables and columns that hold their rows
_OF_TABLES = ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__", "iloc", "get_column")


def has_all(value: Any, *names: str) -> bool:
    """Whether a value has all of some attributes."""
    return all(_has(value, name) for name in names)


def _has(value: Any, name: str) -> bool:
    try:
        return hasattr(value, name)
    except Exception:  # a property that fails is there: PyG's TemporalData joins arrays as if they were tensors
        return True


def is_csr(rows: Any) -> bool:
    """Whether rows are sparse and compressed: SciPy's CSR, `CSRArrays`, or rows that a store gives."""
    return hasattr(rows, "indptr")


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    return hasattr(value, "detach")


def is_scipy(matrix: Any) -> bool:
    """Whether a value is a sparse matrix of SciPy."""
    return hasattr(matrix, "tocsr")


def is_sparse_tensor(matrix: Any) -> bool:
    """Whether a value is a `SparseTensor` of torch_sparse."""
    return hasattr(matrix, "sparse_sizes")


def torch_layout(tensor: Any) -> str:
    """Return the layout of a tensor, such as "strided" or "sparse_csr"; "" of anything else."""
    return str(getattr(tensor, "layout", "")).removeprefix("torch.") if is_tensor(tensor) else ""


def is_sparse(matrix: Any) -> bool:
    """Whether a value is a sparse matrix of SciPy, torch or torch_sparse."""
    return is_scipy(matrix) or is_sparse_tensor(matrix) or torch_layout(matrix).startswith("sparse")


def csr_of(rows: Any) -> tuple[Any, Any, Any, tuple] | None:
    """Return (indptr, indices, data, shape) of sparse rows of any library, CSR ones shared; None of others.

    Raises:
        ValueError: a sparse tensor that is no table, or holds no data.
    """
    if is_sparse_tensor(rows):
        rows = rows.to_torch_sparse_csr_tensor()
    if torch_layout(rows).startswith("sparse"):
        try:
            rows = rows.detach().cpu().to_sparse_csr()
        except (RuntimeError, NotImplementedError) as error:
            told = " ".join(str(error).split())[:80]
            raise ValueError(f"a sparse tensor of {tuple(rows.shape)} is not read as rows ({told})") from None
        return rows.crow_indices(), rows.col_indices(), rows.values(), tuple(rows.shape)
    if is_scipy(rows):
        rows = rows.tocsr()  # SciPy's other formats have the same attributes, and mean other things by them
    return tuple(getattr(rows, name) for name in _CSR) if has_all(rows, *_CSR) else None


def is_pyg(source: Any) -> bool:
    """Whether a value is a graph of PyG."""
    return any(_has(source, name) for name in ("edge_index", "adj_t", "edge_types"))


def is_hetero(source: Any) -> bool:
    """Whether a value is a `HeteroData` of PyG."""
    return _has(source, "edge_types")


def is_temporal(source: Any) -> bool:
    """Whether a value is a `TemporalData` of PyG."""
    return has_all(source, "src", "dst", "t")


def is_lazy_table(source: Any) -> bool:
    """Whether a value is a query of polars that holds no rows yet."""
    return has_all(source, "collect_schema", "collect")


def is_dataset(source: Any) -> bool:
    """Whether a value is a data set of pyarrow, or a scan of one."""
    module = sys.modules.get("pyarrow.dataset")
    return module is not None and isinstance(source, module.Dataset | module.Scanner)


def is_delta_table(source: Any) -> bool:
    """Whether a value is a table of Delta Lake."""
    return _has(source, "to_pyarrow_dataset")


def is_iceberg_table(source: Any) -> bool:
    """Whether a value is a table of Iceberg, of which a scan gives the rows."""
    return has_all(source, "scan", "current_snapshot")


def is_iceberg_scan(source: Any) -> bool:
    """Whether a value is a scan of an Iceberg table, which gives a reader."""
    return _has(source, "to_arrow_batch_reader")


def is_row_stream(source: Any) -> bool:
    """Whether a value gives rows in batches, and need not hold them: a reader, a query, a lazy table, a data set."""
    if is_lazy_table(source) or is_dataset(source) or is_delta_table(source):
        return True
    if is_iceberg_table(source) or is_iceberg_scan(source):
        return True
    return speaks_arrow(source) and not any(hasattr(source, name) for name in _IN_MEMORY)


def is_pandas(source: Any) -> bool:
    """Whether a value is a table or a column of pandas."""
    return hasattr(source, "iloc")


def is_polars_table(source: Any) -> bool:
    """Whether a value is a table of polars."""
    return hasattr(source, "get_column")


def speaks_arrow(source: Any) -> bool:
    """Whether a value gives its columns in Arrow's form."""
    return hasattr(source, "__arrow_c_stream__")


def is_table(source: Any) -> bool:
    """Whether a value is a table of pandas, polars or Arrow."""
    if is_row_stream(source):
        return False
    return hasattr(source, "columns") and (speaks_arrow(source) or hasattr(source, "__dataframe__"))


def is_column(source: Any) -> bool:
    """Whether a value is a column: a Series of pandas or polars, or an array of Arrow."""
    if is_row_stream(source) or is_table(source):
        return False
    return speaks_arrow(source) or hasattr(source, "__arrow_c_array__") or has_all(source, "to_numpy", "name")


def is_array(source: Any) -> bool:
    """Whether a value has a shape: an array or a tensor of any library."""
    return torch_layout(source) != "" or _has(source, "shape")  # nested tensors have no shape


def is_pair_of_arrays(source: Any) -> bool:
    """Whether a value is a tuple or list of two arrays."""
    return isinstance(source, tuple | list) and len(source) == 2 and all(map(is_array, source))


def is_tabular(source: Any) -> bool:
    """Whether a value is a table, a column, or an array of strings."""
    strings = is_array(source) and getattr(getattr(source, "dtype", None), "kind", None) in ("U", "T", "O")
    return strings or any(hasattr(source, name) for name in _OF_TABLES)


def name_of(source: Any, otherwise: str) -> str:
    """Return the name of a column, for messages."""
    return str(getattr(source, "name", None) or otherwise)
