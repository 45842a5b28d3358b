"""Kernels over rows: a norm behind a residual, a softmax in place, a layer norm with its statistics."""

import torch

import cutegen

cutegen.configure(build="allow")  # wait for the compiler instead of letting torch compute meanwhile

x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
residual, weight = torch.randn_like(x), torch.randn(4096, device="cuda", dtype=torch.bfloat16)

y, h = cutegen.rms_norm(x, weight, 1e-6, residual=residual, residual_out=residual)  # residual is h now
scores = cutegen.softmax(y)
want = y.double().softmax(-1)
print(
    f"softmax: largest relative error {((scores - want).abs() / want).max().item():.3g}, bf16 rounds to 2**-8"
)
cutegen.softmax(y, out=y)  # nothing is allocated
print(f"in place: {'the same' if torch.equal(y, scores) else 'DIFFERENT'} bits")

y, mean, rstd = cutegen.layer_norm(x, weight, weight, return_stats=True)
print(f"layer norm: means between {mean.min().item():.3g} and {mean.max().item():.3g}")
