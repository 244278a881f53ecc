"""`as_pages`: our pages in the shape that FlashMLA and DeepGEMM take."""

from torch import Tensor

from dsv4.formats import PagedRows


def as_pages(pages: PagedRows) -> Tensor:
    """View pages as `[num_pages, rows_per_page, 1, row_bytes]` uint8.

    A page keeps the data of all its rows, then their scales. The shape gives the number of bytes
    alone; the kernels know where each part of a row lies.
    """
    num_pages, run_bytes = pages.storage.shape
    row_bytes = pages.format.row_bytes
    return pages.storage.as_strided(
        (num_pages, pages.rows_per_page, 1, row_bytes),
        (run_bytes, row_bytes, row_bytes, 1),
        pages.storage.storage_offset() + pages.offset,
    )
