// weft::rnn's CPU kernels for what every processor of the architecture has.
#include "rnn/persistent/cpu/rnn_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "rnn/persistent/cpu/rnn_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
