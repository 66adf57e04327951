"""Loads the compiled library, and says in one sentence what went wrong where it cannot."""

from __future__ import annotations

import torch

_BUILD = "pip install . --no-build-isolation"

try:
    from . import _build_info
except ImportError as error:
    raise ImportError(f"weft: the compiled library is missing; run `{_BUILD}` in Weft's source folder") from error

if _build_info.TORCH != torch.__version__:
    raise ImportError(
        f"weft: built for torch {_build_info.TORCH}, found torch {torch.__version__}; "
        f"run `{_BUILD}` in Weft's source folder again"
    )

try:
    from . import _C
except ImportError as error:
    raise ImportError(f"weft: the compiled library does not load ({error}); run `{_BUILD}` again") from error

from ._base import costs as _gpu_costs  # noqa: E402  gives the library the costs of GPUs

# A room registers its ops' rules and flop formulas when these modules are imported.
from ._distributed import flops as _distributed_flops  # noqa: E402
from ._offload import rules as _offload_rules  # noqa: E402
from ._rnn import cell_rules as _cell_rules  # noqa: E402
from ._rnn import flops as _rnn_flops  # noqa: E402
from ._rnn import rules as _rnn_rules  # noqa: E402
from ._scan import flops as _scan_flops  # noqa: E402
from ._scan import rules as _scan_rules  # noqa: E402
from ._sparse import flops as _sparse_flops  # noqa: E402
from ._sparse import rules as _sparse_rules  # noqa: E402
from ._vertex import flops as _vertex_flops  # noqa: E402
from ._vertex import rules as _vertex_rules  # noqa: E402

WITH_CUDA: bool = _C.with_cuda
"""Whether the CUDA kernels were built."""

__all__ = ["WITH_CUDA"]
_ = (
    _cell_rules,
    _distributed_flops,
    _gpu_costs,
    _offload_rules,
    _rnn_flops,
    _rnn_rules,
    _scan_flops,
    _scan_rules,
    _sparse_flops,
    _sparse_rules,
    _vertex_flops,
    _vertex_rules,
)
