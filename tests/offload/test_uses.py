"""weft.offload with what else there is: several uses, threads, devices, other hooks, torch.func, captured graphs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import Tensor, nn
from weft.offloading import offload

from tests.offload.engines import chain, check_same, cuda, delay, everything, numbers, plain_gradient, step


def test_backward_twice_in_parts_and_never(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(30, device=device, requires_grad=True)
    plain = x.exp().sin().cos()
    expected = torch.autograd.grad(plain.sum(), x)[0]
    with off:
        h = x.exp()
        y = h.sin().cos()
        never = x.tan()
        (g1,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    for _ in range(3):
        (g2,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(g1, expected) and torch.equal(g2, expected)
    (gh,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    assert torch.equal(torch.autograd.grad(h, x, gh)[0], expected)
    del y, h
    assert numbers(off)["live_bytes"] == never.nbytes
    with pytest.raises(RuntimeError, match="second time"):
        with off:
            y = x.exp()
        y.sum().backward()
        y.sum().backward()


def test_double_backward(engine: tuple[str, str], deterministic: None) -> None:
    device, backend = engine
    x = torch.randn(30, device=device, requires_grad=True)

    def run(around) -> Tensor:
        with around:
            y = (x.exp() * x.sin()).pow(3).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return torch.autograd.grad(h.square().sum(), x)[0]

    expected = run(contextlib.nullcontext())
    for budget in (0, 500, None):
        off = offload(budget, backend=backend, min_bytes=0)
        for _ in range(3):
            assert torch.equal(run(off), expected)
    x64 = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)

    def inside(v: Tensor) -> Tensor:
        with everything(backend):
            return (v.exp() * v.sin()).tanh()

    assert torch.autograd.gradcheck(inside, (x64,)) and torch.autograd.gradgradcheck(inside, (x64,))


def test_several_uses_before_a_backward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = offload("2KB", backend=backend, min_bytes=0)
    xs = [torch.randn(100, device=device, requires_grad=True) for _ in range(5)]
    ys = []
    for x in xs:
        with off:
            ys.append(x.exp().sin())
    for x, y in reversed(list(zip(xs, ys, strict=True))):
        y.sum().backward()
        e = x.detach().requires_grad_()
        e.exp().sin().sum().backward()
        assert torch.equal(x.grad, e.grad)


def test_leaving_what_was_not_entered() -> None:
    off = everything()
    with pytest.raises(RuntimeError, match="not inside"):
        off.__exit__(None, None, None)
    with off, concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = pool.submit(off.__exit__, None, None, None)
        with pytest.raises(RuntimeError, match="not inside"):
            left.result()
    x = torch.randn(4, requires_grad=True)
    with off:
        loss = (x * 2).sin().sum()
    loss.backward()
    assert numbers(off)["uses"] == 2


def test_reentry_and_nesting() -> None:
    off, inner = everything(), everything()
    with off:
        with pytest.raises(RuntimeError, match="re-entrant"), off:
            pass
        x = torch.randn(10, requires_grad=True)
        y = x.exp()
        with inner:
            z = y.sin()
        w = z.cos()
    w.sum().backward()
    assert numbers(off)["saved_bytes"] == 40 + 40 and numbers(inner)["saved_bytes"] == 40
    with off:
        pass


def test_other_hooks_outside_and_inside() -> None:
    calls = []

    def pack(t: Tensor) -> Tensor:
        calls.append(t.shape)
        return t.detach()

    x = torch.randn(10, requires_grad=True)
    off = everything()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), off:
        y = x.exp()
    assert not calls and numbers(off)["saved_bytes"] == 40
    with off, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        z = x.exp()
    assert len(calls) == 1 and numbers(off)["saved_bytes"] == 0
    with off, torch.autograd.graph.save_on_cpu():
        w = x.exp()
    (y + z + w).sum().backward()
    assert torch.equal(x.grad, 3 * x.detach().exp())


def test_threads() -> None:
    off = offload("1KB", backend="reference", min_bytes=0)
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(size: int) -> None:
        try:
            for _ in range(5):
                x = torch.randn(size, requires_grad=True)
                e = x.detach().clone().requires_grad_()
                barrier.wait(30)
                with off:
                    y = x.exp().sin().cos()
                    barrier.wait(30)
                y.sum().backward()
                e.exp().sin().cos().sum().backward()
                assert torch.equal(x.grad, e.grad)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(100 * (i + 1),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    n = numbers(off)
    assert n["uses"] == 20 and n["live_bytes"] == 0


def test_backward_in_another_thread() -> None:
    off = everything()
    x = torch.randn(10, requires_grad=True)
    with off:
        y = x.exp()
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert torch.equal(x.grad, x.detach().exp()) and off.timeline is not None


def test_torch_func() -> None:
    off = everything()
    x = torch.randn(3)
    for transform in (torch.func.grad, torch.func.vjp, torch.func.jacrev):

        def apply(transform=transform):
            return (
                transform(lambda v: v.sin().sum(), x)
                if transform is torch.func.vjp
                else transform(lambda v: v.sin().sum())(x)
            )

        with (
            pytest.raises(RuntimeError) as expected,
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            apply()
        with pytest.raises(RuntimeError) as found, off:
            apply()
        assert str(found.value) == str(expected.value)
    w = torch.randn(3, requires_grad=True)
    with off:
        y = torch.func.vmap(lambda v: (v * w).sin())(torch.randn(5, 3))
    y.sum().backward()
    assert w.grad is not None and numbers(off)["moved_tensors"] > 0

    def refused(v: Tensor) -> Tensor:
        with off:
            return v.sin().sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(refused)(x)
    with off:
        pass


def test_compiled_submodule() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="aot_eager")
    )
    x = torch.randn(6, 8)
    expected = step(model, x)
    off = everything()
    for _ in range(2):
        check_same(step(model, x, lambda: off), expected)
    assert numbers(off)["moved_tensors"] > 0


def test_autocast(engine: tuple[str, str]) -> None:
    device, backend = engine
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    x = torch.randn(8, 16, device=device)

    @contextlib.contextmanager
    def plain():
        with torch.autocast(device, torch.bfloat16):
            yield

    off = everything(backend)

    @contextlib.contextmanager
    def both():
        with off, torch.autocast(device, torch.bfloat16):
            yield

    expected = step(model, x, plain)
    for _ in range(3):
        check_same(step(model, x, both), expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_distributed(process_group: None, sharded: bool, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    if frozen:  # a weight that is gathered, and saved for the gradient of what comes before
        model[2].requires_grad_(False)
    x = torch.randn(8, 16)
    expected = step(model, x)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh) if isinstance(layer, nn.Linear) else None
        around = fully_shard(model, mesh=mesh)
    else:
        around = nn.parallel.DistributedDataParallel(model)
    off = everything()
    for _ in range(3):
        found = step(around, x, lambda: off)
        check_same([g.full_tensor() if hasattr(g, "full_tensor") else g for g in found], expected)
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] - n["kept"]["other"] > 0 and n["live_bytes"] == 0
    assert n["kept"]["other"] == (32 * 32 * 4 if frozen else 0)


@cuda
def test_capture() -> None:
    off = everything("copy")
    x = torch.randn(1000, device="cuda", requires_grad=True)
    x.grad = torch.zeros_like(x)

    def run() -> None:
        with off:
            y = chain(x).sum()
        y.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    n = numbers(off)
    assert n["moved_bytes"] == 0 and n["kept"]["other"] == n["saved_bytes"] > 0
    for _ in range(2):
        x.grad.zero_()
        graph.replay()
        assert torch.equal(x.grad, plain_gradient(x))
    x.grad.zero_()
    run()
    assert torch.equal(x.grad, plain_gradient(x)) and numbers(off)["moved_bytes"] > 0


@cuda
def test_what_plans_ends_no_capture_of_another_thread() -> None:
    """It measures the bus, once for a process, and pins memory."""
    code = """
        import threading
        import torch
        from weft.offloading import offload

        x, engine, found = torch.randn(1000, device="cuda"), offload()._engine, []
        rest = lambda seconds: True
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = 2 * x
            plans = threading.Thread(target=lambda: found.extend((engine.rates(0), engine.add_host(0, 40 << 20, rest))))
            plans.start()
            plans.join()
            y += 1
        (out, back), pinned = found
        assert out > 0 and back > 0 and pinned
        y.zero_()
        graph.replay()
        assert torch.equal(y, 2 * x + 1)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.cuda(devices=2)
def test_two_devices() -> None:
    off = offload(0, min_bytes=0)
    a = torch.randn(1 << 18, device="cuda:0", requires_grad=True)
    for _ in range(3):
        delay(off, "out")
        with off:
            y = chain(chain(a).to("cuda:1")).to("cuda:0")
        (g,) = torch.autograd.grad(y.sum(), a)
        b = a.detach().clone().requires_grad_()
        (e,) = torch.autograd.grad(chain(chain(b).to("cuda:1")).to("cuda:0").sum(), b)
        assert torch.equal(g, e)
    numbers(off)
