"""Ship a model without Python: GEMMs as a library, the rest as a package of AOTInductor, a C++ program."""

import importlib
import subprocess
import sys
from pathlib import Path

import torch

import cutegen
from cutegen.deploy import pin_table
from cutegen.families.ranges import parse_range

TABLE, FOLDER = Path("winners.json"), Path("deploy").resolve()
LIBRARY, PACKAGE, PROGRAM = FOLDER / "libcutegen_ops.so", "model.pt2", Path("aoti_main").resolve()

# Tune, and pin all numbers of rows up to 512 into one library; `cutegen pin --cpp` does the same.
cutegen.AutoTuner(table=TABLE, effort="quick").tune(64, 1024, 512, dtype="bf16")
pin_table(TABLE, FOLDER, problems=[parse_range("gemm 1..512x1024x512 bf16 kk")], cpp=True)
sys.path.insert(0, str(FOLDER))
pinned = importlib.import_module("pinned")


class Model(torch.nn.Module):
    """One layer, whose results are 1 where all inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1024, 512), 1 / 512, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(pinned.linear(x, self.weight))


# Package the model with symbolic rows.
with torch.no_grad():
    x = torch.ones(300, 512, device="cuda", dtype=torch.bfloat16)
    rows = {"x": {0: torch.export.Dim("m", min=2, max=512)}}
    program = torch.export.export(Model().requires_grad_(False).cuda(), (x,), dynamic_shapes=rows)
    torch._inductor.aoti_compile_and_package(program, package_path=PACKAGE)

# Build and run a program that knows libtorch, the library and the package, and nothing else.
root = Path(torch.__file__).parent
headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
links = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
main = Path(__file__).with_name("aoti_main.cpp")
command = ["g++", "-std=c++20", *headers, main, *links, "-ltorch_cuda", "-ldl", "-o", PROGRAM]
subprocess.run([str(word) for word in command], check=True)
print(subprocess.run([PROGRAM, LIBRARY, PACKAGE], check=True, capture_output=True, text=True).stdout)
