"""``weft.VertexFunction`` and ``weft.VertexFunctions``: a cell declared once, run over any batch of graphs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .._base.arguments import NotScriptable
from .calls import compiled_of, run
from .graphs import Graphs
from .program import Program, Programs
from .vertex import Vertex

__all__ = ["VertexFunction", "VertexFunctions"]


class _Module(NotScriptable, nn.Module):
    """What a function and several of them have in common."""

    state_size: tuple[int, ...]
    _instead = "a vertex function compiles itself"

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @property
    def program(self) -> Program | Programs:
        """The program of the latest call; ``print`` it.

        One line per operation, with the shapes of its results and when it runs: before the frontiers (once for all
        vertices), in them, or after them. N is the number of vertices, E that of children. Where the call ran batched
        and something asks for gradients, the derived backward program follows.

        Raises:
            RuntimeError: the module was not called yet.
        """
        program = compiled_of(self).program
        if program is None:
            raise RuntimeError(f"{type(self).__name__}: there is no program before the first call")
        return program

    @property
    def script(self) -> str:
        """What drove the persistent kernel in the latest call, a line per instruction.

        Raises:
            RuntimeError: the latest call did not run on the persistent executor, or there was none.
        """
        script = compiled_of(self).script
        if script is None:
            raise RuntimeError(f"{type(self).__name__}: the latest call did not run on the persistent executor")
        return str(script())

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        """The functions, each once, and the number of that of each type, None where types do not count."""
        raise NotImplementedError

    def _run(self, graphs: Graphs, inputs: object, executor: str) -> Tensor | tuple[Tensor, ...]:
        try:
            outputs = run(self, graphs, inputs, executor)
        except RuntimeError as error:
            if "same dtype" not in str(error):
                raise
            # torch's, of a product of an input and a parameter: fake tensors do not mind.
            given = {"input": inputs} if isinstance(inputs, Tensor) else inputs or {}
            dtypes = ", ".join(f"input {key!r} is {x.dtype}" for key, x in given.items())
            own = ", ".join(sorted({str(p.dtype) for p in self.parameters()}))
            raise RuntimeError(f"{type(self).__name__}: {dtypes}, the parameters are {own}: {error}") from error
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class VertexFunction(_Module):
    """One cell of a net over graphs, to subclass: override :meth:`vertex`, not :meth:`forward`.

    >>> class TreeRNN(weft.VertexFunction):
    ...     def __init__(self, x, h):
    ...         super().__init__(state_size=h)
    ...         self.W, self.U = nn.Linear(x, h), nn.Linear(h, h, bias=False)
    ...     def vertex(self, v):
    ...         h = torch.tanh(self.W(v.pull()) + self.U(v.gather_sum()))
    ...         v.scatter(h)
    ...         v.push(h)

    Args:
        state_size: the shape of what one vertex scatters; an int s is short for ``(s,)``.

    Raises:
        ValueError: a size is negative.
        TypeError: `state_size` is neither an int nor a sequence of ints.

    Source: Cavs (Xu et al., USENIX ATC 2018), section 3.1.
    """

    def __init__(self, state_size: int | Sequence[int]):
        super().__init__()
        self.state_size = _state_size(type(self).__name__, state_size)

    def vertex(self, v: Vertex) -> None:
        """The cell, on N vertices together: who they are is not defined, so rows must not be mixed.

        ``v`` has :meth:`~weft.vertex.Vertex.pull`, :meth:`~weft.vertex.Vertex.gather`,
        :meth:`~weft.vertex.Vertex.gather_sum`, :meth:`~weft.vertex.Vertex.scatter` and
        :meth:`~weft.vertex.Vertex.push`. Everything else may be any operation of torch; a number in Python must not
        depend on a value.
        """
        raise NotImplementedError(f"{type(self).__name__}: vertex(self, v) is not implemented")

    def forward(
        self, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None, *, executor: str = "auto"
    ) -> Tensor | tuple[Tensor, ...]:
        """Evaluate the function at every vertex, children before parents.

        Args:
            graphs: a batch of graphs.
            inputs: what ``pull`` gives: tensors (num_vertices, ...) by name, (num_edges, ...) of what ``pull_edges``
                gives; a tensor is short for ``{"input": tensor}``.
            executor: ``"auto"``, ``"persistent"``, ``"batched"`` or ``"reference"``. What ``"persistent"`` cannot do
                runs as ``"batched"``, and what that cannot do as ``"reference"``; :func:`weft.explain` says why.

        Returns:
            What ``vertex`` pushes, (num_vertices, ...), row i of vertex i; a tuple where it pushes several times.

        Raises:
            TypeError: `graphs` is no :class:`weft.Graphs`, an input no tensor; what is scattered or pushed no tensor or
                of another dtype than the state.
            ValueError: an input is missing, superfluous, or has another number of rows; a child is in a slot that
                ``vertex`` does not gather; a shape of what is scattered or pushed is wrong; the executor is unknown.
            RuntimeError: a Python number in ``vertex`` depends on a value; it scatters twice, pushes nothing, gathers
                but does not scatter, or uses a tensor that requires grad and is not the module's; tensors are on
                different devices.
        """
        return _apart(self, graphs, inputs, executor)

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        return [self], None

    def _declares_vertex(self) -> bool:
        return type(self).vertex is not VertexFunction.vertex or "vertex" in self.__dict__


class VertexFunctions(_Module, nn.ModuleDict):
    """Several vertex functions in one graph: each vertex runs the one that ``graphs.types`` names.

    Args:
        functions: by type; one function may stand under several names.

    Raises:
        ValueError: there is none, or their ``state_size`` differ, also where a call finds it so after changes.
        TypeError: a name is no str, or a value no :class:`VertexFunction`, also where a call finds it so.
    """

    def __init__(self, functions: Mapping[str, VertexFunction]):
        if not isinstance(functions, Mapping):
            raise TypeError(f"VertexFunctions: functions must be a mapping, got {type(functions).__name__}")
        for name in functions:
            if not isinstance(name, str):
                raise TypeError(f"VertexFunctions: a name must be a str, got {type(name).__name__}")
        _check_functions(functions)
        super().__init__(functions)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """What sets an entry, too: it has to be a :class:`VertexFunction`."""
        _check_function(name, module)
        super().add_module(name, module)

    @property
    def state_size(self) -> tuple[int, ...]:
        """The shape of what one vertex scatters."""
        return next(iter(self.values())).state_size

    def forward(
        self, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None, *, executor: str = "auto"
    ) -> Tensor | tuple[Tensor, ...]:
        """As :meth:`VertexFunction.forward`; `graphs` has types. Rows of vertices whose function pushes nothing are 0.

        Raises:
            ValueError: `graphs` has no types, or one without a function.
            RuntimeError: the functions push different numbers of tensors, shapes or dtypes, or none pushes.

        And what :meth:`VertexFunction.forward` raises.
        """
        return _apart(self, graphs, inputs, executor)

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        _check_functions(self)  # entries are set in ways that ask nobody, too, as attributes are
        functions = list({id(f): f for f in self.values()}.values())
        numbers = {id(f): i for i, f in enumerate(functions)}
        return functions, {name: numbers[id(f)] for name, f in self.items()}


def _check_functions(functions: Mapping[str, object] | VertexFunctions) -> None:
    for name, function in functions.items():
        _check_function(name, function)
    if not functions:
        raise ValueError("VertexFunctions: there must be a function")
    sizes = {name: function.state_size for name, function in functions.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"VertexFunctions: all functions must have one state_size, got {sizes}")


def _check_function(name: str, function: object) -> None:
    if not isinstance(function, VertexFunction):
        raise TypeError(f"VertexFunctions: {name!r} must be a VertexFunction, got {type(function).__name__}")
    if not hasattr(function, "state_size"):
        kind = type(function).__name__
        raise TypeError(f"VertexFunctions: {name!r} has no state_size: {kind}.__init__ must call super().__init__")


def _state_size(name: str, size: object) -> tuple[int, ...]:
    def whole(s: object) -> int:
        if isinstance(s, bool):
            raise TypeError
        return operator.index(s)

    try:
        if isinstance(size, (str, bytes)):
            raise TypeError
        found = tuple(map(whole, size)) if isinstance(size, Sequence) else (whole(size),)
    except TypeError:
        raise TypeError(f"{name}: state_size must be an int or a sequence of ints, got {size!r}") from None
    if any(s < 0 for s in found):
        raise ValueError(f"{name}: state_size must not be negative, got {size!r}")
    return found


def _apart(module: _Module, graphs: Graphs, inputs: object, executor: str) -> Tensor | tuple[Tensor, ...]:
    """The call, outside of the graphs of torch.compile."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
        return torch._dynamo.disable(_Module._run)(module, graphs, inputs, executor)
    return module._run(graphs, inputs, executor)
