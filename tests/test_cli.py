"""The command line: what it asks of the library, what it prints where, and its exit status."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiercache import cli, cli_output
from tiercache.errors import ConfigError, DirectoryInUseError
from tiercache.sim import demo
from tiercache.sim.options import ReplayOptions, Share, parse_share_or_size, slots_of
from tiercache.sim.report import PhaseReport, ReplayReport, TierReport

REPORT = ReplayReport(
    trace="t.jsonl",
    policy="reuse",
    hints="none",
    data=True,
    block_tokens=512,
    block_nbytes=4096,
    requests=10,
    unique_blocks=40,
    prompt_tokens=1000,
    hit_tokens=400,
    infinite_hit_ratio=0.5,
    tiers=(
        TierReport("dram", 8, 300, 50, 42, 40, 3_000_000_000, 2_000_000_000, 1.0, 1.0),
        TierReport("nvme", 20, 100, 40, 20, 0, 5, 7, 0.0, 0.0),
    ),
    verified_blocks=77,
    seconds=1.5,
)
KILLED = dataclasses.replace(
    REPORT,
    before_kill=PhaseReport(4, 400, 100, {"dram": 90, "nvme": 10}),
    after_kill=PhaseReport(6, 600, 300, {"dram": 210, "nvme": 90}),
    reopen_s=0.123,
    recovered_blocks=55,
)


@dataclasses.dataclass
class Commands:
    """Runs `main` with the library's parts replaced, and keeps what they were called with."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    options: ReplayOptions | None = None
    out: str = ""
    err: str = ""

    def replay(self, *args: str, result: ReplayReport | BaseException = REPORT) -> int:
        def run_replay(options: ReplayOptions, progress: Callable[[int, int, str], None] | None = None) -> ReplayReport:
            self.options = options
            assert progress is not None
            progress(1, 10, "one [step]")
            if isinstance(result, BaseException):
                raise result
            return result

        self._replace("tiercache.sim.replay", run_replay=run_replay)
        return self.run("replay", *args)

    def demo(self, *args: str, result: ReplayReport = KILLED, memory: int | None = None, disk: int = 1 << 40) -> int:
        self.monkeypatch.setattr(demo, "free_memory_nbytes", lambda read: memory)
        self.monkeypatch.setattr(demo, "_free_disk_nbytes", lambda place: disk)

        def run_replay(options: ReplayOptions, progress: Callable[[int, int, str], None]) -> ReplayReport:
            self.options = options
            return result

        self._replace("tiercache.sim.replay", run_replay=run_replay)
        return self.run("demo", *args)

    def check(self, *args: str, result: Any) -> int:
        def check_directory(path: Path, *, fix: bool, scrub: bool, progress: Callable[[int, int, str], None]) -> Any:
            progress(1, 2, "")
            if isinstance(result, BaseException):
                raise result
            result.called_with = (path, fix, scrub)
            return result

        self._replace("tiercache.scrub", check_directory=check_directory)
        return self.run("check", *args)

    def run(self, *args: str) -> int:
        status = cli.main(args)
        self.out, self.err = self.capsys.readouterr()
        return status

    def _replace(self, name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        self.monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capsys)


def test_options_by_default(commands: Commands) -> None:
    assert commands.replay("example") == 0
    assert commands.options == ReplayOptions(trace="example", dram=1 << 30)
    options = commands.options
    assert (options.block_nbytes, options.in_flight, options.policy) == (256 * 1024, 4, "reuse")
    assert options.write_after_s is None
    assert options.trace_path.name == "mooncake_conversation_3000.jsonl.gz"


def test_every_option(commands: Commands) -> None:
    line = (
        "x.npz --dram 5% --nvme /a:b/c:20GiB --block-bytes 4KiB --policy lru --in-flight 7 --write-after 2.5 "
        "--full-blocks --skip-bad --requests 9 --kill-at 0.5 --keep --block-tokens 16 --json --hints perfect "
        "--exclusive no"
    )
    status = commands.replay(*line.split())
    assert status == 0
    assert commands.options == ReplayOptions(
        trace="x.npz",
        dram=Share(0.05),
        nvme_path=Path("/a:b/c"),
        nvme=20 << 30,
        block_nbytes=4096,
        block_tokens=16,
        policy="lru",
        hints="perfect",
        exclusive=False,
        in_flight=7,
        write_after_s=2.5,
        full_blocks=True,
        skip_bad=True,
        requests=9,
        kill_at=0.5,
        keep=True,
    )
    assert commands.options.trace_path == Path("x.npz")


def test_a_limit_of_writes(commands: Commands) -> None:
    assert commands.replay("x", "--nvme", "d:50%", "--max-writes-per-hit", "6", "--exclusive", "yes") == 0
    assert (commands.options.max_writes_per_hit, commands.options.exclusive) == (6.0, True)
    for arguments, says in (
        (["--nvme", "d:50%", "--max-writes-per-hit", "0.5"], "at least 1"),
        (["--nvme", "d:50%", "--max-writes-per-hit", "few"], "like 6, or 'off'"),
        (["--nvme", "d:50%", "--max-writes-per-hit", "6", "--policy", "lru"], "use 'reuse'"),
        (["--max-writes-per-hit", "6"], "no NVMe tier"),
    ):
        assert commands.replay("x", *arguments) == 2
        assert says in commands.err.splitlines()[-1] and "max" in commands.err.splitlines()[-1]


def test_without_data_the_nvme_tier_needs_no_directory(commands: Commands) -> None:
    assert commands.replay("x", "--nvme", "50%", "--no-data") == 0
    assert commands.options == ReplayOptions(trace="x", dram=1 << 30, nvme=Share(0.5), no_data=True)
    assert commands.replay("x", "--nvme", "d:50%", "--no-data", "--write-after", "0") == 0
    assert commands.options.nvme_path == Path("d")
    assert commands.options.write_after_s == 0


WRONG = [
    (["--dram", "lots"], "--dram = 'lots'"),
    (["--dram", "0%"], "above 0 %"),
    (["--dram=-1%"], "above 0 %"),
    (["--dram", "nan%"], "above 0 %"),
    (["--dram", "x%"], "a number before the percent sign"),
    (["--nvme", "20GiB"], "DIR:SIZE"),
    (["--nvme", ":20GiB"], "DIR:SIZE"),
    (["--nvme", ":20GiB", "--no-data"], "DIR:SIZE"),
    (["--nvme", "/mnt/kv:"], "--nvme"),
    (["--block-bytes", "x"], "--block-bytes"),
    (["--block-bytes", "0"], "at least 1 byte"),
    (["--in-flight", "0"], "in_flight"),
    (["--in-flight", "257"], "in_flight"),
    (["--requests", "0"], "requests"),
    (["--nvme", "d:1GiB", "--write-after", "soon"], "--write-after"),
    (["--nvme", "d:1GiB", "--write-after", "-1"], "write_after"),
    (["--nvme", "d:1GiB", "--write-after", "nan"], "write_after"),
    (["--write-after", "2"], "no NVMe tier"),
    (["--kill-at", "0.5"], "NVMe"),
    (["--nvme", "d:1GiB", "--kill-at", "1"], "between 0 and 1"),
    (["--nvme", "d:1GiB", "--kill-at", "0.5", "--no-data"], "no_data"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=lambda value: "_".join(value) if isinstance(value, list) else "")
def test_wrong_options_are_one_line_on_stderr(commands: Commands, args: list[str], says: str) -> None:
    assert commands.replay("example", *args) == 2
    assert commands.options is None
    assert commands.out == ""
    assert commands.err.startswith("tiercache: error: ")
    assert says in commands.err
    assert commands.err.count("\n") == 1


def test_shares_and_sizes_become_slots() -> None:
    assert slots_of(parse_share_or_size("5%", "dram"), 1000, 4096, "dram") == 50
    assert slots_of(parse_share_or_size("0.001%", "dram"), 1000, 4096, "dram") == 1
    assert slots_of(parse_share_or_size("150%", "dram"), 1000, 4096, "dram") == 1500
    assert slots_of(parse_share_or_size("1MiB", "dram"), 1000, 4097, "dram") == 128
    with pytest.raises(ConfigError, match="at least one block, 8192 bytes"):
        slots_of(8191, 1000, 4097, "dram")


def test_json_is_one_object_and_nothing_else_on_stdout(commands: Commands) -> None:
    assert commands.replay("example", "--json") == 0
    assert commands.out.count("\n") == 1
    value = json.loads(commands.out)
    wanted = {"requests": 10, "prompt_tokens": 1000, "hit_tokens": 400, "token_hit_ratio": 0.4, "wrong_bytes": 0}
    assert {key: value[key] for key in wanted} == wanted
    assert list(value["tiers"]) == ["dram", "nvme"]
    dram = value["tiers"]["dram"]
    wanted = {"hit_tokens": 300, "blocks_written": 50, "blocks_evicted": 42, "bytes": 5_000_000_000}
    assert {key: dram[key] for key in wanted} == wanted
    assert value["before_kill"] is None
    assert commands.replay("example", "--json", result=KILLED) == 0
    assert json.loads(commands.out)["after_kill"]["hit_tokens_by_tier"] == {"dram": 210, "nvme": 90}


def test_the_table(commands: Commands) -> None:
    assert commands.replay("example", result=KILLED) == 0
    text = " ".join(commands.out.replace("│", " ").split())
    for part in (
        "before the kill 4 400 0.2500 0.2250 0.0250",
        "after the kill 6 600 0.5000 0.3500 0.1500",
        "all 10 1,000 0.4000 0.3000 0.1000",
        "dram 8 300 50 42 40 3.00 GB 3.00 2.00 GB 2.00",
        "nvme 20 100 40 20 0 0.00 GB - 0.00 GB -",
        "wrong bytes 0 (in 77 loaded blocks)",
        "tokens served from NVMe after the kill 90",
        "time to reopen 123 ms (55 blocks found there)",
        "all is well",
    ):
        assert part in text
    assert "replay" in commands.err
    assert "one [step]" in commands.err


def test_the_table_without_a_kill_and_without_data(commands: Commands) -> None:
    report = dataclasses.replace(REPORT, data=False, skipped_lines=3, prompt_tokens=0, hit_tokens=0)
    assert commands.replay("example", result=report) == 0
    assert "no payload was moved" in commands.out
    assert "malformed lines skipped" in commands.out
    assert "kill" not in commands.out


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
@pytest.mark.parametrize(
    ("report", "says"),
    [
        (dataclasses.replace(REPORT, wrong_bytes=3), "3 wrong bytes were served"),
        (dataclasses.replace(KILLED, after_kill=PhaseReport(6, 600, 9, {"dram": 9})), "nothing was warm"),
    ],
)
def test_a_failed_replay_is_status_1(commands: Commands, report: ReplayReport, says: str, json_flag: list[str]) -> None:
    assert commands.replay("example", *json_flag, result=report) == 1
    assert says in commands.out


def test_without_rich(commands: Commands) -> None:
    commands.monkeypatch.setattr(cli_output, "have_rich", lambda: False)
    assert commands.replay("example") == 2
    assert commands.options is None
    assert commands.err == (
        "tiercache: error: the table needs rich: pip install 'tiercache[cli]'; or use --json, which goes without\n"
    )
    assert commands.replay("example", "--json") == 0
    assert json.loads(commands.out)["requests"] == 10
    assert commands.err == ""


def test_errors_of_the_library_are_one_line(commands: Commands) -> None:
    assert commands.replay("example", result=ConfigError("policy", "x", "one of\n lru")) == 2
    assert commands.err.splitlines()[-1] == "tiercache: error: policy = 'x': one of lru"
    assert commands.out == ""
    assert commands.replay("example", "--json", result=FileNotFoundError(2, "No such file", "gone")) == 2
    assert commands.err.splitlines()[-1] == "tiercache: error: gone: No such file"
    assert commands.out == ""


def test_an_interrupt_is_130(commands: Commands) -> None:
    assert commands.replay("example", result=KeyboardInterrupt()) == 130
    assert commands.err.splitlines()[-1] == "tiercache: interrupted"


def test_a_bug_is_not_hidden(commands: Commands) -> None:
    with pytest.raises(ZeroDivisionError):
        commands.replay("example", result=ZeroDivisionError())


def test_demo_is_a_replay_with_a_kill(commands: Commands) -> None:
    assert commands.demo("--dir", "/mnt/x") == 0
    assert commands.options == ReplayOptions(
        trace="example", dram=1 << 30, nvme_path=Path("/mnt/x"), nvme=5 << 30, kill_at=0.5
    )
    assert "all is well" in commands.out
    assert commands.demo("--json", "--requests", "20") == 0
    assert json.loads(commands.out)["after_kill"]["requests"] == 6
    assert commands.options.requests == 20
    assert commands.options.nvme_path is not None
    assert commands.demo(result=dataclasses.replace(KILLED, wrong_bytes=1)) == 1
    assert commands.demo(result=dataclasses.replace(KILLED, recovered_blocks=0)) == 1


def test_demo_says_what_is_not_free(commands: Commands) -> None:
    assert commands.demo(memory=1 << 30) == 2
    assert commands.err == "tiercache: error: the demo needs 1.5GiB of memory; 1GiB is free\n"
    assert commands.demo("--dir", "/mnt/x", disk=5 << 30) == 2
    assert commands.err == (
        "tiercache: error: the demo needs 6GiB of disk; 5GiB is free in /mnt/x: name another directory with --dir\n"
    )
    assert commands.options is None
    assert commands.out == ""


class FakeCheck:
    def __init__(self, clean: bool) -> None:
        self.clean = clean
        self.called_with: Any = None

    def to_dict(self) -> dict[str, Any]:
        return {"clean": self.clean}

    def __str__(self) -> str:
        return f"clean: {self.clean}"


@pytest.mark.parametrize(("clean", "status"), [(True, 0), (False, 1)])
def test_check(commands: Commands, clean: bool, status: int) -> None:
    report = FakeCheck(clean)
    assert commands.check("/mnt/kv", result=report) == status
    assert commands.out == f"clean: {clean}\n"
    assert report.called_with == (Path("/mnt/kv"), False, False)
    assert commands.check("/mnt/kv", "--fix", "--scrub", "--json", result=report) == status
    assert json.loads(commands.out) == {"clean": clean}
    assert report.called_with == (Path("/mnt/kv"), True, True)


def test_check_of_a_directory_in_use_is_2(commands: Commands) -> None:
    assert commands.check("/mnt/kv", result=DirectoryInUseError("/mnt/kv is in use")) == 2
    assert commands.out == ""
    assert commands.err.splitlines()[-1] == "tiercache: error: /mnt/kv is in use"


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["replay", "--help"], ["check", "--help"]])
def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "\n  tiercache " in out or "\n    tiercache " in out


@pytest.mark.parametrize("args", [[], ["bake"], ["replay"], ["replay", "example", "--dra", "1GiB"]])
def test_usage_errors_are_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: tiercache")


def run_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=30)


def test_version_in_a_process_of_its_own() -> None:
    done = run_process("import sys; from tiercache.cli import main; sys.exit(main(['--version']))")
    assert done.returncode == 0
    assert done.stdout.startswith("tiercache 0.")
    assert done.stderr == ""


def test_a_reader_that_has_gone_is_no_noise() -> None:
    code = """
import os, sys
from types import ModuleType
from tiercache import cli
scrub = sys.modules["tiercache.scrub"] = ModuleType("scrub")
class Report:
    clean = True
    def __str__(self): return "x" * 100_000
scrub.check_directory = lambda path, **more: Report()
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
sys.exit(cli.main(["check", "/nowhere"]))
"""
    done = run_process(code)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
