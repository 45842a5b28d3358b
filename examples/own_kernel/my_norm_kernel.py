"""How the RMSNorm of my_norm.py is tuned, checked and called."""

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "my_rmsnorm",
    "RMSNorm of rows",
    entry="my_norm:RMSNorm",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp16")},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("w", "dtype", ("n",)),
        write("y", "dtype", ("m", "n"), may_alias=("x",)),
        scalar("eps", "fp32", (1e-6, 0.25)),
    ),
    construct="dtype, n, threads, threads_per_row",
    call="x, w, y, eps, stream",
    knobs={"threads": (128, 256), "threads_per_row": (32, 64, 128, 256)},
    default={"threads": 128, "threads_per_row": 128},
    rows="m",
    examples=("4096x4096 bf16", "4096x512 bf16", "4096x128 bf16", "4096x16384 fp16"),
)


@kernel.rule
def row_fits_registers(n, threads_per_row):
    """A thread holds its part of the row: above 128 elements registers run out."""
    return n <= 128 * threads_per_row


@kernel.reference
def reference(x, w, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@kernel.baseline("torch rms_norm")
def torch_rms_norm(x, w, eps):
    import torch

    return torch.nn.functional.rms_norm(x, w.shape, w, eps)
