"""Pin winners into a folder, and launch them from there with torch and tvm-ffi alone."""

import importlib
import sys
from pathlib import Path

import torch

import cutegen
from cutegen.deploy import pin_table

TABLE, FOLDER = Path("winners.json"), Path("deploy")

# Where there is a compiler: tune, then pin what the table says.
cutegen.AutoTuner(table=TABLE).tune(256, 1024, 512, dtype="bf16")
for item in pin_table(TABLE, FOLDER):
    print(item)

# Where it is deployed: the folder on the path is all there is; no cutegen, no DSL, no tuning.
sys.path.insert(0, str(FOLDER))
pinned = importlib.import_module("pinned")

x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
w = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
print(pinned.linear(x, w).shape)
