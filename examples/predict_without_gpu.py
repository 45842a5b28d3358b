"""Without a GPU: compile candidates for Hopper, read their resources, predict their times."""

import cutegen

tuner = cutegen.AutoTuner("sm_90a")
result = tuner.tune(4096, 4096, 4096, candidates=6)  # six kernels, compiled and inspected, nothing measured

for row in result.rows:
    resources = row.resources
    if resources is not None and row.predicted_us is not None:
        print(
            f"predicted {row.predicted_us:7.1f} us, {resources.registers} registers, "
            f"{resources.smem_bytes} bytes of shared memory: {row.config}"
        )
