"""Pages of keys and values: their physical shape, and the operations that move them."""

from pallas_kernels.kv_pages.api import copy_pages, gather_pages, scatter_pages, write_kv_pages, write_kv_scales
from pallas_kernels.kv_pages.quantize import quantize_rows
from pallas_kernels.kv_pages.shape import allocate_pages, page_shape

__all__ = [
    "allocate_pages",
    "copy_pages",
    "gather_pages",
    "page_shape",
    "quantize_rows",
    "scatter_pages",
    "write_kv_pages",
    "write_kv_scales",
]
