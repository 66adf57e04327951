// What launchers' headers name of the CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>
