"""Row gather from a dense table, and from several tables; quantised rows are decoded on the way."""

from .op import encode_codes, gather_rows, gather_tiers
from .tiers import RowCode, RowTables, pack_places, unpack_places

__all__ = ["RowCode", "RowTables", "encode_codes", "gather_rows", "gather_tiers", "pack_places", "unpack_places"]
