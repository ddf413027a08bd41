"""The rig itself: its processes come up, are seen, and are gone at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rig_mooncake import MIB, Master, Rig, mooncake_rig

pytestmark = pytest.mark.remote
__all__ = ["mooncake_rig"]


def test_a_master_and_an_owner(mooncake_rig: Rig) -> None:
    """The master counts what the owner gives."""
    master = mooncake_rig.master()
    owner = mooncake_rig.owner(master, 64 * MIB)
    assert owner.endpoint.startswith("127.0.0.1:")
    assert f"master_total_capacity_bytes {64 * MIB}" in master.metrics()


def test_a_kill_and_a_new_master_at_the_same_place(mooncake_rig: Rig) -> None:
    """Gone when `kill` returns, and another can have the address."""
    master = mooncake_rig.master()
    master.kill()
    assert not master.alive
    again = mooncake_rig.adopt(master.again())
    assert again.alive
    assert again.address == master.address


def test_a_rig_leaves_nothing_behind(mooncake_rig: Rig) -> None:
    """Whatever runs at its end is killed."""
    with Rig(mooncake_rig.folder) as rig:
        master = rig.master()
        assert isinstance(master, Master)
        owner = rig.owner(master, 16 * MIB)
    assert not master.alive
    assert not owner.alive


def test_a_private_network_where_its_programs_are_not_on_the_path(tmp_path: Path) -> None:
    """As where they were unpacked into the cache folder."""
    for name in ("sh", "true"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    script = Path(__file__).with_name("private_network.py")
    command = [sys.executable, str(script), sys.executable, "-c", "import socket; print(*socket.if_nameindex())"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["(1, 'lo')", ""], done.stderr
