"""The README's example is run as it stands, in a directory of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    code = [line for line in example[1].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= 12
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example[1]],
        cwd=tmp_path,
        env={**os.environ, "TIERCACHE": "on"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kv-cache" / "catalog" / "data.mdb").exists()
