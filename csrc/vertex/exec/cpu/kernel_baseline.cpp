// The interpreter of vertex/exec/cpu/kernel.h for what every processor of the architecture has.
#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/program.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "vertex/exec/cpu/kernel-inl.h"

#include "common/cpu/simd-end-inl.h"
