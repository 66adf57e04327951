// The types of the recurrence kernel.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// TYPE: 0 fp16, 1 bf16, else fp32.
#if TYPE == 0 || TYPE == 1
typedef unsigned short Element;
#else
typedef float Element;
#endif
