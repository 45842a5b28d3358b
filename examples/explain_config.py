"""Ask a space which configs are valid, and why others are not."""

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_config

problem = Problem(4096, 4096, 4096, ab_dtype="bf16", layout="kk")
space = find_space("gemm", find_arch("sm_90a"))

default = default_config(space, problem)
print("default:", default)

changed = default.replace(tile_shape_mn=(256, 256), mma_warpgroups=2, pingpong=True)
for violation in space.explain(problem, changed):
    print(f"{violation.rule}: {violation.reason}")
