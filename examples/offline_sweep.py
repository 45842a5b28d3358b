"""Tune a whole model's shapes ahead of time and keep the winners in a table of their own."""

from pathlib import Path

import cutegen
from cutegen.families.gemm.problem import Problem
from cutegen.tuning import TuneResult

HIDDEN, INTERMEDIATE = 4096, 14336
TABLE = Path("llama-8b.json")

problems = [
    Problem(tokens, n, k)
    for tokens in (1, 16, 256, 4096)
    for n, k in ((HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
]

with cutegen.AutoTuner(table=TABLE) as tuner:
    for result in tuner.tune_all(problems, budget_s=600):
        if isinstance(result, TuneResult):
            print(result.problem, result.config)
        else:
            print(result.problem, "has no winner:", result.error)

cutegen.load_table(TABLE)  # from here on cutegen.gemm and cutegen.linear use it
