"""Laws of ``gemm`` and ``linear``, on the CPU with kernels that follow the real calling convention."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import BuildError, ConfigError, LaunchError, OperandError  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


def rand(*shape: int, dtype: Any = BF16) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def near(found: Any, a: Any, b: Any, **more: Any) -> None:
    want = a.float() @ b.float()
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=1e-2, **more)


def test_gemm_multiplies_in_every_layout(gpu: FakeGpu) -> None:
    """Any of the four layouts, plain or batched, gives the product in the dtype asked for."""
    for a in (rand(16, 32), rand(32, 16).t()):
        for b in (rand(32, 24), rand(24, 32).t()):
            near(cutegen.gemm(a, b), a, b)
            near(cutegen.gemm(a, b, out_dtype=torch.float32), a, b)
    a, b = rand(3, 16, 32), rand(3, 32, 24)
    assert cutegen.gemm(a, b).shape == (3, 16, 24)
    near(cutegen.gemm(a, b), a, b)
    near(cutegen.gemm(a[:1], b[:1]), a[:1], b[:1])
    half = cutegen.gemm(rand(16, 32, dtype=torch.float16), rand(32, 24, dtype=torch.float16))
    assert half.dtype == torch.float16


def test_second_call_looks_nothing_up(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made once per kind of call; one artifact serves many shapes."""
    a, b, out = rand(23, 32), rand(32, 24), torch.empty(23, 24, dtype=BF16)
    assert cutegen.gemm(a, b, out=out) is out
    cutegen.gemm(rand(21, 32), rand(32, 24))
    assert len(gpu.compiled) == len(gpu.loaded) == 1
    monkeypatch.setattr(ops, "_plan", lambda *_: pytest.fail("looked up again"))
    out.zero_()
    cutegen.gemm(a.clone(), b.clone(), out=out)
    near(out, a, b)


def test_tensors_go_to_the_kernel_as_they_are(gpu: FakeGpu) -> None:
    """No view is made where none is needed: a view per call costs more than the lookup."""
    a, b, out = rand(16, 32), rand(32, 24), torch.empty(16, 24, dtype=BF16)
    cutegen.gemm(a, b, out=out)
    assert all(x is y for x, y in zip(gpu.calls[-1][:3], (a, b, out), strict=True))


def test_epilogue_matches_torch(gpu: FakeGpu) -> None:
    """activation(alpha * A @ B + beta * C + bias), each part alone and all together."""
    a, b, c = rand(16, 32), rand(32, 24), rand(16, 24)
    product = a.float() @ b.float()
    column, row = rand(16, 1), rand(24)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"alpha": 2.0}, 2 * product),
        ({"alpha": -1}, -product),
        ({"c": c}, product + c.float()),
        ({"c": c, "beta": 0.5}, product + 0.5 * c.float()),
        ({"c": c * float("nan"), "beta": 0.0}, product),
        ({"bias": row}, product + row.float()),
        ({"bias": column}, product + column.float()),
        ({"activation": "relu"}, torch.relu(product)),
        ({"activation": "gelu"}, torch.nn.functional.gelu(product)),
        ({"activation": "gelu_tanh"}, torch.nn.functional.gelu(product, approximate="tanh")),
        ({"activation": "silu"}, torch.nn.functional.silu(product)),
        (
            {"alpha": 3.0, "c": c, "beta": -2.0, "bias": row, "activation": "relu"},
            torch.relu(3 * product - 2 * c.float() + row.float()),
        ),
    ]
    for options, want in cases:
        found = cutegen.gemm(a, b, **options)
        torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=2e-2, msg=str(options))


def test_c_may_be_the_output(gpu: FakeGpu) -> None:
    """Accumulating in place reads each element of C before it writes the same one of D."""
    a, b, c = rand(16, 32), rand(32, 24), rand(16, 24)
    want = a.float() @ b.float() + c.float()
    cutegen.gemm(a, b, c=c, out=c)
    torch.testing.assert_close(c.float(), want, rtol=1e-2, atol=1e-2)
    buffer = torch.zeros(17, 24, dtype=BF16)
    with pytest.raises(OperandError, match="shares some of its memory with c"):
        cutegen.gemm(a, b, c=buffer[1:], out=buffer[:-1])


def test_output_may_not_alias_an_input(gpu: FakeGpu) -> None:
    """Writing over what is still being read would be silently wrong; apart in one buffer is fine."""
    square = rand(32, 32)
    for _ in ("without a plan", "with one"):
        with pytest.raises(OperandError, match="out shares memory with a"):
            cutegen.gemm(square, rand(32, 32), out=square)
        with pytest.raises(OperandError, match="out shares memory with b"):
            cutegen.gemm(rand(32, 32), square, out=square)
        cutegen.gemm(rand(32, 32), rand(32, 32), out=torch.empty_like(square))
    buffer = rand(32, 64)
    near(cutegen.gemm(buffer[:, :32], square, out=buffer[:, 32:]), buffer[:, :32], square)


def test_out_shares_no_memory_with_vectors(gpu: FakeGpu) -> None:
    """A CTA may read them when another one has written its tile; also in calls of a kind that is known."""
    a, b = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, 16, dtype=torch.bfloat16)
    out = torch.zeros(17, 16, dtype=torch.bfloat16)
    cutegen.gemm(a, b, bias=out[16], out=out[:16])
    for bias in (out[0], out[15], out[3].view(16, 1)):
        with pytest.raises(OperandError, match="out shares memory with bias"):
            cutegen.gemm(a, b, bias=bias, out=out[:16])
    bytes_ = torch.zeros(16, 32, dtype=torch.float8_e4m3fn)
    wide = torch.zeros(17, 16)
    one = torch.ones(1)
    cutegen.scaled_gemm(bytes_, bytes_.t(), one, wide[16, :1], out=wide[:16])
    for at, name in enumerate(("scale_a", "scale_b")):
        scales = [one, one]
        scales[at] = wide[2, 2:3]
        with pytest.raises(OperandError, match=f"out shares memory with {name}"):
            cutegen.scaled_gemm(bytes_, bytes_.t(), *scales, out=wide[:16])


def test_unaligned_outputs_use_their_own_kernel(gpu: FakeGpu) -> None:
    """An odd address is part of the key, so a warm plan never meets a tensor it was not made for."""
    a, b = rand(16, 32), rand(32, 24)
    buffer = torch.empty(16 * 24 + 1, dtype=BF16)
    aligned, odd = buffer[:-1].view(16, 24), buffer[1:].view(16, 24)
    assert aligned.data_ptr() % 16 == 0
    for out in (aligned, odd, aligned, odd):
        near(cutegen.gemm(a, b, out=out), a, b)
    assert sorted(source.signature.unaligned_out for source in gpu.compiled) == [False, True]


def test_unaligned_inputs_are_refused_warm_and_cold(gpu: FakeGpu) -> None:
    """The kernel's own check speaks for an address that changed after the plan was made."""
    b = rand(32, 24)
    buffer = rand(16 * 32 + 1)
    odd = buffer[1:].view(16, 32)
    with pytest.raises(OperandError, match="a starts 2 bytes behind a multiple of 16"):
        cutegen.gemm(odd, b)
    cutegen.gemm(buffer[:-1].view(16, 32), b)
    with pytest.raises(OperandError, match="a starts 2 bytes behind a multiple of 16"):
        cutegen.gemm(odd, b)


def test_empty_problems_give_what_torch_gives(gpu: FakeGpu) -> None:
    """No element, or k = 0: nothing is launched, and what is fused behind the product still happens."""
    assert cutegen.gemm(rand(0, 32), rand(32, 8)).shape == (0, 8)
    assert cutegen.gemm(rand(8, 32), rand(32, 0)).shape == (8, 0)
    assert cutegen.gemm(rand(0, 8, 32), rand(0, 32, 8)).shape == (0, 8, 8)
    a, b, c, row = rand(8, 0), rand(0, 16), rand(8, 16), rand(16)
    out = torch.full((8, 16), float("nan"), dtype=BF16)
    assert torch.equal(cutegen.gemm(a, b, out=out), torch.zeros(8, 16, dtype=BF16))
    assert torch.equal(cutegen.gemm(a, b, c=c, beta=2.0), 2 * c)
    want = torch.relu(c.float() + row.float()).to(BF16)
    assert torch.equal(cutegen.gemm(a, b, c=c, bias=row, activation="relu"), want)
    column = rand(8, 1)
    assert torch.equal(cutegen.gemm(a, b, bias=column), column.expand(8, 16))
    assert torch.equal(cutegen.linear(rand(0, 4, 8), rand(16, 8)), torch.empty(0, 4, 16, dtype=BF16))
    assert not gpu.calls and not gpu.compiled


def test_sizes_of_one_may_have_any_stride(gpu: FakeGpu) -> None:
    """What torch calls the stride of a single row must not decide anything."""
    row = rand(32, 1).t()
    assert row.stride() == (1, 1)
    b = rand(32, 24)
    near(cutegen.gemm(row, b), row, b)
    near(cutegen.gemm(rand(16, 32), rand(32, 1).t().t()), rand(16, 32), rand(32, 1))
    out = torch.empty(1, 16, dtype=BF16).t()
    near(cutegen.gemm(rand(16, 32), rand(1, 32).t(), out=out), rand(16, 32), rand(1, 32).t())


def test_linear_is_torch_linear(gpu: FakeGpu) -> None:
    """Any leading dimensions, one row, a transposed batch, a bias, a given output."""
    w, bias = rand(24, 32), rand(24)
    functional = torch.nn.functional.linear
    for x in (rand(32), rand(16, 32), rand(2, 8, 32), rand(2, 3, 4, 32), rand(8, 2, 32).transpose(0, 1)):
        want = functional(x.float(), w.float(), bias.float())
        torch.testing.assert_close(cutegen.linear(x, w, bias).float(), want, rtol=1e-2, atol=1e-2)
        out = torch.empty(want.shape, dtype=BF16)
        assert cutegen.linear(x, w, out=out) is out
        torch.testing.assert_close(out.float(), functional(x.float(), w.float()), rtol=1e-2, atol=1e-2)
    weight = torch.nn.Parameter(w)
    with torch.no_grad():
        near(cutegen.linear(rand(16, 32), weight), rand(16, 32), w.t())
    with pytest.raises(OperandError, match=r"the last must be the 32 columns of w"):
        cutegen.linear(rand(2, 16, 16), w)
    with pytest.raises(OperandError, match="leading dimensions do not flatten"):
        cutegen.linear(rand(2, 8, 32), w, out=torch.empty(8, 2, 24, dtype=BF16).transpose(0, 1))
    with pytest.raises(OperandError, match="w is a ndarray"):
        cutegen.linear(rand(16, 32), w.float().numpy())


def test_errors_of_linear_name_its_own_arguments(gpu: FakeGpu) -> None:
    """Not those of the GEMM that computes it, whose b is the weight transposed."""
    x, w = rand(16, 32), rand(24, 32)
    learned = rand(24, 32).requires_grad_()
    apart, behind = rand(24, 33)[:, :32], rand(24 * 32 + 1)[1:].view(24, 32)
    for arguments, out, said in (
        ((x, w.half()), None, "w has dtype torch.float16 but x has torch.bfloat16"),
        ((x[None], w.half()), None, "w has dtype torch.float16 but x has torch.bfloat16"),
        ((x, learned.half()), None, "w has dtype torch.float16 but x has torch.bfloat16"),
        ((x.long(), w.long()), None, "x has dtype torch.int64"),
        ((x, rand(24, 31)), None, "x has shape .*the last must be the 31 columns of w"),
        ((x, apart), None, r"w has strides \(33, 1\): its pitch .*w.contiguous"),
        ((x, behind), None, "w starts 2 bytes behind .*pass w.clone"),
        ((x.to("meta"), w), None, "x is on meta"),
        ((x, rand(32, 32)), x, "out shares memory with x"),
        ((x, learned), torch.empty(16, 24, dtype=BF16), "w requires grad, .*pass w.detach"),
        ((x, w, rand(25)), None, r"bias has shape \(25,\)"),
    ):
        with pytest.raises(OperandError, match=said):
            cutegen.linear(*arguments, out=out)
    with torch.autocast("cpu", BF16), pytest.raises(OperandError, match="bias has shape"):
        cutegen.linear(x.float(), w.float(), rand(25))
    out = torch.empty(16, 24, dtype=BF16)
    for mode in (torch.no_grad, torch.inference_mode):  # in which a weight may be learned, and out be given
        with mode(), pytest.raises(OperandError, match=r"bias has shape \(25,\)"):
            cutegen.linear(x, torch.nn.Parameter(w), rand(25), out=out)
    with pytest.raises(OperandError):  # which rows there are, -1 could not say
        cutegen.linear(rand(2, 3, 0), rand(4, 0), activation="bogus")
    near(cutegen.linear(x, w), x, w.t())


def test_linear_flattens_without_a_copy(gpu: FakeGpu) -> None:
    """Contiguous leading dimensions are the same memory under another shape."""
    x = rand(2, 8, 32)
    cutegen.linear(x, rand(24, 32))
    assert gpu.calls[-1][0].data_ptr() == x.data_ptr()


def test_split_k_gets_a_workspace(gpu: FakeGpu) -> None:
    """The buffer is kept between calls of one thread and never shared between threads."""
    a, b = rand(64, 1024), rand(1024, 64)
    config = _config(a, b, gpu).replace(split_k=2, use_tma_store=False, pingpong=False)
    near(cutegen.gemm(a, b, config=config), a, b, msg="split")
    cutegen.gemm(a, b, config=config)
    first, second = gpu.calls[-2][3], gpu.calls[-1][3]
    assert first is second and first.numel() * 4 >= 2 * 64 * 64 * 4
    bias = rand(64)
    fused = cutegen.gemm(a, b, bias=bias, alpha=2.0, config=config)
    torch.testing.assert_close(fused.float(), 2 * (a.float() @ b.float()) + bias.float(), rtol=1e-2, atol=0.2)
    assert gpu.calls[-1][3] is bias and gpu.calls[-1][4] is first and gpu.calls[-1][-1] == 2.0
    thread = threading.Thread(target=lambda: cutegen.gemm(a, b, config=config))
    thread.start()
    thread.join()
    assert gpu.calls[-1][3] is not first


def _config(a: Any, b: Any, gpu: FakeGpu) -> Any:
    problem = cutegen.Problem(a.shape[0], b.shape[1], a.shape[1], layout="kn")
    return ops.default_dispatcher().explain(problem).config


def test_config_overrides_and_is_checked(gpu: FakeGpu) -> None:
    """A config may be an object, a mapping or its text; rules it breaks are named."""
    a, b = rand(64, 128), rand(128, 64)
    config = _config(a, b, gpu)
    for form in (config, dict(config), str(config)):
        near(cutegen.gemm(a, b, config=form), a, b)
    with pytest.raises(ConfigError, match="warpgroups_divide_tile"):
        cutegen.gemm(a, b, config=config.replace(mma_warpgroups=3))
    with pytest.raises(ConfigError, match="unknown knob 'colour'"):
        cutegen.gemm(a, b, config={**config, "colour": 1})
    with pytest.raises(ConfigError, match="config lacks"):
        cutegen.gemm(a, b, config={"tile_k": 64})


def test_bad_operands_leave_everything_usable(gpu: FakeGpu) -> None:
    """After each refusal the next good call works."""
    a, b = rand(16, 32), rand(32, 24)
    cutegen.gemm(a, b)
    bad: list[tuple[Any, Any, dict[str, Any], str]] = [
        (a.float(), b, {}, "a has dtype torch.float32"),
        (a, b[:16], {}, "its 16 rows must be the 32 columns"),
        (a, b.to("meta"), {}, "b is on meta"),
        (a.float().numpy(), b, {}, "a is a ndarray"),
        (a, b, {"beta": 2.0}, "beta=2.0 scales c"),
        (a, b, {"out": torch.empty(16, 24)[:, ::2]}, "out has shape"),
        (a, b, {"bias": 3}, "bias is a int"),
        (a, b, {"alpha": torch.tensor(2.0)}, "alpha is a Tensor"),
        (a.expand(2, 16, 32), b.expand(2, 32, 24), {}, "elements overlap"),
    ]
    for x, y, options, message in bad:
        with pytest.raises(OperandError, match=message):
            cutegen.gemm(x, y, **options)
        near(cutegen.gemm(a, b), a, b)


def test_kernel_failure_is_a_launch_error(gpu: FakeGpu, tmp_path: Path) -> None:
    """What a launch dies of is told with the problem; running out of memory stays torch's error."""

    class Broken(FakeGpu):
        error: Exception = RuntimeError("cudaErrorLaunchFailure: unspecified\nmore")

        def load(self, library: Path, symbol: str) -> Any:
            def function(*arguments: Any) -> None:
                raise self.error

            return function

    broken = Broken(tmp_path / "broken")
    cutegen.use(broken.dispatcher())
    with pytest.raises(
        LaunchError, match=r"gemm 16x24x32 bf16 kn failed to launch: cudaErrorLaunchFailure: unsp"
    ):
        cutegen.gemm(rand(16, 32), rand(32, 24))
    broken.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        cutegen.gemm(rand(16, 32), rand(32, 24))


def test_build_policy(gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``never`` refuses with the remedy; ``allow`` says at INFO that it compiles; failures are told."""
    a, b = rand(16, 32), rand(32, 24)
    cutegen.use(gpu.dispatcher(build="never"))
    with pytest.raises(LaunchError, match=r"no compiled kernel for gemm 16x24x32 bf16 kn .* build='never'"):
        cutegen.gemm(a, b)
    cutegen.use(gpu.dispatcher(build="allow"))
    with caplog.at_level(logging.INFO, logger="cutegen"):
        cutegen.gemm(a, b)
    assert "compiling a kernel for gemm 16x24x32" in caplog.text
    with pytest.raises(ValueError, match="build='maybe' is no policy; valid: allow, never"):
        gpu.dispatcher(build="maybe")

    def fail(source: Any, store: Any) -> Any:
        raise BuildError("build of x failed: boom", outcome="abort", log="...")

    gpu.compile = fail  # type: ignore[method-assign]
    cutegen.use(gpu.dispatcher())
    with pytest.raises(BuildError, match="boom"):
        cutegen.gemm(a, b)


def test_plans_are_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with endless shapes does not grow for ever."""
    monkeypatch.setattr(ops, "MAX_PLANS", 4)
    for m in range(1, 12):
        cutegen.gemm(rand(m, 32), rand(32, 24))
        assert len(ops._plans) <= 4


def test_many_threads_make_one_kernel(gpu: FakeGpu) -> None:
    """Threads that meet the same new problem compile and load it once, and all get their product."""
    a, b, results = rand(16, 32), rand(32, 24), []
    gate = threading.Barrier(8)

    def run() -> None:
        gate.wait()
        results.append(cutegen.gemm(a, b))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.compiled) == len(gpu.loaded) == 1
    for result in results:
        near(result, a, b)
    assert len(results) == 8


def test_scaled_gemm_multiplies_eight_bit_operands(gpu: FakeGpu) -> None:
    """fp8 sums are promoted unless fast ones are asked for; scales of any one-element shape are taken."""
    scales = torch.tensor(0.5), torch.tensor([[4.0]])
    for dtype, usual in ((torch.float8_e4m3fn, BF16), (torch.float8_e5m2, BF16), (torch.int8, torch.int32)):
        a, b = (rand(16, 64) * 4).to(dtype), (rand(32, 64) * 4).to(dtype).t()
        want = 2 * (a.float() @ b.float())
        for fast in (False, True):
            found = cutegen.scaled_gemm(a, b, *scales, out_dtype=torch.float32, fast_accum=fast)
            torch.testing.assert_close(found, want)
            promote = gpu.compiled[-1].signature.promote
            assert promote == (not fast and dtype != torch.int8)
        assert cutegen.gemm(a, b).dtype == usual
        assert cutegen.scaled_gemm(a, b, *scales).dtype == BF16
        assert all(scale.shape == (1,) for scale in gpu.calls[-1][3:5])
    with pytest.raises(OperandError, match=r"scale_b has 2 elements of torch\.float32; it must be one"):
        cutegen.scaled_gemm(a, b, scales[0], torch.ones(2))
    with pytest.raises(OperandError, match="layout 'kn' of int8 is not supported"):
        cutegen.gemm(a, b.contiguous())
    with pytest.raises(OperandError, match=r"of torch\.int8: torch\.int32"):
        cutegen.gemm(a, b, out_dtype=torch.float64)


def test_any_order_is_a_problem_of_its_own(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a caller who allows it can get a kernel whose last bits vary."""
    asked = []
    dispatcher = ops.default_dispatcher()
    explain = dispatcher.explain
    monkeypatch.setattr(dispatcher, "explain", lambda p, index=0: asked.append(p) or explain(p, index))
    a, b = rand(16, 32), rand(32, 24)
    for any_order in (False, True, False, True):
        near(cutegen.gemm(a, b, any_order=any_order), a, b)
    assert [problem.any_order for problem in asked] == [False, True]


def test_real_operands_under_a_fake_mode_reach_no_kernel(gpu: FakeGpu) -> None:
    """Results would be fake, without memory to write to: torch answers, or refuses as for its own product."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = rand(16, 32), rand(24, 32).t()
    known = cutegen.gemm(a, b)
    calls = len(gpu.calls)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(16, 24, dtype=BF16)
        for found in (cutegen.gemm(a, b), cutegen.linear(a, b.t()), cutegen.gemm(a, b, out=made)):
            assert type(found) is type(made) and found.shape == known.shape and found.dtype == BF16
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        cutegen.gemm(a, b)
    assert len(gpu.calls) == calls
    near(cutegen.gemm(a, b), a, b)
