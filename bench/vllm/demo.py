"""`vllm serve` with tiercache, stopped and started again, then killed and started again: is it warm, is it right?

`make demo-vllm`. Exit status 1: a start after the first was not warm, or an answer differed. 2: a server did not start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.vllm.kit import Server, VllmError, connector, tell
from bench.vllm.model import DEMO, write_model

BLOCK_TOKENS = 32
ANSWER_TOKENS = 24
IDLE_S = 6.0
"""Before the kill. What was computed is written to the disk 2 s after it was stored."""
STOP_S = 60.0
WARM = 0.9
"""Share of a prompt's full blocks that makes a start warm."""


@dataclass
class Row:
    """One chat."""

    server: int
    chat: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    equal: bool | None
    """To the first answer to this chat; None: this is the first."""

    @property
    def warm(self) -> bool:
        """Came nearly all of it out of the cache?"""
        return self.cached_tokens >= WARM * (self.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


@dataclass(frozen=True)
class Answer:
    """What a client saw."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


def chat_of(name: str) -> list[dict[str, str]]:
    """About 1,400 tokens, which are bytes; chats of different names share less than a block."""
    rules = " ".join(f"Rule {name}{i}: answer question {i * i % 97} before question {i * 7 % 89}." for i in range(28))
    return [
        {"role": "system", "content": f"{name * 8}. {rules}"},
        {"role": "user", "content": "Which rule comes first?"},
    ]


def ask(server: Server, messages: Sequence[Any]) -> Answer:
    """One chat through the OpenAI client, streamed."""
    from openai import OpenAI

    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        began, first = time.perf_counter(), 0.0
        text, token_ids, usage = [], [], None
        for chunk in client.chat.completions.create(
            model="tiny",
            messages=list(messages),
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                first = first or time.perf_counter() - began
                text.append(choice.delta.content or "")
                token_ids += getattr(choice, "token_ids", None) or []
    if usage is None:
        raise VllmError("the stream told no usage")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details is not None else 0) or 0
    return Answer("".join(text), tuple(token_ids), usage.prompt_tokens, cached, first)


class Demo:
    """Servers one after the other over one cache directory."""

    def __init__(self, work: Path, quiet: bool) -> None:
        self._work, self._quiet = work, quiet
        self._model = work / "model"
        self._answers: dict[str, Answer] = {}
        self._servers = 0
        self.rows: list[Row] = []

    def run(self) -> None:
        """All of it; stops where a start was not warm."""
        self._tell("writing a random Llama (25 M parameters) and a tokenizer ...")
        write_model(self._model, DEMO)
        with self._serve() as server:
            self._chat(server, "A")
            self._stop(server)
        with self._serve() as server:
            self._chat(server, "A")
            if not self.rows[-1].warm:
                return
            self._chat(server, "B")
            self._tell(f"idle for {IDLE_S:.0f} s, then SIGKILL to all processes of the server ...")
            time.sleep(IDLE_S)
            server.kill()
        with self._serve() as server:
            self._chat(server, "A")
            self._chat(server, "B")
            self._stop(server)

    def failed(self) -> list[str]:
        """What went wrong."""
        wrong = [
            f"server {each.server}, chat {each.chat}: the answer differs" for each in self.rows if each.equal is False
        ]
        again = [each for each in self.rows if each.equal is not None]
        wrong += [f"server {each.server}, chat {each.chat}: not warm" for each in again if not each.warm]
        return wrong

    @contextmanager
    def _serve(self) -> Iterator[Server]:
        self._servers += 1
        config = connector("dram:128MiB", f"nvme:{self._work / 'kv'}:1GiB")
        if self._servers == 1:
            self._tell(f"vllm serve MODEL --shutdown-timeout 20 --kv-transfer-config '{json.dumps(config)}'")
        with tempfile.TemporaryDirectory(prefix="tc-") as sockets:  # not in `work`: a socket's path has 107 characters
            server = Server(
                self._model,
                self._work / f"server-{self._servers}.log",
                config,
                *("--max-model-len", "2048", "--enable-prefix-caching", "--shutdown-timeout", "20"),
                environment={"VLLM_RPC_BASE_PATH": sockets},
            )
            with self._waiting(f"starting server {self._servers}"):
                server.__enter__()
            try:
                ask(server, chat_of(f"warm up {self._servers}, "))  # the first prompt of a process is slow anyhow
                yield server
            finally:
                server.__exit__()

    def _chat(self, server: Server, name: str) -> None:
        answer = ask(server, chat_of(name))
        known = self._answers.setdefault(name, answer)
        equal = None if known is answer else (known.text, known.token_ids) == (answer.text, answer.token_ids)
        self.rows.append(
            Row(self._servers, name, answer.prompt_tokens, answer.cached_tokens, answer.first_token_s, equal)
        )

    def _stop(self, server: Server) -> None:
        seconds = server.terminate(STOP_S)
        self._tell(f"server {self._servers} ended {seconds:.1f} s after SIGTERM")

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        began, over = time.monotonic(), threading.Event()

        def tick() -> None:
            while not over.wait(5.0):
                self._tell(f"{what} ... {time.monotonic() - began:.0f} s")

        ticker = threading.Thread(target=tick, daemon=True)
        self._tell(f"{what} (up to a minute) ...")
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()
        self._tell(f"server {self._servers} is up after {time.monotonic() - began:.0f} s")

    def _tell(self, text: str) -> None:
        if not self._quiet:
            tell(f"[demo] {text}")


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'server':<34} {'chat':<5} {'cached / prompt tokens':>23} {'first token':>12}  answer"]
    names = {1: "1, empty cache", 2: "2, after SIGTERM and a start", 3: "3, after SIGKILL and a start"}
    said = 0
    for each in rows:
        name, said = (names[each.server] if each.server != said else ""), each.server
        tokens = f"{each.cached_tokens:,} / {each.prompt_tokens:,}"
        answer = {None: "the first", True: "equal", False: "DIFFERENT"}[each.equal]
        lines.append(f"{name:<34} {each.chat:<5} {tokens:>23} {each.first_token_s * 1000:>9.0f} ms  {answer}")
    return "\n".join(lines)


def explanation(rows: Sequence[Row]) -> str:
    """Two lines."""
    computed = statistics.median(each.first_token_s for each in rows if each.equal is None)
    loaded = statistics.median(each.first_token_s for each in rows if each.equal is not None)
    return (
        "cached tokens are the engine's own count (usage.prompt_tokens_details.cached_tokens): loaded from disk and "
        "verified; the rest was computed.\n"
        f"After a stop and after a kill the first token came {computed / loaded:.1f} times sooner (medians) than where "
        "the prompt was computed."
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for machines, to standard output; no progress")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work here, and leave logs and files")
    args = parser.parse_args()
    work = args.keep.absolute() if args.keep else Path(tempfile.mkdtemp(prefix="tc-demo-"))
    work.mkdir(parents=True, exist_ok=True)
    demo = Demo(work, quiet=args.json)
    try:
        demo.run()
        failed = demo.failed()
        if args.json:
            print(json.dumps({"rows": [asdict(each) | {"warm": each.warm} for each in demo.rows], "failed": failed}))
        else:
            print(f"\n{table(demo.rows)}\n")
            print("\n".join(failed) if failed else explanation(demo.rows))
        return 1 if failed else 0
    except VllmError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if not args.keep:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
