"""Weft's layers in the place of torch's, and torch's own kernels."""
