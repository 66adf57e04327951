"""``v``, what a vertex function sees of the vertices it is evaluated on: pull, gather, scatter, push, and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

__all__ = ["VALUES_AS_NUMBERS", "Spec", "Vertex", "VertexType", "autocasts"]

VALUES_AS_NUMBERS = (
    "control flow or a Python number depends on a value, which differs from vertex to vertex; use torch.where"
)


def autocasts(kind: str) -> bool:
    """Whether torch's operations on devices of this kind are cast; of a kind that has no autocast torch raises."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@dataclass(frozen=True)
class Spec:
    """Shape of one row and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Tensor) -> Spec:
        return Spec(tuple(value.shape[1:]), value.dtype)


@dataclass(frozen=True)
class VertexType:
    """What all evaluations of one vertex function have in common."""

    name: str
    """The class of the function, for messages."""
    state: Spec
    inputs: Mapping[str, Spec]
    device: torch.device


_METHODS = ("pull", "pull_edges", "gather", "gather_sum", "scatter", "push")


class Vertex:
    """The vertices that a vertex function is evaluated on, N together; who they are is the executor's choice.

    Every value has the N vertices as its first dimension. A subclass gives the rows; this class checks what the vertex
    function asks for and hands over, and keeps what it scatters and pushes.
    """

    def __init__(self, type: VertexType, rows: int):
        self._type, self._rows = type, rows
        self._pulled: dict[str, Tensor] = {}
        self._pulled_edges: dict[str, Tensor] = {}
        self._in_message = False
        self.state: Tensor | None = None
        self.outputs: list[Tensor] = []
        self.refusal: Exception | None = None
        """The error that one of the methods raised."""

    # What executors give. --------------------------------------------------------------------------------------------

    def _pull(self, name: str) -> Tensor:
        raise NotImplementedError

    def _pull_edges(self, name: str) -> Tensor:
        """(E, ...)."""
        raise NotImplementedError

    def _gather(self, k: int) -> Tensor:
        raise NotImplementedError

    def _children(self) -> Tensor:
        """``(E, *state_size)``, a row per child."""
        raise NotImplementedError

    def _repeat(self, value: Tensor) -> Tensor:
        """(N, ...) to (E, ...)."""
        raise NotImplementedError

    def _sum(self, messages: Tensor) -> Tensor:
        """(E, ...) to (N, ...)."""
        raise NotImplementedError

    def _messages(self) -> int:
        """E."""
        raise NotImplementedError

    def _sum_of_none(self) -> Tensor:
        """What gather_sum returns where no vertex has a child."""
        raise NotImplementedError

    def _scatter(self, state: Tensor) -> Tensor:
        return state

    def _push(self, output: Tensor) -> Tensor:
        return output

    def _inside_message(self) -> AbstractContextManager[None]:
        return nullcontext()

    # What users call. ------------------------------------------------------------------------------------------------

    def pull(self, name: str = "input") -> Tensor:
        """These vertices' rows of the input `name`, (N, ...)."""
        return self._once("pull", name, self._pulled, self._pulled_edges, self._pull)

    def pull_edges(self, name: str) -> Tensor:
        """Rows of the input `name` for the edges to these vertices' children, (E, ...).

        The input has a row per edge, in the order of ``graphs.edges``. What this returns goes to :meth:`gather_sum` as
        it is, among `args`, and comes to the message beside the child that the edge leads to. Vertex functions that
        call it run on the reference executor.
        """
        return self._once("pull_edges", name, self._pulled_edges, self._pulled, self._pull_edges)

    def gather(self, k: int) -> Tensor:
        """States of the children in slot `k`, ``(N, *state_size)``, zeros where there is none."""
        self._enter("gather")
        if isinstance(k, bool) or not isinstance(k, int):
            kind = "Tensor" if isinstance(k, Tensor) else type(k).__name__
            self._refuse(TypeError, f"gather: the slot must be an int, got {kind}")
        if k < 0:
            self._refuse(ValueError, f"gather: the slot must not be negative, got {k}")
        return self._gather(k)

    def gather_sum(self, message: Callable[..., Tensor] | None = None, *args: Tensor) -> Tensor:
        """Sum of all children's states or of ``message(child, *args)``, zeros where there is none.

        Args:
            message: takes the states of children, ``(E, *state_size)``, and `args` with the row of a vertex repeated
                for each of its children, (E, ...); returns (E, ...).
            args: values of these vertices, (N, ...), and what :meth:`pull_edges` gave, (E, ...).

        Returns:
            ``(N, *state_size)``, or ``(N, ...)`` in the shape of the messages.
        """
        self._enter("gather_sum")
        if message is None:
            if args:
                self._refuse(TypeError, "gather_sum: arguments without a message")
            return self._sum(self._children()) if self._messages() else self._sum_of_none()
        if not callable(message):
            self._refuse(TypeError, f"gather_sum: message must be callable, got {type(message).__name__}")
        of_edges = {id(value) for value in self._pulled_edges.values()}
        for i, arg in enumerate(args):
            if id(arg) not in of_edges:
                self._check_rows(f"argument {i} of gather_sum", arg)
        if self._messages() == 0:
            return self._sum_of_none()
        children, repeated = self._children(), [arg if id(arg) in of_edges else self._repeat(arg) for arg in args]
        with self._inside_message():
            self._in_message = True
            try:
                messages = message(children, *repeated)
            finally:
                self._in_message = False
        self._check_rows("the message of gather_sum", messages, self._messages(), "child")
        return self._sum(messages)

    def scatter(self, state: Tensor) -> None:
        """Make `state`, ``(N, *state_size)``, what parents gather."""
        self._enter("scatter")
        if self.state is not None:
            self._refuse(RuntimeError, "vertex scatters twice")
        self._check_rows("what vertex scatters", state)
        want = self._type.state
        if tuple(state.shape[1:]) != want.shape:
            self._refuse(
                ValueError,
                f"vertex scatters rows of shape {tuple(state.shape[1:])}, state_size is {want.shape}",
            )
        if state.dtype != want.dtype:
            if not autocasts(self._type.device.type):
                self._refuse(TypeError, f"vertex scatters {state.dtype}, the dtype of the state is {want.dtype}")
            state = state.to(want.dtype)
        self.state = self._scatter(state)

    def push(self, output: Tensor) -> None:
        """Make `output`, (N, ...), the caller's."""
        self._enter("push")
        self._check_rows("what vertex pushes", output)
        self.outputs.append(self._push(output))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # copies are asked before they have a type
            raise AttributeError(name)
        raise AttributeError(f"{self.__dict__['_type'].name}: v has no {name!r}; it has {', '.join(_METHODS)}")

    def _once(
        self,
        method: str,
        name: str,
        pulled: dict[str, Tensor],
        otherwise: dict[str, Tensor],
        pull: Callable[[str], Tensor],
    ) -> Tensor:
        self._enter(method)
        if not isinstance(name, str):
            self._refuse(TypeError, f"{method}: name must be a str, got {type(name).__name__}")
        if name not in pulled:
            if name not in self._type.inputs:
                given = ", ".join(map(repr, self._type.inputs)) or "none"
                self._refuse(ValueError, f"vertex pulls input {name!r}, which is missing; inputs given: {given}")
            if name in otherwise:
                self._refuse(ValueError, f"vertex pulls input {name!r} both for vertices and for edges")
            pulled[name] = pull(name)
        return pulled[name]

    def _enter(self, method: str) -> None:
        if self._in_message:
            self._refuse(RuntimeError, f"a message of gather_sum must not call {method}")

    def _check_rows(self, what: str, value: object, rows: int | None = None, row: str = "vertex") -> None:
        rows = self._rows if rows is None else rows
        if not isinstance(value, Tensor):
            self._refuse(TypeError, f"{what} must be a tensor, got {type(value).__name__}")
        if value.dim() == 0 or value.shape[0] != rows:
            shape = ", ".join("N" if s == rows else str(s) for s in value.shape)
            self._refuse(ValueError, f"{what} must have one row per {row}, got shape ({shape})")

    def _refuse(self, error: type[Exception], message: str) -> None:
        self.refusal = error(f"{self._type.name}: {message}")
        raise self.refusal
