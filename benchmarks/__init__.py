"""Benchmarks: ``python -m benchmarks.<engine>`` measures, ``python -m benchmarks.plot`` draws what was measured."""
