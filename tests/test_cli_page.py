"""`tiercache replay --report`: its options, what it says where, and a page from a real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiercache import cli, cli_output
from tiercache.sim.page import write

TRACE = [
    {"timestamp": 1000 * at, "input_length": 48, "output_length": 1, "hash_ids": [at % 3, 10 + at % 6, 20 + at % 12]}
    for at in range(36)
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t <i>.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return str(path)


def arguments(trace: str, *more: str) -> list[str]:
    sizes = ["--block-tokens", "16", "--dram", "20%", "--nvme", "60%", "--no-data"]
    return ["replay", trace, *sizes, *more]


def test_the_page_and_the_table(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert cli.main(arguments(trace, "--report", str(page), *MODEL)) == 0
    out, err = capsys.readouterr()
    assert "all is well" in out and f"tiercache: wrote {page}" in err and "report" in err
    text = page.read_text(encoding="utf-8")
    assert "312e12 * 0.4 / (2 * 70e9) = 891 prompt tokens" in text
    assert "t &lt;i&gt;.jsonl" in text and "--gpu A100" in text and "assumed" not in text


def test_with_json_stdout_is_one_object(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich or not."""
    monkeypatch.setattr(cli_output, "have_rich", lambda: False)
    page = tmp_path / "out.html"
    assert cli.main(arguments(trace, "--report", str(page), "--json", "--block-bytes", "1MiB")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["page"] == str(page)
    assert err == f"tiercache: wrote {page}\n"
    assert "not yet yours" not in page.read_text(encoding="utf-8")
    assert cli.main(arguments(trace, "--json")) == 0
    assert "page" not in json.loads(capsys.readouterr().out)


def test_with_data(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    sizes = ["--block-tokens", "16", "--dram", "20%", "--nvme", f"{tmp_path / 'kv'}:60%", "--block-bytes", "4KiB"]
    assert cli.main(["replay", trace, *sizes, "--report", str(page)]) == 0
    assert "0 (in " in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "loaded blocks, all compared" in text


MODEL = ["--model-params", "70B", "--gpu", "A100", "--mfu", "0.4"]
WRONG = [
    (["--model-params", "8B"], "--model-params = '8B': together with --report FILE"),
    (["--prefill-tokens-per-s", "8"], "together with --report"),
    (["--report", "no/such/x.html"], "make "),
    (["--report", "/dev/null"], "the name of a file"),
    (["--report", "x.html", "--model-params", "lots"], "like 8B, 70B or 8e9"),
    (["--report", "x.html", "--gpu", "abacus"], "a100, h100"),
    (["--report", "x.html", "--gpu-tflops", "0"], "gpu_tflops"),
    (["--report", "x.html", "--mfu", "50"], "mfu"),
    (["--report", "x.html", "--prefill-tokens-per-s", "9", "--gpu", "h100"], "without --model-params"),
]


@pytest.mark.parametrize(("more", "says"), WRONG, ids=[" ".join(more) for more, _ in WRONG])
def test_what_is_wrong_is_said_before_anything_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str], says: str
) -> None:
    """Even a trace that is not there is not looked at."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments("gone.jsonl", *more)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err and "gone.jsonl" not in err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    assert cli.main(arguments(trace, "--report", "x.html")) == 2
    assert "pip install 'tiercache[report]'" in capsys.readouterr().err


def test_other_gpus(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert cli.main(arguments(trace, "--json", "--report", str(page), "--gpu-tflops", "100")) == 0
    assert "8 B parameters on one GPU of 100 TFLOP/S" not in page.read_text(encoding="utf-8")
    assert "8 B parameters on one GPU of 100 TFLOP/s" in page.read_text(encoding="utf-8")


def test_nothing_of_it_is_loaded_without_it(trace: str) -> None:
    code = (
        "import sys; from tiercache.cli import main; "
        f"status = main({arguments(trace, '--json')!r}); "
        "assert not [n for n in sys.modules if n.startswith(('matplotlib', 'tiercache.sim.page'))]; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
