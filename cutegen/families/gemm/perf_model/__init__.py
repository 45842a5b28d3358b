"""An analytic model of how long a GEMM config takes on a GPU."""
