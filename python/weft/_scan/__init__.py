"""The scan engine. The public names are in weft.scan."""
