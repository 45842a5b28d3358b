"""Ask a space what is legal, and why something is not."""

from cutegen.arch import find_arch
from cutegen.catalog import find_space
from cutegen.problem import Problem

problem = Problem(4096, 4096, 4096, ab_dtype="bf16", layout="tn")
space = find_space("gemm", find_arch("sm_90a"))

default = space.default(problem)
print("default:", default)

changed = default.replace(tile_shape_mn=(256, 256), pingpong=True)
for violation in space.explain(problem, changed):
    print(f"{violation.rule}: {violation.reason}")
