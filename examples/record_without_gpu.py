"""Record which problems a model calls, without a GPU and without memory for its weights."""

import torch
from torch._subclasses import FakeTensorMode

import cutegen

# Fake parameters cannot be converted later: give the dtype when the model is made.
torch.set_default_dtype(torch.bfloat16)
with FakeTensorMode():
    model = torch.nn.Sequential(
        torch.nn.Linear(8192, 28672, bias=False), torch.nn.SiLU(), torch.nn.Linear(28672, 8192, bias=False)
    )
    cutegen.optimize(model)
    with torch.no_grad(), cutegen.record("model.jsonl") as recording:
        model(torch.empty(64, 8192))

print(recording.report())
print("next: python -m cutegen.tune --recorded model.jsonl, on a GPU or with --arch sm_90a")
