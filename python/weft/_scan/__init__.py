"""The scan engine. The public names are in weft.scan; here is what rooms above use of it."""

from .flops import linear_scan_backward_flops, linear_scan_flops
from .halves import slice_chunks

__all__ = ["linear_scan_backward_flops", "linear_scan_flops", "slice_chunks"]
