"""What torch.utils.flop_counter counts in Weft's ops: what it counts where torch does the same by its own products."""

from __future__ import annotations

import pytest
import torch
import weft
from torch.nn.utils import rnn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from weft.sparse import BatchedCSR, plan_matmul

# Plans, moves, sums and codes values, without a product; steps of one's own; parts of an op that is counted.
NOT_COUNTED = {
    "csr_transpose", "conv_pattern", "conv_values", "conv_values_backward", "csr_matmul_plan", "zeros_changed",
    "max_pool_values",
    "zvc_compress", "zvc_decompress", "rle_compress", "rle_decompress",
    "pointwise_scan", "pointwise_scan_backward",
    "slice_begin", "slice_finish_", "slice_begin_gradients", "slice_finish_gradients_",
    "slice_left", "slice_mend_", "slice_mend_gradients_", "slice_message", "slice_product", "slice_states",
    "slice_maps", "slice_replay_", "rnn_slice_maps",
}  # fmt: skip
# Made of ops that are counted.
COMPOSED = {"chain_backward", "scan_cell"}


def test_every_op_is_counted():
    ops = {name.removeprefix("weft::").split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ops = {name for name in ops if hasattr(torch.ops.weft, name)}
    counted = {name for name in ops if getattr(torch.ops.weft, name) in flop_registry}
    assert ops - counted == NOT_COUNTED | COMPOSED


def flops(run):
    """Of the forward pass and of the backward pass from the sum of the results that have a gradient."""
    with FlopCounterMode(display=False) as counter:
        results = run()
        forward = counter.get_total_flops()
        loss = sum(r.sum() for r in results if r.requires_grad)
        if torch.is_tensor(loss):
            loss.backward()
    return forward, counter.get_total_flops() - forward


OPTIONS = [{}, {"bias": False, "batch_first": True}, {"num_layers": 2, "bidirectional": True}]


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("of_input", [False, True], ids=["weights", "input"])
@pytest.mark.parametrize("algorithm", ["persistent", "scan"])
def test_layers(kind, options, of_input, algorithm):
    """In float64 torch counts its own layers' products, step by step."""
    counts = []
    for library, more in ((torch.nn, {}), (weft.nn, {"algorithm": algorithm})):
        layer = getattr(library, kind)(3, 5, dtype=torch.float64, **options, **more)
        x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=of_input)
        counts.append(flops(lambda layer=layer, x=x: [layer(x)[0]]))
    rows = 6 * 2
    if kind == "LSTM" and not options:
        assert counts[0][0] == 2 * rows * 4 * 5 * (3 + 5)
    assert counts[0] == counts[1] and min(counts[0]) > 0


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_packed_layers_with_a_state(kind):
    counts = []
    for library, more in ((torch.nn, {}), (weft.nn, {"algorithm": "persistent"})):
        layer = getattr(library, kind)(3, 5, dtype=torch.float64, **more)
        packed = rnn.pack_padded_sequence(torch.randn(6, 3, 3, dtype=torch.float64), [6, 4, 1])
        h = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
        hx = (h, h) if kind == "LSTM" else h
        counts.append(flops(lambda layer=layer, x=packed, hx=hx: [layer(x, hx)[0].data]))
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_packed_layer_without_a_state():
    """Of the first steps, whose number the output's gradient does not tell, there is at most too much."""
    layer = weft.nn.GRU(3, 5, dtype=torch.float64, algorithm="persistent")
    packed = rnn.pack_padded_sequence(torch.randn(6, 3, 3, dtype=torch.float64), [6, 4, 1])
    forward, backward = flops(lambda: [layer(packed)[0].data])
    assert forward == 2 * 11 * 15 * (3 + 5)
    assert 2 * forward - 2 * 11 * 15 * 3 - 2 * 3 * 15 * 5 <= backward <= 2 * forward - 2 * 11 * 15 * 3


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("of_input", [False, True], ids=["weights", "input"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_torchs_kernel_in_a_compiled_graph(kind, of_input, options):
    layer = getattr(torch.nn, kind)(3, 5, dtype=torch.float64, **options)
    layers, two = layer.num_layers, layer.bidirectional
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=of_input)
    state = [torch.zeros(layers * (1 + two), 2, 5, dtype=torch.float64)] * (2 if kind == "LSTM" else 1)
    double = torch.float64
    forward, backward = flops(lambda: [layer(x)[0]])
    arguments = x, state, layer._flat_weights, None, kind.lower(), True, layers, two, None, double, double
    # Its backward pass runs the forward pass again.
    assert flops(lambda: torch.ops.weft.torch_rnn(*arguments)[:1]) == (forward, backward + forward)


def scanned(A, b, x0=None):
    """weft.scan.linear_scan by torch's own products."""
    x, out = x0, []
    for t in range(len(b)):
        step = A[t] if A.dim() == 4 else A[t].expand(b.size(1), -1, -1)
        x = b[t] if x is None else torch.bmm(step, x.unsqueeze(2)).squeeze(2) + b[t]
        out.append(x)
    return torch.stack(out)


@pytest.mark.parametrize("shape", [(6, 2, 4, 4), (6, 4, 4)], ids=str)
@pytest.mark.parametrize("wanted", [("b",), ("A", "b"), ("x0",), ("A", "b", "x0")], ids=",".join)
def test_dense_scan(shape, wanted):
    counts = []
    for scan in (scanned, weft.scan.linear_scan):
        A, b, x0 = (torch.randn(s, dtype=torch.float64) for s in (shape, (6, 2, 4), (2, 4)))
        for name, tensor in (("A", A), ("b", b), ("x0", x0)):
            tensor.requires_grad_(name in wanted)
        state = (x0,) if "x0" in wanted else ()
        counts.append(flops(lambda scan=scan, A=A, b=b, state=state: [scan(A, b, *state)]))
    assert counts[0] == counts[1] and min(counts[0]) > 0


@pytest.mark.parametrize("shape", [(6, 2, 4), (1, 2, 4), (1, 1, 4), (4,)], ids=str)
def test_diagonal_scan(shape):
    A, b = (torch.randn(s, requires_grad=True) for s in (shape, (6, 2, 4)))
    assert flops(lambda: [weft.scan.linear_scan(A, b)]) == (2 * 5 * 2 * 4, 2 * (5 + 5) * 2 * 4)


def test_chain():
    J = [torch.randn(2, 4, 5), torch.randn(3, 4), torch.randn(2, 3, 3)]
    grad = torch.randn(2, 5)
    assert flops(lambda: weft.scan.chain_backward(grad, J))[0] == 2 * 2 * (4 * 5 + 3 * 4 + 3 * 3)


def full(rows, columns, batch=None):
    """A sparse matrix without a zero."""
    values = torch.rand(*(() if batch is None else (batch,)), rows, columns, dtype=torch.float64) + 1
    return BatchedCSR.from_dense(values), values


@pytest.mark.parametrize("batch", [None, 3])
def test_sparse_matrix_times_dense(batch):
    J, dense = full(4, 5, batch)
    x = torch.randn(*(() if batch is None else (batch,)), 5, 7, dtype=torch.float64)
    values = J.values.clone().requires_grad_()
    sparse = flops(lambda: [J.with_values(values) @ x.requires_grad_()])
    assert sparse == flops(lambda: [dense.requires_grad_() @ x]) and min(sparse) > 0


def test_sparse_times_sparse():
    for shapes in (((17, 23), (23, 19)), ((4, 5), (5, 6))):
        (A, a), (B, b) = full(*shapes[0]), full(*shapes[1])
        plan = plan_matmul(A, B)
        a, b = a.requires_grad_(), b.requires_grad_()
        x, y = (J.values.clone().requires_grad_() for J in (A, B))
        got = flops(lambda plan=plan, x=x, y=y, A=A, B=B: [plan(A.with_values(x), B.with_values(y)).values])
        assert got == flops(lambda a=a, b=b: [a @ b]) and min(got) > 0


def test_sparse_chain():
    chain = [full(5, 4)[0], full(3, 5)[0]]
    grad = torch.randn(2, 4, dtype=torch.float64)
    assert flops(lambda: weft.scan.chain_backward(grad, chain))[0] == 2 * 2 * (5 * 4 + 3 * 5)


TREES = weft.Graphs.from_children([[[], [], [0, 1], [], [3, 2]], [[]], [[], [], [1, 0]]])
"""9 vertices, 3 of them with children, 6 edges."""


@pytest.mark.parametrize("lazy", [True, False])
def test_vertex_functions(lazy):
    """Products of what is gathered are counted where something is."""
    X, H = 5, 7
    x = torch.randn(9, X, requires_grad=True)
    for m, inner, edges in (
        (weft.vertex.models.TreeLSTM(X, H), 2 * H * 5 * H, 0),
        (weft.vertex.models.ChildSumTreeLSTM(X, H), H * 3 * H, H * H),
    ):
        products = 9 * X * 4 * H + 3 * inner + 6 * edges
        with weft.vertex.options(lazy=lazy):
            assert flops(lambda m=m: [m(TREES, x, executor="batched")]) == (2 * products, 4 * products)


def test_typed_vertex_functions():
    """A matrix's gradient is one product over all rows, those of other functions are zero."""
    m = weft.vertex.models.RvNN(5, 7)
    graphs = TREES.with_types(["leaf" if level == 0 else "inner" for level in TREES.levels.tolist()])
    forward, backward = flops(lambda: [m(graphs, torch.randn(9, 5), executor="batched")])
    assert forward == 2 * (6 * 5 * 7 + 3 * 14 * 7)
    assert backward == 2 * (6 * 5 * 7 + 2 * 3 * 14 * 7)
