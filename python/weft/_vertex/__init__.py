"""What stands behind weft.vertex: graphs, vertex functions, and how their calls run."""
