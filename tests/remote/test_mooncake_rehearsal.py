"""Mooncake's client is opened in another process before it is opened here: what fails or hangs there costs nobody."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tiercache.remote.mooncake import MooncakeOptions, MooncakeTier
from tiercache.remote.mooncake_rehearsal import rehearse

SETTINGS = ("127.0.0.1", "P2PHANDSHAKE", 8 << 30, 1 << 30, "tcp", "", "127.0.0.1:1")
_STORE = """
import json, os, time
class MooncakeDistributedStore:
    def setup(self, *settings):
        with open(os.environ["REHEARSED"], "a") as file:
            file.write(json.dumps(settings) + "\\n")
        {does}
    setup_dummy = setup
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """`store("return 0")`: what a client's setup does, in whatever process finds it on its path."""

    def make(does):
        package = tmp_path / "lib" / "mooncake"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "store.py").write_text(_STORE.format(does=does))
        monkeypatch.syspath_prepend(str(package.parent))
        monkeypatch.setenv("REHEARSED", str(tmp_path / "seen"))
        return lambda: [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]

    return make


def test_what_works_there_is_no_trouble_and_gives_no_memory(store):
    seen = store("return 0")
    rehearse(SETTINGS)
    rehearse((80 << 20, 16 << 20, "127.0.0.1:2"))
    assert seen() == [[*SETTINGS[:2], 0, 16 << 20, *SETTINGS[4:]], [16 << 20, 16 << 20, "127.0.0.1:2"]]


@pytest.mark.parametrize("does", ["return -1", "os.abort()", "raise ValueError"])
def test_what_fails_there_is_an_oserror(store, does):
    store(does)
    with pytest.raises(OSError, match="failed in another process"):
        rehearse(SETTINGS)


def test_what_hangs_there_ends(store):
    store("time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(OSError, match="did not end within 1 s"):
        rehearse(SETTINGS, limit_s=1.0)
    assert time.monotonic() - began < 10


def test_where_no_process_can_be_started_nothing_is_said(store, monkeypatch):
    seen = store("return -1")
    monkeypatch.setattr(sys, "executable", "")
    rehearse(SETTINGS)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    rehearse(SETTINGS)
    with pytest.raises(FileNotFoundError):
        seen()


def test_a_tier_opens_no_client_here_that_could_not_be_opened_there():
    class Library:
        MooncakeDistributedStore = None

        class ReplicateConfig:
            replica_num = 0

    def refuse(settings):
        raise OSError(f"not with {settings[-1]}")

    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mooncake://127.0.0.1:{server.getsockname()[1]}"
        tier = MooncakeTier(MooncakeOptions.from_url(url), Library(), refuse)
        with pytest.raises(OSError, match="not with"):
            tier.find([bytes(32)], 1.0)
        tier.close()
