"""The rnn engine: recurrent layers, and which algorithm runs them. The public names are in weft and weft.nn."""

from .halves import slice_chunks, takes_halves

__all__ = ["slice_chunks", "takes_halves"]
