"""Row gather from a dense table."""

from .op import gather_rows

__all__ = ["gather_rows"]
