"""The compiler: from a trace to kernels over frontiers."""
