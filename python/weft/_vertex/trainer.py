"""``weft.vertex.Trainer``: whole training steps of a vertex function, none of which waits for the device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .._base.torch_private import GLOBAL_HOOKS, has_hooks
from .._C import vertex as _C
from .calls import EXECUTORS, prepare, ready, whole
from .explain import Explanation, explanation
from .function import VertexFunction, VertexFunctions
from .graphs import Graphs
from .runtime import persistent, training
from .runtime.call_cache import HOOKS, Ready, Snapshot
from .runtime.resident import captures

__all__ = ["Trainer", "TrainerExplanation", "explain_trainer"]

LOSSES = ("cross_entropy", "mse")
PLACES = ("vertices", "roots")


class Trainer:
    """Training steps of a cell: zero_grad, backward and ``optimizer.step()`` of a loss, in one call each.

    The loss is ``F.cross_entropy(y, targets, ignore_index=ignore_index)`` or ``F.mse_loss(y, targets)`` with
    ``y = head(cell(graphs, inputs))``, of ``at="roots"`` its rows ``graphs.roots``. In float32 on CUDA one kernel does
    all of a step where `head` is None or an ``nn.Linear`` and `optimizer` an SGD, Adam or AdamW without ``amsgrad`` and
    ``maximize``: by itself where it is expected to be faster, under ``executor="persistent"`` wherever it can. All
    else runs as that loop in torch. ``weft.explain(trainer, graphs, inputs)`` says which.

    >>> cell, scores = weft.vertex.models.TreeLSTM(8, 16), torch.nn.Linear(16, 5)
    >>> optimizer = torch.optim.SGD([*cell.parameters(), *scores.parameters()], 0.1, momentum=0.9)
    >>> trainer = weft.vertex.Trainer(cell, optimizer, head=scores)
    >>> batches = [(weft.Graphs.from_children([[[], [], [0, 1]]]), torch.randn(3, 8), torch.tensor([0, 4, 2]))]
    >>> for graphs, x, labels in batches:
    ...     loss = trainer.step(graphs, x, labels)     # of the step before: nothing waits for the device
    >>> loss = trainer.sync()

    After a step, in stream order, the parameters and ``optimizer.state`` are what the loop would make them, with higher
    versions. ``.grad`` of the parameters stays as it is. Hyperparameters are read at each step, so that schedulers of
    the learning rate work as ever. Not for several threads at once.

    Args:
        cell: a :class:`weft.VertexFunction` or :class:`weft.VertexFunctions` that pushes one tensor.
        optimizer: of parameters of `cell` and `head`.
        loss: ``"cross_entropy"`` or ``"mse"``, a mean over what is not ignored.
        head: what makes y of the pushed tensor; None where that is y.
        at: ``"vertices"`` or ``"roots"``: where the loss is taken.
        ignore_index: a class that does not count.
        executor: the cell's.

    Raises:
        ValueError: `loss`, `at` or `executor` is unknown; the optimizer has a parameter that is neither the cell's nor
            the head's.
        TypeError: `cell` is no vertex function, `optimizer` no ``torch.optim.Optimizer``, `head` cannot be called.

    Source: VPPS (MICRO 2018), section III.
    """

    def __init__(
        self,
        cell: VertexFunction | VertexFunctions,
        optimizer: Optimizer,
        loss: str = "cross_entropy",
        *,
        head: nn.Module | Callable[[Tensor], Tensor] | None = None,
        at: str = "vertices",
        ignore_index: int = -100,
        executor: str = "auto",
    ):
        if not isinstance(cell, (VertexFunction, VertexFunctions)):
            raise TypeError(f"Trainer: cell must be a VertexFunction or VertexFunctions, got {type(cell).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"Trainer: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        for name, value, possible in (("loss", loss, LOSSES), ("at", at, PLACES), ("executor", executor, EXECUTORS)):
            if value not in possible:
                raise ValueError(f"Trainer: {name} must be one of {', '.join(map(repr, possible))}, got {value!r}")
        if head is not None and not callable(head):
            raise TypeError(f"Trainer: head must be a module or None, got {type(head).__name__}")
        try:
            if isinstance(ignore_index, bool):
                raise TypeError
            self.ignore_index = operator.index(ignore_index)
        except TypeError:
            raise TypeError(f"Trainer: ignore_index must be an int, got {type(ignore_index).__name__}") from None
        self.cell, self.optimizer, self.head = cell, optimizer, head
        self.loss, self.at, self.executor = loss, at, executor
        self._updates = training.Updates(optimizer)
        self._latest: float | None = None
        self._pending: _Pending | None = None
        self._refused: Tensor | None = None
        self._turns: object = None
        """On the device, 1 from a step that it refused until the host knows."""
        self._parts: _Parts | None = None
        """Of the latest step."""
        self._check_trained(self._trained(), cell.parameters())

    def step(self, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None, targets: Tensor) -> float | None:
        """One training step. On CUDA it waits for the step before, if at all.

        Args:
            graphs: a batch of graphs, with a vertex at least.
            inputs: as the cell takes them. Gradients of those that require grad go where ``backward`` sends them.
            targets: for ``"cross_entropy"`` int64, a class for each row of y, (rows,), or (rows, ...) where y is
                (rows, C, ...); for ``"mse"`` like y.

        Returns:
            The loss of the step before, None at the first.

        Raises:
            ValueError: the batch has no vertices; `targets` has another shape; the cell pushes several tensors; the
                optimizer has a parameter that is neither the cell's nor the head's.
            TypeError: `targets` is no tensor or of another dtype.
            RuntimeError: tensors are on different devices; a CUDA graph is captured.
            IndexError: a class is not in [0, C) and is not `ignore_index`, in this step or in the one before it, on
                CUDA by the next :meth:`step` or :meth:`sync`. Neither step then changes anything.

        And what the cell, the head and the optimizer raise. A refused step changes nothing.
        """
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
            return torch._dynamo.disable(Trainer._step)(self, graphs, inputs, targets)
        return self._step(graphs, inputs, targets)

    def sync(self) -> float | None:
        """Wait for the latest step.

        Returns:
            Its loss, None where there was no step.

        Raises:
            IndexError: as :meth:`step`, of the latest step.
        """
        self._settle()
        return self._latest

    def __repr__(self) -> str:
        names = [type(x).__name__ for x in (self.cell, self.optimizer)]
        head = "" if self.head is None else f", head={type(self.head).__name__}"
        return f"Trainer({names[0]}, {names[1]}, loss={self.loss!r}{head}, at={self.at!r}, executor={self.executor!r})"

    def __getstate__(self) -> dict:
        self.sync()
        own = {"_refused": None, "_turns": None, "_parts": None, "_updates": training.Updates(self.optimizer)}
        return {**self.__dict__, **own}

    def _step(self, graphs: Graphs, inputs: object, targets: object) -> float | None:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._step(graphs, inputs, targets)
        if self._updates.optimizer is not self.optimizer:
            self._updates = training.Updates(self.optimizer)
        call = ready(self.cell, graphs, inputs, self.executor)
        again = self._repeats(call, graphs, targets)
        if again:
            parts = self._parts
        else:
            parts = self._parts_of(call)
            self._check(call, graphs, targets, parts)
        if call.device.type == "cuda" and captures(call.device):
            raise RuntimeError("Trainer: a step waits for the one before it, which cannot be captured in a CUDA graph")
        if self._pending is not None and self._pending.loss.there():
            self._settle()  # what is known to be refused need not be launched again
        if again:
            one_kernel = self.executor != "auto" or persistent.trains_faster(parts.operands.compiled, call)
        else:
            one_kernel = self._obstacle(call, parts) is None
        if not (one_kernel and self._train(call, graphs, targets, parts)):
            self._loop(call, graphs, inputs, targets, parts)
        return self._latest

    def _repeats(self, call: Ready, graphs: Graphs, targets: object) -> bool:
        """Whether the step differs from the one before, which was one kernel, in nothing but graphs, values and sizes:
        nothing else is to be checked then."""
        parts = self._parts
        if parts is None or not parts.repeats or not isinstance(targets, Tensor):
            return False
        rows = graphs._core.num_graphs if self.at == "roots" else graphs._core.num_vertices
        return (
            call.tensors is parts.tensors
            and call.compiled is parts.compiled  # which is another where an input requires grad, or under autocast
            and (self.loss, self.executor, self.at) == parts.asked
            and (targets.dtype, targets.device) == parts.of_targets
            and targets.shape == (rows, *parts.of_target)
            and (self.head is None if parts.head is None else parts.head.holds(self.head))
            and self._updates.same()
        )

    # What is refused.

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _head_parameters(self) -> list[nn.Parameter]:
        head = self.head
        if type(head) is nn.Linear:
            return [head.weight] if head.bias is None else [head.weight, head.bias]
        return [*head.parameters()] if isinstance(head, nn.Module) else []

    def _check_trained(self, trained: Sequence[nn.Parameter], cells: Iterable[Tensor]) -> None:
        possible = {id(p) for p in (*cells, *self._head_parameters())}
        for i, p in enumerate(trained):
            if id(p) not in possible:
                raise ValueError(
                    f"Trainer: parameter {i} of the optimizer, {tuple(p.shape)}, is neither the cell's nor the head's"
                )

    def _parts_of(self, call: Ready) -> _Parts:
        """What takes part in a step; looked at once as long as the tensors stay the same."""
        trained, heads = self._trained(), self._head_parameters()
        found, key = self._parts, [id(x) for x in (call.tensors, call.compiled, *trained, *heads)]
        key += [p.shape for p in heads]  # of which there is a kernel
        asked = self.loss, self.executor, self.at
        if found is None or found.key != key or found.asked != asked:
            self._check_trained(trained, self.cell.parameters())
            self._parts = found = _Parts(key, asked, call.tensors, call.compiled, trained, heads)
            found.obstacle = self._lasting_obstacle(call, found)
        found.repeats = False
        return found

    def _check_call(self, call: Ready, graphs: Graphs) -> None:
        if graphs.num_vertices == 0:
            raise ValueError("Trainer: the batch has no vertices")
        if len(call.outputs) > 1:
            pushes = len(call.outputs)
            raise ValueError(f"Trainer: {type(self.cell).__name__} pushes {pushes} tensors, a loss is of one")

    def _check(self, call: Ready, graphs: Graphs, targets: object, parts: _Parts) -> None:
        """Refuse what can be known before anything runs."""
        self._check_call(call, graphs)
        if not isinstance(targets, Tensor):
            raise TypeError(f"Trainer: targets must be a tensor, got {type(targets).__name__}")
        if self.loss == "cross_entropy" and targets.dtype != torch.int64:
            raise TypeError(f"Trainer: targets must be classes, torch.int64, got {targets.dtype}")
        if targets.device != call.device:
            raise RuntimeError(f"Trainer: targets are on {targets.device}, the cell on {call.device}")
        for p in parts.heads:
            if p.device != call.device:
                raise RuntimeError(f"Trainer: the head is on {p.device}, the cell on {call.device}")
        rows = graphs.num_graphs if self.at == "roots" else graphs.num_vertices
        (output,) = call.outputs
        cell_is_plain = not _does_more(self.cell)
        if self.head is None and cell_is_plain:
            self._check_targets((rows, *output.shape), output.dtype, targets)
        elif self._plain_linear() and cell_is_plain:
            last = output.shape[-1] if output.shape else 0
            if last != self.head.in_features:
                features = self.head.in_features
                raise RuntimeError(f"Trainer: the head takes {features} features, the cell pushes {(*output.shape,)}")
            dtype = None if torch.is_autocast_enabled(call.device.type) else self.head.weight.dtype
            self._check_targets((rows, *output.shape[:-1], self.head.out_features), dtype, targets)
        elif targets.dim() == 0 or targets.shape[0] != rows:
            raise self._other_shape((rows, "..."), targets)

    def _check_targets(self, y: Sequence[int], dtype: torch.dtype | None, targets: Tensor) -> None:
        if self.loss == "mse":
            if dtype is not None and targets.dtype != dtype:
                raise TypeError(f"Trainer: targets must be {dtype} as y, got {targets.dtype}")
            wanted = tuple(y)
        else:
            if len(y) < 2:
                raise ValueError(f"Trainer: y must be (rows, classes) for 'cross_entropy', got {tuple(y)}")
            wanted = (y[0], *y[2:])
        if targets.shape != wanted:
            raise self._other_shape(wanted, targets)

    def _other_shape(self, wanted: Sequence[object], targets: Tensor) -> ValueError:
        shape = f"({', '.join(map(str, wanted))}{',' if len(wanted) == 1 else ''})"
        where = "root" if self.at == "roots" else "vertex"
        return ValueError(f"Trainer: targets must be {shape}, a row per {where}, got {tuple(targets.shape)}")

    def _plain_linear(self) -> bool:
        """Whether the head is a Linear that does nothing else, and as large as it says."""
        head = self.head
        if type(head) is not nn.Linear or _does_more(head):
            return False
        return head.weight.shape == (head.out_features, head.in_features)

    # The loop.

    def _loop(self, call: Ready, graphs: Graphs, inputs: object, targets: Tensor, parts: _Parts) -> None:
        trained = parts.trained
        classes, bad, known = 0, None, None
        if call.device.type == "cuda":
            _load(call.device)
        with self._own_gradients(call, parts), self._same_buffers() as buffers:
            y = self._scores(call, graphs, inputs)
            self._check_targets(y.shape, y.dtype, targets)
            if self.loss == "mse":
                loss = F.mse_loss(y, targets)
            else:
                classes = y.shape[1]
                if call.device.type == "cuda":  # whose kernels end the process where a class is none
                    targets, bad = self._possible(targets, classes)
                    known = _Sent(call.device, bad)
                try:
                    loss = F.cross_entropy(y, targets, ignore_index=self.ignore_index)
                except IndexError:
                    raise self._not_a_class(classes) from None
            sent = _Sent(call.device, loss.detach())
            wanted = [p for p in trained if p.requires_grad]
            alone = self.head is None or isinstance(self.head, nn.Module)
            if wanted and alone and not any(x.requires_grad for x in call.rows.values()):
                loss.backward(inputs=wanted)
            else:
                loss.backward()
            self._settle()
            kept = None
            if known is not None:
                if not known.there():  # the device shall decide
                    kept = _Kept(self.optimizer, buffers)
                elif known.values()[0]:
                    raise self._not_a_class(classes)
            versions = [p._version for p in trained]
            self.optimizer.step()
            # Fused kernels of torch do not say what they have changed.
            torch.autograd.graph.increment_version(
                [p for p, v in zip(trained, versions, strict=True) if p._version == v and p.grad is not None]
            )
            if kept is not None:
                kept.put_back_where(bad)
                refused = self._flag(bad.device)  # a kernel that is launched before the host knows does nothing either
                torch.maximum(refused, bad, out=refused)
            self._pending = _Pending(sent, known, classes, _nothing if kept is None else kept.undo)

    def _scores(self, call: Ready, graphs: Graphs, inputs: object) -> Tensor:
        """y. Where rows of the head stay apart, only those that count go through it."""
        if _does_more(self.cell):  # its hooks get what a user's call would give them
            options = {} if self.executor == "auto" else {"executor": self.executor}
            output = self.cell(graphs, *(() if inputs is None else (inputs,)), **options)
        else:
            (output,) = call.run()
        head = self.head if self.head is not None else _same
        if self.at == "vertices":
            return head(output)
        roots = _roots(graphs, output.device)
        if self.head is None or self._plain_linear():
            return head(output.index_select(0, roots))
        return head(output).index_select(0, roots)

    def _possible(self, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Classes that torch's kernels can take, and whether the given ones are others."""
        ignored = targets == self.ignore_index
        inside = targets.clamp(0, classes - 1) if classes else self.ignore_index
        possible = torch.where(ignored, targets, inside)
        return possible, (possible != targets).any()

    def _not_a_class(self, classes: int, before: bool = False) -> IndexError:
        which = "a target of the step before" if before else "a target"
        both = "that step and this one change" if before else "the step changes"
        return IndexError(
            f"Trainer: {which} is not in [0, {classes}) and is not ignore_index={self.ignore_index}; {both} nothing"
        )

    @contextmanager
    def _own_gradients(self, call: Ready, parts: _Parts) -> Iterator[None]:
        """No gradients in ``.grad`` at first, and those of before in the end."""
        parameters = {id(p): p for p in (*parts.trained, *parts.heads, *call.tensors.values())}
        kept = [(p, p.grad) for p in parameters.values() if p.is_leaf]
        for p, _ in kept:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad

    @contextmanager
    def _same_buffers(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """What a head of the user's own counts in its buffers is as before where the step is refused."""
        buffers = [] if self.head is None or self._plain_linear() else [*getattr(self.head, "buffers", tuple)()]
        kept = [(b, b.clone()) for b in buffers]
        try:
            yield kept
        except BaseException:
            with torch.no_grad():
                for b, before in kept:
                    b.copy_(before)
            raise

    # One kernel.

    def _obstacle(self, call: Ready, parts: _Parts) -> str | None:
        """Why a step does not run as one kernel."""
        if self.executor not in ("auto", "persistent"):
            return f"executor={self.executor!r} is asked for"
        for x in call.rows.values():
            if x.requires_grad:
                return "an input requires grad"
        if _does_more(self.cell):
            return "the cell has hooks or a forward of its own"
        if self.head is not None and not self._plain_linear():
            return f"the head is {type(self.head).__name__}, not a Linear without hooks"
        if torch.is_autocast_enabled(call.device.type):
            return "it is not float32"
        for p in parts.heads:
            if p.dtype is not torch.float32 or not p.is_contiguous():
                return "the head is not float32 and contiguous"
        for p in parts.trained:
            if has_hooks(p):
                return "a parameter has hooks"
        if parts.obstacle is not None:
            return parts.obstacle
        obstacle = self._updates.obstacle()
        if obstacle is None and self.executor == "auto" and not persistent.trains_faster(parts.operands.compiled, call):
            return "the loop is expected to take less time"
        return obstacle

    def _lasting_obstacle(self, call: Ready, parts: _Parts) -> str | None:
        """That part of it that holds as long as the tensors stay the same."""
        if call.device.type != "cuda":
            return f"the cell is on the {call.device.type.upper()}"
        if call.compiled is None:
            return "the cell runs on the reference executor"
        if self.head is not None and type(self.head) is not nn.Linear:
            return f"the head is {type(self.head).__name__}, not a Linear without hooks"
        cells = [t for t in call.tensors.values() if t.is_floating_point()]
        if any(t.dtype != torch.float32 for t in (*cells, *parts.heads)):
            return "it is not float32"
        if not {*map(id, cells)}.isdisjoint(map(id, parts.heads)):
            return "the cell and the head share a parameter"
        compiled, why = whole(call)
        why = why or persistent.training_obstacle(compiled, call, self.head, self.loss)
        if why is None:
            parts.operands = persistent.operands(compiled, call, self.head, self.loss)
        return why

    def _flag(self, device: torch.device) -> Tensor:
        if self._refused is None or self._refused.device != device:
            self._refused, self._turns = torch.zeros(1, device=device), _C.Turns()
        return self._refused

    def _train(self, call: Ready, graphs: Graphs, targets: Tensor, parts: _Parts) -> bool:
        """All of a step in one launch, or False: what the device refuses is undone on the host when that is known."""
        refused = self._flag(targets.device)
        updates, numbers, begun = self._updates.begin(parts.operands.reached)
        request = training.Request(
            parts.operands,
            graphs if self.at == "roots" else None,
            targets,
            self.ignore_index,
            updates,
            numbers,
            refused,
            self._turns,
        )
        try:
            launched = persistent.train(call, request)
        except BaseException:
            self._updates.undo(begun)
            raise
        if launched is None:
            self._updates.undo(begun)
            parts.obstacle, parts.repeats = "the blocks of a persistent kernel are not all resident", False
            return False
        self._updates.finish(refused)
        self.optimizer._opt_called = True  # for the schedulers, which warn where they come first
        undo = functools.partial(self._updates.undo, begun)
        if self._pending is not None and self._pending.was_refused():  # and so is this step, the later one undone first
            launched.event.synchronize()
            undo()
        self._settle()
        both = _Sent.under_way(launched.numbers, launched.event)
        self._pending = _Pending(both, both, parts.operands.form[-1], undo)
        if not parts.repeats:
            self._take(targets, parts)
        return True

    def _take(self, targets: Tensor, parts: _Parts) -> None:
        """What the next step is compared with."""
        parts.of_targets, parts.of_target = (targets.dtype, targets.device), targets.shape[1:]
        parts.head = None if self.head is None else Snapshot.of(self.head)
        parts.repeats = self.head is None or parts.head is not None

    def _explain(self, graphs: Graphs, inputs: object) -> TrainerExplanation:
        with torch.enable_grad():
            call = prepare(self.cell, graphs, inputs, self.executor)
            parts = self._parts_of(call.ready)
            self._check_call(call.ready, graphs)
            obstacle = self._obstacle(call.ready, parts)
        why = obstacle or f"float32 on CUDA, {type(self.optimizer).__name__}"
        return TrainerExplanation(repr(self), explanation(self.cell, graphs, call), obstacle is None, why)

    # The host and the device.

    def _settle(self) -> None:
        """Wait for the loss of the step before, or raise what it was refused for."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        loss = pending.loss.values()[0]
        if pending.was_refused():
            pending.undo()
            if self._refused is not None:
                self._refused.zero_()
            raise self._not_a_class(pending.classes, before=True)
        self._latest = loss


@dataclass
class _Parts:
    """What takes part in a step."""

    key: list[int]
    """Identities of what follows, which is held so that nothing else can have them."""
    asked: tuple[str, str, str]
    """Loss, executor, place."""
    tensors: Mapping[str, Tensor]
    compiled: object
    trained: list[nn.Parameter]
    heads: list[nn.Parameter]
    obstacle: str | None = None
    """Why a step with these is not one kernel."""
    operands: training.Operands | None = None
    """Where it is."""
    repeats: bool = False
    """Whether the step before was one kernel, and what follows is its: the head as it was, None without one, and what
    its targets were, and one of them."""
    head: Snapshot | None = None
    of_targets: tuple[torch.dtype, torch.device] | None = None
    of_target: torch.Size | None = None


class _Sent:
    """Numbers under way from a device to the host: one, or a loss and whether the step was refused."""

    def __init__(self, device: torch.device, x: Tensor):
        self._x, self._event, self._found = x, None, None
        if device.type == "cuda":
            self._x = x.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @staticmethod
    def under_way(x: Tensor, event: torch.cuda.Event) -> _Sent:
        sent = object.__new__(_Sent)
        sent._x, sent._event, sent._found = x, event, None
        return sent

    def there(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> tuple[float, ...]:
        """The numbers, as soon as they are there."""
        if self._found is None:
            if self._event is not None:
                self._event.synchronize()
            self._found = tuple(self._x.view(-1).tolist())  # others come to where these are
        return self._found


@dataclass
class _Pending:
    """A step whose loss the host has not read."""

    loss: _Sent
    refused: _Sent | None
    classes: int
    undo: Callable[[], None]
    """The host's part, where the device refused the step."""

    def was_refused(self) -> bool:
        """Waits for the device."""
        return self.refused is not None and bool(self.refused.values()[-1])


class _Kept:
    """An optimizer, its parameters and some buffers as they are, for a step that the device may yet refuse."""

    def __init__(self, optimizer: Optimizer, buffers: Sequence[tuple[Tensor, Tensor]]):
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._states = {p: dict(state) for p, state in optimizer.state.items()}
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [x for state in self._states.values() for x in state.values() if isinstance(x, Tensor)]
        self._tensors = [(x, x.detach().clone()) for x in tensors] + [*buffers]

    @torch.no_grad()
    def put_back_where(self, refused: Tensor) -> None:
        """On the device, where `refused` says so. To be called next after the step."""
        # Hyperparameters that somebody else changes from here on are as wanted.
        self._groups = [
            (group, {key: x for key, x in before.items() if group.get(key) is not x}) for group, before in self._groups
        ]
        for x, before in self._tensors:
            if x.device == refused.device:
                torch.where(refused, before, x, out=x)

    @torch.no_grad()
    def undo(self) -> None:
        """On the host, what the device has refused."""
        for x, before in self._tensors:
            x.copy_(before)
        for p in [*self._optimizer.state]:
            if p in self._states:
                self._optimizer.state[p] = self._states[p]
            else:
                del self._optimizer.state[p]
        for group, before in self._groups:
            group.update(before)


@dataclass(frozen=True)
class TrainerExplanation:
    """The answer of ``weft.explain(trainer, graphs, inputs)``; ``print`` it."""

    trainer: str
    cell: Explanation
    """Of the cell's call in a step."""
    one_kernel: bool
    """Whether a step is one kernel, else it is the loop in torch."""
    why: str
    """The reason of that."""

    @property
    def asked(self) -> str:
        return self.cell.asked

    @property
    def executor(self) -> str:
        """What runs the cell."""
        return self.cell.executor

    @property
    def reason(self) -> str:
        """Why a step runs so, and why the cell does."""
        return self.why if self.one_kernel else f"{self.why}; the cell: {self.cell.reason}"

    def __str__(self) -> str:
        how = "one kernel" if self.one_kernel else "the loop in torch"
        return f"{self.trainer}\na step is {how} ({self.why})\n{self.cell}"


def explain_trainer(
    trainer: Trainer, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None
) -> TrainerExplanation:
    """Say whether ``trainer.step(graphs, inputs, targets)`` is one kernel or a loop, and why. Nothing is computed.

    Raises:
        What the step refuses of `graphs`, `inputs` and the optimizer.
    """
    return trainer._explain(graphs, inputs)


@functools.cache
def _load(device: torch.device) -> None:
    """Kernels that a step runs only where the device is late. The first launch of one may wait for the device."""
    flag, x = torch.zeros(1, device=device), torch.zeros(1, device=device)
    bad = (flag != 0).any()
    torch.where(bad, x, x, out=x)
    torch.maximum(flag, bad, out=flag)


def _does_more(module: nn.Module) -> bool:
    """Whether something else happens in its call than the class says; of a cell, than its `vertex` says."""
    attributes = module.__dict__
    if any(map(attributes.__getitem__, HOOKS)) or any(GLOBAL_HOOKS) or "forward" in attributes:
        return True
    bases = [base for base in (VertexFunction, VertexFunctions) if isinstance(module, base)]
    return any(type(module).forward is not base.forward for base in bases)


def _same(x: Tensor) -> Tensor:
    return x


def _nothing() -> None:
    pass


def _roots(graphs: Graphs, device: torch.device) -> Tensor:
    roots = graphs.roots
    return roots if roots.device == device else roots.pin_memory().to(device, non_blocking=True)
