"""An environment is complete or built anew; needs no vLLM."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import vllm_venv


class Builder:
    """Builds a folder with one file; may fail midway."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.fails = False
        self.pause = threading.Event()
        self.pause.set()

    def __call__(self, place: Path) -> None:
        place.mkdir()
        (place / "half").touch()
        assert self.pause.wait(20.0)
        if self.fails:
            raise RuntimeError("no network")
        (place / "whole").touch()
        self.built.append(place.name)


def ensure(home: Path, builder: Builder, what: str = "1", adopts: bool = False) -> None:
    vllm_venv._ensure(home, what, lambda _: adopts, builder)


def test_built_once_and_again_for_another_version(tmp_path: Path) -> None:
    home, builder = tmp_path / "cache" / "env", Builder()
    for _ in range(2):
        ensure(home, builder)
    assert builder.built == ["env.building"] and (home / "whole").exists()
    ensure(home, builder, what="2")
    assert len(builder.built) == 2
    (home / vllm_venv._STAMP).write_text("half a sta")
    ensure(home, builder, what="2")
    assert len(builder.built) == 3


def test_a_half_built_one_is_not_used(tmp_path: Path) -> None:
    home, builder = tmp_path / "env", Builder()
    builder.fails = True
    with pytest.raises(RuntimeError, match="no network"):
        ensure(home, builder)
    assert not home.exists()
    builder.fails = False
    ensure(home, builder)
    assert (home / "whole").exists() and not home.with_name("env.building").exists()


def test_a_complete_one_without_a_stamp_is_adopted(tmp_path: Path) -> None:
    home, builder = tmp_path / "env", Builder()
    home.mkdir()
    ensure(home, builder, adopts=True)
    ensure(home, builder, adopts=False)
    assert builder.built == []


def test_two_builders_build_once(tmp_path: Path) -> None:
    home, builder = tmp_path / "env", Builder()
    builder.pause.clear()
    threads = [threading.Thread(target=ensure, args=(home, builder)) for _ in range(2)]
    for thread in threads:
        thread.start()
    builder.pause.set()
    for thread in threads:
        thread.join(20.0)
    assert builder.built == ["env.building"]


def test_scripts_find_the_python_that_was_moved(tmp_path: Path) -> None:
    """Console scripts name their python by its path."""
    home = tmp_path / "env"

    def build(place: Path) -> None:
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "tool").write_text(f"#!{place}/bin/python\n")

    vllm_venv._ensure(home, "1", lambda _: False, build)
    assert (home / "bin" / "tool").read_text() == f"#!{home}/bin/python\n"


def test_what_is_installed_for_the_tests_is_what_the_project_asks_for() -> None:
    names = {each.split(">")[0] for each in vllm_venv._ours()}
    assert {"lmdb", "sortedcontainers", "xxhash", "numpy", "pytest", "pytest-timeout", "hypothesis"} <= names
