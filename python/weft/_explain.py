"""``weft.explain``: the question goes to the engine of what is asked about."""

from __future__ import annotations

from . import vertex
from ._rnn.explain import explain as explain_layer
from ._vertex.explain import explain as explain_vertex_function


def explain(*args, **kwargs):
    """Say what would run and why, without computing anything; ``print`` the answer.

    ``explain(layer, x, hx=None)`` is about one of Weft's recurrent layers or cells: which algorithm runs it on an
    input, and why not the others.

    ``explain(cell, graphs, inputs=None, *, executor="auto")`` is about a vertex function: which executor runs it.

    Returns:
        An explanation: ``algorithm``, ``reason`` and ``candidates`` of a layer; ``executor``, ``asked`` and ``reason``
        of a vertex function.

    Raises:
        TypeError: the first argument is neither.
        Otherwise what the layer or the vertex function itself raises.
    """
    subject = args[0] if args else kwargs.get("cell")
    about_cell = isinstance(subject, (vertex.VertexFunction, vertex.VertexFunctions))
    return (explain_vertex_function if about_cell else explain_layer)(*args, **kwargs)
