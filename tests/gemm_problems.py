"""GEMMs of every kind: layouts, dtypes, batches and epilogues."""

from __future__ import annotations

from itertools import product

from cutegen.families.gemm.problem import LAYOUTS, Epilogue, Problem

__all__ = ["PROBLEMS"]

PROBLEMS = [
    *(Problem(72, 40, 64, layout=name, out_dtype=out) for name, out in product(LAYOUTS, ("bf16", "fp32"))),
    Problem(72, 40, 64, ab_dtype="fp16"),
    Problem(72, 40, 64, out_dtype="fp16"),
    Problem(1, 40, 64),
    Problem(33, 37, 64),
    Problem(33, 40, 64, unaligned_out=True),
    Problem(40, 24, 64, batch=3, layout="mn"),
    Problem(33, 37, 64, batch=2, epilogue=Epilogue(alpha=True, beta=True, bias="n")),
    *(Problem(24, 40, 64, epilogue=Epilogue(activation=a)) for a in ("relu", "gelu", "gelu_tanh", "silu")),
    *(Problem(24, 40, 64, epilogue=Epilogue(alpha, beta, bias)) for alpha, beta, bias in
      product((False, True), (False, True), ("", "m", "n"))),
    Problem(24, 40, 64, out_dtype="fp32", epilogue=Epilogue(True, True, "n", "silu")),
    Problem(24, 40, 64, ab_dtype="e4m3", epilogue=Epilogue(scale=True)),
    Problem(24, 40, 256, ab_dtype="e4m3", promote=True, out_dtype="fp32"),
    Problem(24, 40, 64, ab_dtype="e5m2", batch=2),
    Problem(24, 40, 64, ab_dtype="int8"),
    Problem(24, 41, 64, ab_dtype="int8", out_dtype="bf16", epilogue=Epilogue(scale=True, bias="n")),
    Problem(24, 40, 64, ab_dtype="int8", out_dtype="fp16"),
    Problem(24, 40, 64, any_order=True),
    Problem(24, 40, 64, ab_dtype="tf32"),
    Problem(24, 41, 64, 2, "tf32", "bf16", epilogue=Epilogue(alpha=True, bias="m")),
]  # fmt: skip
