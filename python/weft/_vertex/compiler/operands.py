"""What the operators are given: parameters as they are, and what linear layers read instead of what they make."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..program import Program
from .plan import Given, Part
from .steps import Buffer, Compiled, Kernel, MatrixGradient, Product, VectorGradient

__all__ = ["take_operands"]


def take_operands(
    compiled: Compiled,
    programs: Sequence[Program],
    parts: Sequence[Part],
    inputs: Sequence[tuple[int, int]],
    matrices: Sequence[tuple[int, int]],
    vectors: Sequence[tuple[int, int]],
    differentiable: Sequence[Collection[int]],
) -> Given:
    """Rewrite steps so that they read what is given.

    A matrix that is the transpose of a parameter is the parameter, one that several functions read is there once, and a
    linear layer of what is pulled, whose result nobody else reads, becomes a step before the frontiers, its gradients
    steps after them.

    Args:
        compiled: the steps, changed in place.
        programs: of the functions.
        parts: what was made of them.
        inputs: what the frontiers read, by function and symbol.
        matrices: the same.
        vectors: the same.
        differentiable: symbols of each function that ask for a gradient.
    """
    readers = [_Reader(program, part) for program, part in zip(programs, parts, strict=True)]
    numbers: dict[object, int] = {}
    given_matrices: list[tuple[int, int]] = []

    def matrix(function: int, symbol: int) -> tuple[int, bool]:
        reader = readers[function]
        own = reader.transposed.get(symbol, symbol)
        key = reader.name(own) or (function, own)
        if key not in numbers:
            numbers[key] = len(given_matrices)
            given_matrices.append((function, own))
        return numbers[key], own != symbol

    found = tuple(matrix(*m) for m in matrices)
    for step in (*compiled.forward, *compiled.backward):
        if isinstance(step, Product):
            step.matrix, turned = found[step.matrix]
            step.transposed ^= turned
    compiled.matrix_gradients = [
        g._replace(matrix=found[g.matrix][0], transposed=found[g.matrix][1]) for g in compiled.matrix_gradients
    ]
    given_inputs, given_vectors = list(inputs), list(vectors)
    layers: dict[int, tuple[int, int | None]] = {}
    if len(programs) == 1:
        for i, (_, symbol) in enumerate(inputs):
            layer = readers[0].layer(symbol)
            if layer is None:
                continue
            if not any((b.space, b.index) == ("input", i) for b in compiled.buffers):
                continue  # nothing reads it
            x, weight, *biases = layer
            given_inputs[i] = (0, x)
            for b in biases:
                if (0, b) not in given_vectors:
                    given_vectors.append((0, b))
            bias = given_vectors.index((0, biases[0])) if biases else None
            layers[i] = matrix(0, weight)[0], bias
            wanted = tuple(s in differentiable[0] for s in layer)
            _take_layer(compiled, i, programs[0].symbols[x].shape[1], *layers[i], wanted)
    _save_layers(compiled)
    return Given(tuple(given_inputs), tuple(given_matrices), tuple(given_vectors), found, layers)


def _take_layer(
    compiled: Compiled, number: int, width: int, matrix: int, vector: int | None, wanted: Sequence[bool]
) -> None:
    """Input `number` of the frontiers is made by a step. `wanted`: gradients of what is pulled, weight, bias."""

    def find(space: str, index: int) -> int | None:
        return next((i for i, b in enumerate(compiled.buffers) if (b.space, b.index) == (space, index)), None)

    def add(buffer: Buffer) -> int:
        compiled.buffers.append(buffer)
        return len(compiled.buffers) - 1

    target = find("input", number)
    made = compiled.buffers[target]
    made.space = "layer"
    source, bias = add(Buffer("input", width, made.dtype, number)), -1
    if vector is not None:
        bias = find("vector", vector)
        bias = add(Buffer("vector", made.width, made.dtype, vector)) if bias is None else bias
    compiled.layers.append(Product(0, "N", source, matrix, True, target, when="before", bias=bias))
    grad = find("input_grad", number)
    if grad is None:
        return
    compiled.buffers[grad].space = "layer_grad"
    if wanted[0]:
        to = add(Buffer("input_grad", width, made.dtype, number, backward=True))
        compiled.layer_gradients.append(Product(0, "N", grad, matrix, False, to, when="after"))
    if wanted[1]:
        compiled.matrix_gradients.append(MatrixGradient(matrix, grad, source, False, False, when="after"))
    if vector is not None and wanted[2]:
        compiled.vector_gradients.append(VectorGradient(vector, 0, grad, 0, made.width))


def _save_layers(compiled: Compiled) -> None:
    """What layers make and the backward pass reads is saved."""
    read = {b for s in compiled.backward if isinstance(s, Kernel) for b in s.buffers(compiled.tables)}
    read |= {b for s in compiled.backward if isinstance(s, Product) for b in (s.source, s.target)}
    read |= {b for g in compiled.matrix_gradients for b in (g.source, g.gradient)}
    read |= {g.buffer for g in compiled.vector_gradients}
    for i in read:
        buffer = compiled.buffers[i]
        buffer.saved = buffer.saved or buffer.space == "layer"


class _Reader:
    """How the operands of the frontiers of one function are made from tensors of the module."""

    def __init__(self, program: Program, part: Part):
        self._symbols = program.symbols
        self._producers = {r: o for o in program.operations for r in o.results}
        outside = (*part.before, *part.after)
        self._read = {*part.pushes, *(s for i in outside for s in program.operations[i].reads())}
        turns = [o for o in program.operations if o.op == "aten.t.default"]
        self.transposed = {o.results[0]: o.reads()[0] for o in turns if self.name(o.reads()[0])}
        """Transposes of parameters."""

    def layer(self, symbol: int) -> tuple[int, ...] | None:
        """What is pulled, weight and bias if any, of a linear layer that makes this symbol for nobody else."""
        o = self._producers.get(symbol)
        if o is None or o.op not in ("aten.addmm.default", "aten.mm.default") or o.keywords or symbol in self._read:
            return None
        *bias, x, matrix = o.reads()
        if x not in self._producers or self._producers[x].op != "pull" or matrix not in self.transposed:
            return None
        layer = (x, self.transposed[matrix], *bias)
        shapes = [len(self._symbols[s].shape) for s in layer]
        dtypes = {self._symbols[s].dtype for s in (*layer, symbol)}
        simple = shapes == [2, 2, 1][: len(layer)] and len(dtypes) == 1 and all(map(self.name, bias))
        return layer if simple else None

    def name(self, symbol: int) -> str | None:
        """Of a parameter."""
        info = self._symbols[symbol]
        return info.name if info.kind == "parameter" else None
