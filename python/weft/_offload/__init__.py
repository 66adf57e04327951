"""The offload engine's parts."""
