// What launchers' headers name of the CUDA runtime.
#pragma once
using cudaStream_t = struct CUstream_st*;
