"""Write these samples with the code of version 0.1: run in a checkout of 664f94d, where to is the argument.

A pretended compiler and bench (that version's tests have them) fill a trial database and a table; a folder is
pinned, of which all but the kernel is kept.
"""

import gzip
import os
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [os.getcwd(), os.getcwd() + "/tests"]
from cutegen.pin import pin_table
from cutegen.problem import Problem
from deployments import LINES, Workshop, write_table
from fake_tuning import Effort, Rig

out, work = Path(sys.argv[1]), Path(tempfile.mkdtemp())
tuner = Rig(work, effort=Effort(classes=2, refine=0, finalists=2)).tuner
for line in ("gemm 256x512x1024 bf16 tn", "gemm 256x512x1024 fp16 nt bias=n act=relu"):
    tuner.tune_problem(Problem.parse(line))
connection = sqlite3.connect(work / "trials.db")
connection.execute("pragma journal_mode=delete")
connection.execute("vacuum")
connection.close()
(out / "trials.db.gz").write_bytes(gzip.compress((work / "trials.db").read_bytes(), mtime=0))
shutil.copy(next(work.glob("tables/*.json")), out / "table.json")
(work / "pins").mkdir()
table = write_table(work / "pins" / "t.json", LINES[:1])
pin_table(table, out / "deploy", kernels=Workshop(work / "cache").kernels())
shutil.rmtree(out / "deploy" / "kernels")
