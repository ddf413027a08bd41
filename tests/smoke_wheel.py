"""Run by `make wheel` in a clean environment that has the wheel and nothing else: the README example must work."""

import re
import runpy
import tempfile
from importlib.metadata import version
from pathlib import Path

import tiercache

readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
assert example is not None
assert "site-packages" in tiercache.__file__, f"not the installed wheel: {tiercache.__file__}"
assert version("tiercache") == tiercache.__version__
with tempfile.TemporaryDirectory() as place:
    script = Path(place) / "example.py"
    script.write_text(example[1].replace('"kv-cache"', repr(str(Path(place) / "kv-cache"))), encoding="utf-8")
    runpy.run_path(str(script))
print(f"tiercache {tiercache.__version__}: the README example runs from the wheel")
