"""Behind :mod:`weft.distributed`."""
