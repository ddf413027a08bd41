"""The folder with Mooncake is complete or unpacked anew; needs no Mooncake."""

from __future__ import annotations

from pathlib import Path

import mooncake_folder
import pytest


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where pip was told to unpack."""
    places: list[Path] = []

    def unpack(place: Path) -> None:
        (place / "mooncake").mkdir(parents=True)
        places.append(place)

    monkeypatch.setattr(mooncake_folder, "_unpack", unpack)
    monkeypatch.setattr(mooncake_folder, "complaint", lambda folder: "it is not whole")
    return places


def test_unpacked_once_and_again_for_another_python(
    tmp_path: Path, unpacked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        home = mooncake_folder.ensure_folder(tmp_path)
    assert len(unpacked) == 1 and (home / "mooncake").is_dir()
    monkeypatch.setattr(mooncake_folder.sys, "version_info", (3, 99))
    mooncake_folder.ensure_folder(tmp_path)
    assert len(unpacked) == 2


def test_what_is_half_unpacked_is_not_used(tmp_path: Path, unpacked: list[Path]) -> None:
    home = tmp_path / f"mooncake-{mooncake_folder.VERSION}"
    (home / "half").mkdir(parents=True)
    mooncake_folder.ensure_folder(tmp_path)
    assert len(unpacked) == 1 and not (home / "half").exists()


def test_what_can_be_imported_is_adopted(tmp_path: Path, unpacked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_folder, "complaint", lambda folder: None)
    (tmp_path / f"mooncake-{mooncake_folder.VERSION}").mkdir()
    mooncake_folder.ensure_folder(tmp_path)
    assert unpacked == []
