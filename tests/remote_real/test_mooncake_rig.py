"""The rig itself: its processes come up, are seen, and are gone at the end."""

from __future__ import annotations

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
