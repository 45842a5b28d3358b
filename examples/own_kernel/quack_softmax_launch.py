"""QuACK's softmax with its launch chosen by the caller; QuACK itself derives it from the length of rows."""

from __future__ import annotations

from typing import Any

from quack.softmax import Softmax


class TunedSoftmax(Softmax):
    """QuACK's kernel; what its three methods return is given.

    Args:
        dtype: Of input and output, a type of the compiler.
        n: Length of a row.
        online: Find maximum and sum in one pass.
        threads: Of a block.
        per_row: Threads that share a row.
        cluster: Blocks that share a row.
    """

    def __init__(self, dtype: Any, n: int, online: bool, threads: int, per_row: int, cluster: int) -> None:
        super().__init__(dtype, n, online)
        self._launch = (threads, per_row, cluster)

    def _num_threads(self) -> int:
        return self._launch[0]

    def _threads_per_row(self) -> int:
        return self._launch[1]

    def _set_cluster_n(self) -> None:
        self.cluster_n = self._launch[2]
