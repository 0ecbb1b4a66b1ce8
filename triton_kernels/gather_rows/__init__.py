"""Row gather from a dense table, and from rows that lie in several tables."""

from .op import gather_rows, gather_tiers
from .tiers import RowTables, pack_places, unpack_places

__all__ = ["RowTables", "gather_rows", "gather_tiers", "pack_places", "unpack_places"]
