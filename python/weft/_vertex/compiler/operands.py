"""What the operators are given: parameters as they are, and what linear layers read instead of what they make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..program import Program
from .instructions import STORES, Instruction
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

    A matrix that is the transpose of a parameter is the parameter, a parameter that several functions read is there
    once, and a linear layer of what is pulled, whose result nobody else reads, becomes a step before the frontiers, its
    gradients steps after them.

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
    compiled.matrix_gradients = [_given(g, *found[g.matrix]) for g in compiled.matrix_gradients]
    given_inputs, given_vectors = list(inputs), []
    vector_numbers: dict[object, int] = {}

    def vector(function: int, symbol: int) -> int:
        key = readers[function].name(symbol) or (function, symbol)
        if key not in vector_numbers:
            vector_numbers[key] = len(given_vectors)
            given_vectors.append((function, symbol))
        return vector_numbers[key]

    vector_of = tuple(vector(*v) for v in vectors)
    for b in compiled.buffers:
        b.index = vector_of[b.index] if b.space == "vector" else b.index
    compiled.vector_gradients = [g._replace(vector=vector_of[g.vector]) for g in compiled.vector_gradients]
    layers: dict[int, tuple[int, int | None]] = {}
    for i, (function, symbol) in enumerate(inputs):
        layer = readers[function].layer(symbol)
        if layer is None:
            continue
        if not any((b.space, b.index) == ("input", i) for b in compiled.buffers):
            continue  # nothing reads it
        x, weight, *biases = layer
        given_inputs[i] = (function, x)
        layers[i] = matrix(function, weight)[0], vector(function, biases[0]) if biases else None
        wanted = tuple(s in differentiable[function] for s in layer)
        width = programs[function].symbols[x].shape[1]
        _Layer(compiled, function, i, width, *layers[i], *wanted).take()
    _save_layers(compiled)
    return Given(tuple(given_inputs), tuple(given_matrices), tuple(given_vectors), found, vector_of, layers)


def _given(gradient: MatrixGradient, matrix: int, turned: bool) -> MatrixGradient:
    """The gradient of the matrix that is given, which is the transpose of what products read where `turned`."""
    source, target = gradient.source, gradient.gradient
    return gradient._replace(matrix=matrix, source=target if turned else source, gradient=source if turned else target)


@dataclass
class _Layer:
    """Input `number` of the frontiers, which a linear layer of a function makes.

    Of a single function it is made in the caller's order, as the input comes. Of one of several the rows of its own
    vertices are copied together first, and only these are multiplied.
    """

    compiled: Compiled
    function: int
    number: int
    width: int
    """Of what is pulled."""
    matrix: int
    vector: int | None
    pulled_wanted: bool
    """Whether a gradient is asked for; of what is pulled, the weight, the bias."""
    weight_wanted: bool
    bias_wanted: bool = False

    def take(self) -> None:
        compiled, alone = self.compiled, self.compiled.functions == 1
        target = self._find("input", self.number)
        made = compiled.buffers[target]
        made.space = "layer" if alone else "rows"
        pulled = source = self._add("input", self.width, made.dtype)
        if not alone:
            source = self._add("rows", self.width, made.dtype)
            compiled.layers.append(self._copy(pulled, source, "before"))
        bias = -1
        if self.vector is not None:
            found = self._find("vector", self.vector)
            bias = self._add("vector", made.width, made.dtype, self.vector) if found is None else found
        product = Product(self.function, "N", source, self.matrix, True, target, when="before", bias=bias)
        compiled.layers.append(product)
        grad = self._find("input_grad", self.number)
        if grad is not None:
            self._differentiate(source, grad, alone)

    def _differentiate(self, source: int, grad: int, alone: bool) -> None:
        compiled, made = self.compiled, self.compiled.buffers[grad]
        made.space = "layer_grad" if alone else "rows"
        if not alone:  # nobody reads what others would be zero in
            _leave_out_stores(compiled, grad, self.function)
        if self.pulled_wanted:
            to = pulled = self._add("input_grad", self.width, made.dtype, backward=True)
            if not alone:
                to = self._add("rows", self.width, made.dtype, backward=True)
            product = Product(self.function, "N", grad, self.matrix, False, to, when="after")
            compiled.layer_gradients.append(product)
            if not alone:
                compiled.layer_gradients.append(self._copy(to, pulled, "after"))
                self._write_zeros(pulled)
        if self.weight_wanted:
            outer = MatrixGradient(self.function, self.matrix, grad, source, False, False, when="after")
            compiled.matrix_gradients.append(outer)
        if self.vector is not None and self.bias_wanted:
            compiled.vector_gradients.append(VectorGradient(self.function, self.vector, 0, grad, 0, made.width))

    def _find(self, space: str, index: int) -> int | None:
        buffers = enumerate(self.compiled.buffers)
        return next((i for i, b in buffers if (b.space, b.index) == (space, index)), None)

    def _add(self, space: str, width: int, dtype: str, index: int | None = None, backward: bool = False) -> int:
        buffer = Buffer(space, width, dtype, self.number if index is None else index, backward)
        self.compiled.buffers.append(buffer)
        return len(self.compiled.buffers) - 1

    def _copy(self, source: int, target: int, when: str) -> Kernel:
        """Of the rows of the function."""
        code = [
            Instruction("load", 0, buffer=source, access="row"),
            Instruction("store", operands=(0,), buffer=target),
        ]
        return Kernel(self.function, "N", self.width, code=code, registers=1, when=when)

    def _write_zeros(self, buffer: int) -> None:
        """Into rows of other functions, by kernels that run there anyway where one is as wide."""
        compiled = self.compiled
        for function in range(compiled.functions):
            if function == self.function:
                continue
            wide = (
                k
                for k in compiled.backward
                if isinstance(k, Kernel)
                and (k.function, k.domain, k.width, k.reduces) == (function, "N", self.width, 0)
            )
            kernel = next(wide, None)
            if kernel is None:
                kernel = Kernel(function, "N", self.width, when="after")
                compiled.layer_gradients.append(kernel)
            if 0.0 not in compiled.constants:
                compiled.constants.append(0.0)
            kernel.code.append(Instruction("constant", kernel.registers, constant=compiled.constants.index(0.0)))
            kernel.code.append(Instruction("store", operands=(kernel.registers,), buffer=buffer))
            kernel.registers += 1


def _leave_out_stores(compiled: Compiled, buffer: int, function: int) -> None:
    """By other functions."""
    for step in compiled.backward:
        if isinstance(step, Kernel) and step.function != function:
            step.code = [i for i in step.code if i.op not in STORES or i.buffer != buffer]
    compiled.backward = [s for s in compiled.backward if isinstance(s, Product) or any(i.op in STORES for i in s.code)]


def _save_layers(compiled: Compiled) -> None:
    """What layers make and the backward pass reads is saved."""
    made = {s.target for s in compiled.layers if isinstance(s, Product)}
    made |= {b for s in compiled.layers if isinstance(s, Kernel) for b in s.stores()}
    steps = (*compiled.backward, *compiled.layer_gradients)
    read = {b for s in steps if isinstance(s, Kernel) for b in s.buffers(compiled.tables)}
    read |= {b for s in steps if isinstance(s, Product) for b in (s.source, s.target)}
    read |= {b for g in compiled.matrix_gradients for b in (g.source, g.gradient)}
    read |= {g.buffer for g in compiled.vector_gradients}
    for i in read & made:
        compiled.buffers[i].saved = True


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
        """What is pulled, or made of it before the frontiers, weight and bias if any, of a linear layer that makes this
        symbol for nobody else."""
        o = self._producers.get(symbol)
        if o is None or o.op not in ("aten.addmm.default", "aten.mm.default") or o.keywords or symbol in self._read:
            return None
        *bias, x, matrix = o.reads()
        made = self._producers.get(x)
        if made is None or made.when != "before" or self._symbols[x].kind != "row" or matrix not in self.transposed:
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
