"""Products of float matrices by six of bf16: the kernel on a processor, and executors that use it."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
import weft
from weft.vertex import models

from tests import emulated
from tests.common import in_a_cuda_graph, relative_error

TILE, DEPTH, PARTIAL = 128, 32, 2 * 128 * 128


class Factor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_longlong), ("by_inner", ctypes.c_bool)]


class Product(ctypes.Structure):
    _fields_ = [
        ("left", Factor),
        ("right", Factor),
        ("result", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "columns", "inner")),
        ("more", ctypes.c_bool),
        ("units_before", ctypes.c_int),
        ("tiles_before", ctypes.c_int),
    ]


def laid_out(rows: int, columns: int, by_rows: bool) -> torch.Tensor:
    """Of which neighbours lie in a row, or in a column, with a pitch that is a multiple of four."""
    if by_rows:
        return torch.randn(rows, -(-columns // 4) * 4)[:, :columns]
    return torch.randn(columns, -(-rows // 4) * 4).t()[:rows]


class Case:
    """left @ right + bias, added to `more`, each None where there is none."""

    def __init__(self, left, right, bias=None, more=None, pitch=0):
        self.left, self.right, self.bias = left, right, bias
        rows, inner = left.shape
        columns = right.shape[1]
        self.whole = torch.full((rows, columns + pitch), torch.nan)
        if more is not None:
            self.whole[:, :columns] = more
        self.result = self.whole[:, :columns]
        self.want = left.double() @ right.double()
        for x in (bias, more):
            self.want = self.want if x is None else self.want + x
        by_inner = left.stride(1) == 1, right.stride(0) == 1
        factors = [
            Factor(x.data_ptr(), x.stride(0) if x.stride(1) == 1 else x.stride(1), inner_first)
            for x, inner_first in zip((left, right), by_inner, strict=True)
        ]
        self.product = Product(
            *factors, self.whole.data_ptr(), columns + pitch, None if bias is None else bias.data_ptr(),
            rows, columns, inner, more is not None,
        )  # fmt: skip
        self.tiles = -(-rows // TILE) * -(-columns // TILE)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    return emulated.build("vertex_float_products", tmp_path_factory.mktemp("products")).run


def run(kernel, cases, blocks, seed=1):
    partial = torch.full((blocks * PARTIAL,), torch.nan)
    arrived = torch.zeros(sum(c.tiles for c in cases), dtype=torch.int32)
    products = (Product * len(cases))(*(c.product for c in cases))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (partial, arrived)]
    kernel(len(cases), products, blocks, *pointers, seed)
    for case in cases:
        assert case.whole[:, case.result.shape[1] :].isnan().all()
    return [case.result for case in cases]


class TestEmulated:
    pytestmark = emulated.MARKS

    @pytest.mark.parametrize("left_by_rows", [True, False])
    @pytest.mark.parametrize("right_by_rows", [True, False])
    def test_a_product(self, kernel, left_by_rows, right_by_rows):
        """Of a tile and a bit, whose parts several blocks have."""
        torch.manual_seed(1)
        case = Case(laid_out(130, 101, left_by_rows), laid_out(101, 37, right_by_rows))
        (found,) = run(kernel, [case], 3)
        assert relative_error(found, case.want.float()) < 1e-6

    @pytest.mark.parametrize("blocks", [1, 2, 5, 7])
    def test_several_at_once(self, kernel, blocks):
        """However their parts are dealt, with what is added to them; the same bits in whatever order blocks run."""
        found = []
        for seed in (1, 2):
            torch.manual_seed(1)
            cases = [
                Case(laid_out(40, 200, False), laid_out(200, 129, True), more=torch.randn(40, 129)),
                Case(laid_out(5, 33, True), laid_out(33, 3, True), bias=torch.randn(3), pitch=3),
                Case(laid_out(129, 64, True), laid_out(64, 20, False), torch.randn(20), torch.randn(129, 20), pitch=1),
            ]
            found.append(run(kernel, cases, blocks, seed))
            for case, x in zip(cases, found[-1], strict=True):
                assert relative_error(x, case.want.float()) < 1e-6
        assert all(map(torch.equal, *found))

    def test_infinities_and_nans_stay_where_they_are(self, kernel):
        torch.manual_seed(1)
        left, right = laid_out(6, 40, True), laid_out(40, 36, True)
        left[1, 3], left[2, 4], left[4, 5] = torch.inf, -torch.inf, torch.nan
        left[5, 7], right[7] = 3.4e38, 0.25  # which is infinite as bf16
        case = Case(left, right)
        (found,) = run(kernel, [case], 1)
        want = left @ right
        torch.testing.assert_close(found, want, equal_nan=True, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            ("__syncthreads();  // the tile before", "// the tile before"),
            ("warpgroup_wait(d);", "if (chunk + 1 == count) warpgroup_wait(d);"),
            ("warpgroup_begin();", ""),
            ("if (i + 1 == kProducts) warpgroup_commit();", ""),
            ("fence_copy_engine();", ""),
            ("+ k * 2 * kOctet + group", "+ k * kOctet + group"),
        ],
    )
    def test_flaws_are_noticed(self, right, wrong, tmp_path):
        folder = emulated.with_flaw("vertex/exec/cuda/float_products.jit.cu", right, wrong, tmp_path)
        flawed = emulated.build("vertex_float_products", folder).run
        torch.manual_seed(1)

        def wrong_numbers():
            case = Case(laid_out(200, 130, True), laid_out(130, 140, True))
            (found,) = run(flawed, [case], 1)
            assert relative_error(found, case.want.float()) < 1e-6

        assert not emulated.ends_well(wrong_numbers)


@pytest.mark.cuda
class TestOnTheDevice:
    GRAPHS = weft.Graphs.from_children([[[], [], [0, 1], [], [2, 3]]] * 1200)

    @staticmethod
    def run(cell, executor, x, graphs=GRAPHS):
        y = cell(graphs, x, executor=executor)
        # Of one sign, or the sums over all rows cancel each other.
        weight = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device="cuda").view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *cell.parameters()])]

    @staticmethod
    def kernels(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        return [e.name for e in profile.events()]

    @pytest.mark.parametrize("executor", ["batched", "persistent"])
    @pytest.mark.parametrize(("inputs", "hidden"), [(128, 128), (100, 132), (256, 96)])
    def test_layers_and_their_gradients(self, executor, inputs, hidden):
        """With fp32's accuracy, the same bits in every run."""
        torch.manual_seed(1)
        cell = models.TreeLSTM(inputs, hidden).cuda()
        x = torch.randn(self.GRAPHS.num_vertices, inputs, device="cuda", requires_grad=True)
        found = self.run(cell, executor, x)
        assert all(map(torch.equal, found, self.run(cell, executor, x)))
        wide = copy.deepcopy(cell).double()
        want = self.run(wide, "reference", x.detach().double().requires_grad_())
        for a, b in zip(found, want, strict=True):
            assert relative_error(a, b) < 3e-6
        if torch.cuda.get_device_capability() == (9, 0):
            names = self.kernels(lambda: self.run(cell, executor, x))
            assert sum("vertex_float_products" in name for name in names) >= 2

    def test_in_a_cuda_graph(self):
        torch.manual_seed(1)
        cell = models.TreeLSTM(128, 128).cuda()
        graphs = self.GRAPHS.to("cuda")
        x = torch.randn(graphs.num_vertices, 128, device="cuda", requires_grad=True)
        captured, found = in_a_cuda_graph(lambda: self.run(cell, "persistent", x, graphs))
        want = self.run(cell, "persistent", x, graphs)
        for _ in range(3):
            for t in found:
                t.fill_(torch.nan)
            captured.replay()
            assert all(map(torch.equal, found, want))

    def test_infinities(self):
        torch.manual_seed(1)
        cell = models.TreeFC(128).cuda()
        tagger = torch.nn.Linear(128, 128).cuda()  # a layer of an input

        class Layer(weft.VertexFunction):
            def __init__(self):
                super().__init__(state_size=128)
                self.layer, self.cell = tagger, cell.U

            def vertex(self, v):
                h = torch.relu(self.layer(v.pull()) + self.cell(torch.cat((v.gather(0), v.gather(1)), 1)))
                v.scatter(h)
                v.push(h)

        layer = Layer().cuda()
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]] * 8000)
        x = torch.randn(graphs.num_vertices, 128, device="cuda")
        x[3, 5], x[7, 9], x[700, 1] = torch.inf, -torch.inf, torch.nan
        found, want = (layer(graphs, x, executor=e) for e in ("batched", "reference"))
        torch.testing.assert_close(found, want, equal_nan=True, rtol=1e-5, atol=1e-5)

    def test_tf32_is_torchs(self):
        """Where torch may multiply in TF32, its own products do."""
        cell = models.TreeLSTM(128, 128).cuda()
        x = torch.randn(self.GRAPHS.num_vertices, 128, device="cuda", requires_grad=True)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            names = self.kernels(lambda: self.run(cell, "batched", x))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        assert not any("vertex_float_products" in name for name in names)
