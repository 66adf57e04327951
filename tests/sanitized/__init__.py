"""The CUDA kernels on small cases, in parts that take a minute or so each under a tool of compute-sanitizer.

What the kernels give is for the tests; here they only have to run: every kind of kernel, chunks that are computed
again, each tier and each way of the recurrence kernel where it is asked for. A file a room, with its parts in PARTS.
"""
