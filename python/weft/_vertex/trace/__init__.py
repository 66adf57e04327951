"""Tracing: what a vertex function does, recorded once as a program."""
