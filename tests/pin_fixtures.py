"""Fixtures of the tests of pinning: tables of one kernel each, and a folder with the first one pinned."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployments import LINES, Workshop, write_table

from cutegen.deploy import pin_table


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    return write_table(tmp_path / "tables" / "t.json", LINES[:1])


@pytest.fixture
def second(tmp_path: Path, table: Path) -> Path:
    return write_table(tmp_path / "tables" / "second.json", LINES[1:2])


@pytest.fixture
def deployed(tmp_path: Path, table: Path, workshop: Workshop) -> Path:
    pin_table(table, tmp_path / "deploy", kernels=workshop.kernels())
    return tmp_path / "deploy"
