// Half types are not run on a processor.
#pragma once
using __half = float;
