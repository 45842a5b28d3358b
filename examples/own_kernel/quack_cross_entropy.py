"""QuACK's cross-entropy (``pip install quack-kernels``), as its wheel has it: loss, log-sum-exp and gradient.

    python -m cutegen.tune --kernel quack_cross_entropy.py --shape 4096x32768 --options gradient

QuACK imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "quack_cross_entropy",
    "QuACK's cross-entropy of rows",
    entry="quack.cross_entropy:CrossEntropy",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp16", "fp32"), "gradient": False},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("target", "int64", ("m",)),
        write("loss", "fp32", ("m",)),
        write("lse", "fp32", ("m",)),
        write("dx", "dtype", ("m", "n"), when="gradient", may_alias=("x",)),
        scalar("ignore_index", "int32", (-100, 5)),
    ),
    knobs={"online": (True, False)},
    default={"online": True},
    construct="dtype, n, online",
    call="x, target, None, loss, lse, dx, None, ignore_index, stream",
    rows="m",
    examples=("4096x32768 bf16", "4096x4096 bf16 gradient"),
)


@kernel.inputs
def inputs(generator: Any, m: int, n: int) -> dict[str, Any]:
    """Return classes; logits are normal."""
    import torch

    return {"target": torch.randint(0, n, (m,), generator=generator, device=generator.device)}


@kernel.reference
def reference(x: Any, target: Any, ignore_index: int) -> dict[str, Any]:
    """Return loss, log-sum-exp and gradient in fp64; ignored rows have neither loss nor gradient."""
    index, lse = target.long()[:, None], x.logsumexp(-1)
    keep = (index != ignore_index).double()
    loss = (lse[:, None] - x.gather(1, index)) * keep
    dx = x.softmax(-1).scatter_add(1, index, -x.new_ones(index.shape)) * keep
    return {"loss": loss[:, 0], "lse": lse, "dx": dx}


@kernel.tolerance
def allowed(output: str, want: Any, dtype: str) -> Any:
    """Rounding; and exponents of up to 10 in magnitude, rounded in fp32."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}[dtype]
    return want.abs() * unit + 2.0**-20 if output == "dx" else want.abs() * 2.0**-20 + 2.0**-18


@kernel.baseline("torch")
def torch_cross_entropy(x: Any, target: Any, ignore_index: int) -> dict[str, Any]:
    """Call PyTorch's own kernels, for the loss alone."""
    import torch

    return {
        "loss": torch.nn.functional.cross_entropy(
            x.float(), target, reduction="none", ignore_index=int(ignore_index)
        )
    }
