"""Kernels over rows: norms, fp8 with a scale for each row, a softmax in place, and a training loss."""

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

q, scale = cutegen.rms_norm(x, weight, quantize="e4m3")
print(f"fp8: {q.dtype}, scales between {scale.min().item():.3g} and {scale.max().item():.3g}")

hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
head = torch.randn(64, 128256, device="cuda", dtype=torch.bfloat16) / 8
target = torch.randint(0, 128256, (512,), device="cuda")
target[:32] = -100  # padding
loss = cutegen.cross_entropy(hidden @ head, target, z_loss=1e-4, inplace_backward=True)
assert isinstance(loss, torch.Tensor)  # with return_lse it would be a pair
torch.autograd.backward(loss)
print(f"loss {loss.item():.3f}; of a guess it would be {torch.tensor(128256.0).log().item():.3f} or so")
