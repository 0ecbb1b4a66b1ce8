"""How a store holds features and edges: dtypes, quantised rows, coded neighbours, and bytes on disk and in a batch."""

from collections.abc import Mapping

import numpy as np

from ..errors import short
from ..foreign import is_csr
from ..triton_kernels.gather_rows import RowCode

FEATURE_STORAGE = ("float32", "float16", "bfloat16", "int8", "int4")
EDGE_STORAGE = ("delta",)
_CODE_BITS = {"bfloat16": 16, "int8": 8, "int4": 4}
_MOST_BFLOAT16 = 2.0**127 * (2 - 2.0**-7)
_BEYOND_BFLOAT16 = np.float32(2.0**127 * (2 - 2.0**-8))  # rounds to infinity


def check_storage(storage: str | None, features) -> None:
    """Refuse a `feature_storage` that is unknown, or does not go with the features: an array, CSR features, or None."""
    if storage is None:
        return
    if isinstance(features, Mapping) and storage in FEATURE_STORAGE:
        for rows in features.values():
            check_storage(storage, rows)
        return
    if storage not in FEATURE_STORAGE:
        raise ValueError(f"feature_storage must be null or one of {', '.join(FEATURE_STORAGE)}, got {short(storage)}")
    if features is None:
        raise ValueError(f"feature_storage={storage} says how features are stored, and there are none: leave it out")
    sparse = is_csr(features)
    dtype = features.data.dtype if sparse else features.dtype
    if dtype.kind != "f":
        raise ValueError(f"feature_storage={storage} takes floats, the features are {dtype}: leave it out to keep them")
    if sparse and row_code(storage, features.shape[1]) is not None:
        raise ValueError(
            f"feature_storage={storage} needs dense features, but these are sparse (CSR): use float16 or float32"
        )


def check_edge_storage(storage: str | None) -> None:
    """Refuse an `edge_storage` that is unknown."""
    if storage is not None and storage not in EDGE_STORAGE:
        raise ValueError(f"edge_storage must be null or {', '.join(EDGE_STORAGE)}, got {short(storage)}")


def row_code(storage: str | None, dim: int) -> RowCode | None:
    """Return the code of a `feature_storage`; None where rows are of a dtype that numpy has."""
    return RowCode(dim, _CODE_BITS[storage]) if storage in _CODE_BITS else None


def stored_form(storage: str | None, dim: int, given: np.dtype) -> tuple[np.dtype, int]:
    """Return the dtype and the number of items of a dense row of `dim` columns as it is stored.

    Storage None: as given.
    """
    code = row_code(storage, dim)
    return (np.dtype(storage or given), dim) if code is None else (np.dtype(np.uint8), code.row_bytes)


def held_values(rows: np.ndarray, storage: str | None) -> np.ndarray:
    """Return numbers as a `feature_storage` holds their magnitude: those beyond it are infinite; None: as they are."""
    with np.errstate(over="ignore"):
        if storage not in _CODE_BITS:
            return rows if storage is None else rows.astype(storage, copy=False)
        held = rows.astype(np.float32, copy=False)
        return np.where(np.abs(held) < _BEYOND_BFLOAT16, held, held * 4) if storage == "bfloat16" else held


def largest_held(storage: str | None, given: np.dtype) -> tuple[str, float]:
    """Return the name of the floats that a `feature_storage` is made from, and their largest; None: as given."""
    if storage == "bfloat16":
        return storage, _MOST_BFLOAT16
    floats = np.dtype(np.float32 if storage in _CODE_BITS else storage or given)
    return floats.name, float(np.finfo(floats).max)


def feature_bytes(features, storage: str | None) -> int:
    """Return the bytes of features as a store holds them; arguments as for `check_storage`."""
    if features is None:
        return 0
    if isinstance(features, Mapping):
        return sum(feature_bytes(rows, storage) for rows in features.values())
    if is_csr(features):
        width = np.dtype(storage or features.data.dtype).itemsize
        return len(features.indices) * (4 + width) + len(features.indptr) * 8
    dtype, items = stored_form(storage, features.shape[1], features.dtype)
    return features.shape[0] * items * dtype.itemsize


def dense_batch_row_bytes(dim: int, dtype: np.dtype) -> float:
    """Return the bytes of one dense row in a batch: as it is gathered, in `dtype`, and its float32 copy."""
    return float(dim * (dtype.itemsize + (0 if dtype == np.float32 else 4)))


def sparse_batch_row_bytes(num_values: int, num_rows: int) -> float:
    """Return the mean bytes of one sparse row in a batch: its nonzeros, 12 bytes each."""
    return 12.0 * num_values / max(num_rows, 1)
