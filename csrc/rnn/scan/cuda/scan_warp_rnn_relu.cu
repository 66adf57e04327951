// The forward pass and the scan by warps of one cell; a file each, so that they compile side by side.
#include "rnn/scan/cuda/scan_warp.cuh"

WEFT_SCAN_WARP(kRnnRelu)
