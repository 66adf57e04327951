// Half types are not run on a processor.
#pragma once
using __nv_bfloat16 = float;
