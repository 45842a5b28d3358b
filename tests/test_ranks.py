"""Ranks that differ all say so, and nobody waits long for one that is gone: processes of gloo on the CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu, operators_ask  # noqa: E402
from forked_torch import ForkedTorch  # noqa: E402

import cutegen  # noqa: E402
from cutegen.build import Toolchain  # noqa: E402
from cutegen.errors import RankError, UsageError  # noqa: E402
from cutegen.families.registry import parse_problem  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.torch_ops import ranks  # noqa: E402

HERE = Path(__file__).parent
RANK = """
import datetime, fcntl, json, os, sys, time
from pathlib import Path
rank, world, case, folder = *map(int, sys.argv[1:3]), sys.argv[3], Path(sys.argv[4])
sys.path[:0] = sys.argv[5:]
import torch.distributed as dist
from fake_kernels import FakeGpu
import cutegen
from cutegen.errors import CutegenError
from cutegen.records.table import Table
limit = datetime.timedelta(seconds=250)
meeting = folder / "port"  # that the system gave to the first, so nobody else has it
if rank:
    while not meeting.exists():
        time.sleep(0.01)
port = int(meeting.read_text()) if rank else 0
store = dist.TCPStore("127.0.0.1", port, world, rank == 0, limit, wait_for_workers=False)
if rank == 0:
    (folder / "draft").write_text(str(store.port))
    (folder / "draft").rename(meeting)
dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=world)
cutegen.use(FakeGpu(folder / f"cache{rank}").dispatcher(
    Table.load(folder / ("other.json" if case == "table" and rank == 2 else "table.json"))
))
group = None
if case == "groups":
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
living = (folder / "living").open("w")
if case == f"without {rank}":
    fcntl.flock(living, fcntl.LOCK_EX)
dist.barrier()
if case == f"without {rank}":
    os._exit(0)
fcntl.flock(living, fcntl.LOCK_SH)  # whoever leaves is gone
time.sleep(0.2 * (case == "groups" and rank == 2))  # the groups are not in step
began = time.monotonic()
try:
    for _ in range(2):
        found = cutegen.check_ranks(group, timeout_s=2 if case.startswith("without") else 60)
    said = {"facts": dict(found)}
except CutegenError as error:
    said = {"error": str(error), "kind": type(error).__name__}
print(json.dumps({**said, "seconds": time.monotonic() - began}), flush=True)
if not case.startswith("without"):
    dist.barrier()  # rank 0 keeps the store that ranks of other groups may still read
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedTorch]:
    with ForkedTorch(tmp_path_factory.mktemp("printed")) as forked:
        yield forked


def run_ranks(forked: ForkedTorch, folder: Path, case: str, world: int) -> list[dict[str, Any]]:
    """Return what each rank printed; nothing of one that printed nothing."""
    fingerprint = Fingerprint.of(H200, Toolchain.current())
    entries = [Entry(parse_problem(f"gemm 64x64x{k} bf16 kk"), None, source="torch") for k in (64, 128)]
    Table(fingerprint, entries[:1]).save(folder / "table.json")
    Table(fingerprint, entries).save(folder / "other.json")
    rest = [str(world), case, str(folder), str(HERE), str(HERE.parent)]
    done = forked.run_all(RANK, [[str(rank), *rest] for rank in range(world)])
    return [json.loads(each.stdout.splitlines()[-1]) if each.stdout.strip() else {} for each in done]


def test_ranks_that_are_alike_return_what_they_have(forked: ForkedTorch, tmp_path: Path) -> None:
    """Asked twice, in groups of their own."""
    found = run_ranks(forked, tmp_path, "groups", 3)
    facts = [each["facts"] for each in found]
    assert all(each == facts[0] for each in facts), found
    assert facts[0]["table"] == Table.load(tmp_path / "table.json").digest
    assert cutegen.__version__ in facts[0]["versions"] and "H200" in facts[0]["gpu"]


def test_all_ranks_name_the_one_with_another_table(forked: ForkedTorch, tmp_path: Path) -> None:
    found = run_ranks(forked, tmp_path, "table", 4)
    digests = [Table.load(tmp_path / f"{name}.json").digest for name in ("table", "other")]
    assert {each["kind"] for each in found} == {"RankError"}
    for each in found:
        assert f"table: {digests[0]} (rank 0, 1, 3) against {digests[1]} (rank 2)" in each["error"]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_ends_in_an_error(forked: ForkedTorch, tmp_path: Path, gone: int) -> None:
    """The first keeps the store."""
    found = run_ranks(forked, tmp_path, f"without {gone}", 2)
    assert found[gone] == {} and found[1 - gone]["kind"] == "RankError"
    assert found[1 - gone]["seconds"] < 60, "torch.distributed would have waited for 250"
    expected = "no answer from rank 1 within 2 s" if gone else "store of torch.distributed does not answer"
    assert expected in found[1 - gone]["error"]


# --- in this process ---


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of one rank."""
    import torch.distributed as dist

    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield fake
        dist.destroy_process_group()


def test_loaded_kernels_and_frost_are_compared(alone: FakeGpu) -> None:
    first = cutegen.check_ranks(timeout_s=5)
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    cutegen.gemm(a, a)
    cutegen.freeze()
    second = cutegen.check_ranks(timeout_s=5)
    assert {name for name in first if first[name] != second[name]} == {"kernels", "frozen"}
    assert set(cutegen.check_ranks(timeout_s=5, ignore=["kernels"])) == {*ranks.FACTS} - {"kernels"}


def test_a_store_that_does_not_answer_is_no_hang(alone: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def add(self, key: str, number: int) -> int:
            raise RuntimeError("Connection reset by peer")

    answers = threading.Event()

    class Silent:
        def add(self, key: str, number: int) -> int:
            answers.wait()
            raise RuntimeError("late")

    monkeypatch.setattr(ranks, "_LATE_S", 0.1)
    monkeypatch.setattr(ranks, "_READ_S", 0.1)
    for store, message in ((Gone(), "Connection reset"), (Silent(), "no answer within 0.1 s")):
        monkeypatch.setattr(ranks, "_store", lambda store=store: store)
        with pytest.raises(RankError, match=message):
            cutegen.check_ranks(timeout_s=0.1)
    answers.set()


def test_what_cannot_be_asked_is_refused(alone: FakeGpu) -> None:
    import torch.distributed as dist

    with pytest.raises(UsageError, match="versions, gpu, table"):
        cutegen.check_ranks(ignore=["speed"])
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="not initialized"):
        cutegen.check_ranks()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
