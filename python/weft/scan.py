"""Back-propagation as a parallel scan: linear recurrences, chains of Jacobians, and recurrences of pointwise steps.

Source: BPPSA (Wang, Bai, Pekhimenko, "Scaling back-propagation by parallel scan algorithm", MLSys 2020).
"""

from __future__ import annotations

from ._scan.chain import Step, chain_backward, chain_backward_reference
from ._scan.linear import linear_scan, linear_scan_reference
from ._scan.newton import NewtonRun, newton_report
from ._scan.pointwise import pointwise_scan, pointwise_scan_reference
from ._scan.sequential import ScanSequential
from ._scan.work import ChainPlan, plan_chain

__all__ = [
    "ChainPlan",
    "NewtonRun",
    "ScanSequential",
    "Step",
    "chain_backward",
    "chain_backward_reference",
    "linear_scan",
    "linear_scan_reference",
    "newton_report",
    "plan_chain",
    "pointwise_scan",
    "pointwise_scan_reference",
]
