"""vLLM in processes of their own, driven from the tests; prompts; what is done to the files of a cache.

`Vllm` is one vLLM. Its process is forked from one that has imported vLLM already, which saves most of each start; it
leads a session of its own, so that all of its processes can be killed at once. Everything has a deadline: whoever is
late is killed, and the end of the log is shown.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vllm_model import BLOCK_NBYTES, BLOCK_TOKENS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
START_S, COMMAND_S, EXIT_S = 180.0, 60.0, 30.0
MAX_TOKENS = 16
POOL_BLOCKS = 256
"""Blocks of vLLM's own cache, unless a test wants another number."""


class VllmError(Exception):
    """What vLLM said: the traceback of its process. As the end of its log where the process is gone."""


@dataclass(frozen=True)
class Output:
    """Of one request: the greedy tokens, and how many tokens of the prompt had not to be computed."""

    tokens: tuple[int, ...]
    cached: int
    finish: str = "length"


def prompt(seed: int, n: int, shared: Sequence[int] = ()) -> list[int]:
    """n token ids, the first of them as given."""
    more = random.Random(f"tokens {seed}")
    return [*shared, *(more.randrange(4, 504) for _ in range(n - len(shared)))]


def blocks_in(tokens: Sequence[int]) -> int:
    """Full blocks of a prompt."""
    return len(tokens) // BLOCK_TOKENS


def connector(
    *tiers: str,
    seams: bool = False,
    write_after_s: float | None = None,
    multi: Sequence[dict[str, Any]] = (),
    **extra: Any,
) -> dict[str, Any]:
    """The kv_transfer_config that an operator would write. `write_after_s`: of the tier on a disk, where not its own
    choice. `multi`: further connectors under a MultiConnector."""
    config: dict[str, Any] = {"tiers": [_tier(each, write_after_s) for each in tiers], **extra}
    if seams:
        config["seams"] = "vllm_seams:controlled"
    ours = {
        "kv_connector": "TierCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "tiercache.integrations.vllm",
        "kv_connector_extra_config": config,
    }
    if not multi:
        return ours
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, *multi]},
    }


def _tier(text: str, write_after_s: float | None) -> str | dict[str, Any]:
    kind, *rest = text.split(":")
    if kind != "nvme" or write_after_s is None:
        return text
    path, size = rest
    return {"kind": "nvme", "path": path, "size": size, "write_after_s": write_after_s}


class Vllm:
    """One vLLM, in a process (`several`: with its core in another one, as `vllm serve` has it) of its own.

    A context manager: ended in order at the end, killed where that takes too long or the test failed. `environment` is
    for this vLLM alone; `seams` the folder that tells its faulty tiers what to do (see `vllm_seams`).
    """

    _numbers = itertools.count()

    def __init__(
        self,
        model: Path,
        logs: Path,
        kv_transfer_config: dict[str, Any] | None = None,
        *,
        several: bool = False,
        environment: dict[str, str] | None = None,
        seams: Path | None = None,
        start_s: float = START_S,
        **llm_args: Any,
    ) -> None:
        ranks = int(llm_args.get("tensor_parallel_size", 1))
        self.log = logs / f"vllm-{next(self._numbers)}.log"
        self.several = several
        self._start_s = start_s
        self._environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(several)),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **({"TIERCACHE_SEAMS": str(seams)} if seams is not None else {}),
            **({"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(i) for i in range(ranks))} if ranks > 1 else {}),
            **(environment or {}),
        }
        self._args = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "disable_log_stats": False,
            "seed": 0,
            "kv_transfer_config": kv_transfer_config,
            **llm_args,
        }
        self._process: Any = None
        self._pipe: Connection | None = None
        self.shared: set[Path] = set()
        """Its files in shared memory."""
        self.pid = 0
        self.started_s = 0.0

    def __enter__(self) -> Vllm:
        import vllm_child

        context = nursery()
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(self.log), self._environment, self._args)
        self._process = context.Process(target=vllm_child.serve, args=arguments)
        self._process.start()
        self.pid = self._process.pid
        theirs.close()
        try:
            self.started_s = self._reply(self._start_s, "starting")["ready"]
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is None:
            return
        if raised[0] is None and self._process.is_alive():
            self.exit()
        else:
            self.kill()

    # -- requests

    def generate(
        self,
        *prompts: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        salts: Sequence[str | None] | None = None,
        deadline_s: float = COMMAND_S,
    ) -> list[Output]:
        """Greedy output of each prompt; all of them in one batch."""
        each = self.ask(
            "generate",
            deadline_s,
            prompts=[list(tokens) for tokens in prompts],
            max_tokens=max_tokens,
            salts=list(salts) if salts is not None else [None] * len(prompts),
        )
        return [Output(tuple(one["tokens"]), one["cached"], one["finish"]) for one in each]

    def one_by_one(self, *prompts: Sequence[int], max_tokens: int = MAX_TOKENS) -> list[Output]:
        """Greedy output of each prompt; each alone."""
        return [self.generate(tokens, max_tokens=max_tokens)[0] for tokens in prompts]

    def settle(self, deadline_s: float = 20.0, quiet_s: float = 0.3) -> float:
        """Let what is under way come to its end (see `vllm_child.Served.settle`); the seconds that took."""
        return self.ask("settle", deadline_s + 5.0, deadline_s=deadline_s, quiet_s=quiet_s)

    def forget(self) -> None:
        """Settle, and empty vLLM's own prefix cache: what is cached from now on was loaded."""
        self.settle()
        assert self.ask("reset", reset_connector=False), "vLLM could not empty its prefix cache: blocks are in use"

    def look_inside(self) -> dict[str, Any]:
        """See `vllm_child.Served.look_inside`."""
        return self.ask("look_inside")

    def metric(self, name: str) -> float:
        """The value of one of vLLM's metrics, 0 where there is none of that name."""
        return float(self.ask("metrics").get(name, 0.0))

    @property
    def loaded_tokens(self) -> float:
        """Tokens that vLLM says came through a connector, since the start."""
        return self.metric("vllm:external_prefix_cache_hits")

    def ask(self, op: str, within_s: float = COMMAND_S, **arguments: Any) -> Any:
        """Send a command, wait for its reply. VllmError: what it raised, or that its process ended or was late."""
        assert self._pipe is not None
        try:
            self._pipe.send({"op": op, **arguments})
        except OSError as error:
            raise VllmError(f"its process is gone: {self._tail()}") from error
        return self._reply(within_s, op)["value"]

    def cpu_seconds(self) -> float:
        """Processor time of all of its processes so far."""
        ticks = 0
        for pid in processes_of(self.pid):
            with contextlib.suppress(OSError, ValueError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    # -- ends

    def exit(self) -> None:
        """End it as a program that used vLLM would."""
        self.shared |= shared_by(self.pid)
        self.ask("exit", EXIT_S)
        self._process.join(EXIT_S)
        ended = self._process.exitcode
        self.kill()
        assert ended == 0, f"vLLM ended with {ended}: {self._tail()}"

    def kill(self) -> None:
        """SIGKILL to all of its processes at once; they are gone when this returns."""
        self.shared |= shared_by(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(EXIT_S)
        wait_gone(self.pid, EXIT_S)
        if self._pipe is not None:
            self._pipe.close()
        for path in self.shared:
            path.unlink(missing_ok=True)

    def _reply(self, deadline_s: float, doing: str) -> dict[str, Any]:
        assert self._pipe is not None
        ready = wait([self._pipe, self._process.sentinel], deadline_s)
        if self._pipe in ready or self._pipe.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                reply: dict[str, Any] = self._pipe.recv()
                if "error" in reply:
                    raise VllmError(f"{doing}: {reply['error']}\n{self._tail()}")
                return reply
        if not ready:
            where = _stacks(self.pid)
            self.kill()
            raise VllmError(f"{doing}: no answer within {deadline_s} s{where}: {self._tail()}")
        raise VllmError(f"{doing}: its process ended: {self._tail()}")

    def _tail(self, n: int = 40) -> str:
        """Without what vLLM says at each start."""
        try:
            lines = [each for each in self.log.read_text(errors="replace").splitlines() if not _usual(each)]
        except OSError:
            return "(no log)"
        return f"the end of {self.log}:\n" + "\n".join(lines[-n:])

    def said(self, text: str) -> bool:
        """Whether this text is in its log."""
        return text in self.log.read_text(errors="replace")


def _usual(line: str) -> bool:
    """What vLLM says at every start on a CPU."""
    usual = (
        " INFO ",
        "[base.py:",
        "[cpu_worker.py:",
        "[vllm.py:",
        "[cpu.py:",
        "safetensors checkpoint shards",
        "NUMA binding",
    )
    return not line.strip() or any(text in line for text in usual)


def nursery() -> Any:
    """Where processes are forked that have imported vLLM already."""
    context = multiprocessing.get_context("forkserver")
    os.environ["TIERCACHE_VLLM_NURSERY"] = "1"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(HERE), str(ROOT), *filter(None, paths)]))
    context.set_forkserver_preload(["vllm_child"])
    return context


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def wait_gone(session: int, deadline_s: float) -> None:
    """Kill all processes of a session, and wait until they are gone."""
    until = time.monotonic() + deadline_s
    while left := processes_of(session):
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if time.monotonic() > until:
            raise VllmError(f"processes {left} outlive SIGKILL")
        time.sleep(0.02)


def _stacks(pid: int) -> str:
    """In which kernel function each process waits: says little, but says who is idle and who is busy."""
    found = []
    for each in processes_of(pid):
        with contextlib.suppress(OSError):
            found.append(f"{each}: {Path(f'/proc/{each}/wchan').read_text() or 'running'}")
    return f" ({', '.join(found)})"


def shared_by(session: int) -> set[Path]:
    """Files in shared memory that the processes of a session have mapped; vLLM leaves them where it is killed."""
    found = set()
    for pid in processes_of(session):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, path = line.partition("/dev/shm/")
                if path and not path.endswith(" (deleted)"):
                    found.add(Path("/dev/shm") / path)
    return found


# -- the files of a cache


def slot_files(path: Path) -> list[Path]:
    """The payload files below a cache directory, of every rank."""
    return sorted(path.rglob("slots-*.dat"))


def stored_blocks(path: Path, nbytes: int = BLOCK_NBYTES) -> int:
    """Blocks (of so many bytes) in the payload files that are not all zeros."""
    return sum(len(_stored(file.read_bytes(), nbytes)) for file in slot_files(path))


def _stored(data: bytes | bytearray, nbytes: int) -> list[int]:
    """Where those begin."""
    return [begin for begin in range(0, len(data), nbytes) if any(data[begin : begin + nbytes])]


def overwrite(path: Path, byte: int = 0x5A) -> int:
    """Overwrite all that is stored in the payload files; how many blocks that were."""
    damaged = stored_blocks(path)
    for file in slot_files(path):
        _write_over(file, bytes([byte]) * file.stat().st_size)
    return damaged


def flip_one_bit_per_block(path: Path, nbytes: int = BLOCK_NBYTES) -> int:
    """Invert one bit in every block (of so many bytes) that is stored; how many those were."""
    where, damaged = random.Random(0), 0
    for file in slot_files(path):
        data = bytearray(file.read_bytes())
        for begin in _stored(data, nbytes):
            data[begin + where.randrange(nbytes)] ^= 1 << where.randrange(8)
            damaged += 1
        _write_over(file, bytes(data))
    return damaged


def truncate(path: Path, keep: float = 0.0) -> None:
    """Cut every payload file to this share of its length."""
    for file in slot_files(path):
        os.truncate(file, int(file.stat().st_size * keep))


def _write_over(file: Path, data: bytes) -> None:
    with file.open("r+b") as out:
        out.write(data)
        os.fsync(out.fileno())


def nothing_left(vllm: Vllm, free_blocks: int | None = None) -> None:
    """What must hold of a vLLM with its core in the same process once it has settled."""
    vllm.settle()
    inside = vllm.look_inside()
    assert inside["held"] == [], "requests that vLLM still holds"
    if free_blocks is not None:
        assert inside["free_blocks"] == free_blocks, "blocks that vLLM does not get back"
    if inside["ready"]:
        assert inside["check"] == [], "the planner's own check"
