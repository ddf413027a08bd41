"""The process that one vLLM lives in: builds an `LLM`, then answers commands that come through a pipe.

Forked from a process that has imported vLLM already (see `vllm_kit`); so this module imports it, and nothing that
starts a thread.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every vLLM runs on the first core
    "OMP_NUM_THREADS": "1",
}
"""What every vLLM of the tests runs under; set before vLLM is imported."""

if os.environ.get("TIERCACHE_VLLM_NURSERY") == "1":
    os.environ.update(ENVIRONMENT)
    import vllm
    import vllm.v1.engine.llm_engine  # noqa: F401

IDLE_STEP_S = 0.002


def serve(pipe: Connection, log: str, environment: dict[str, str], llm_args: dict[str, Any]) -> None:
    """Entry point of the child: {"ready": seconds} or {"error": text} first, then one reply per command."""
    os.setsid()  # so that the test can end all of its processes at once
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    os.environ.update(ENVIRONMENT | environment)
    for path in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    began = time.monotonic()
    try:
        served = Served(llm_args)
    except BaseException:  # noqa: BLE001 - told to the test
        pipe.send({"error": traceback.format_exc()})
        os._exit(3)
    pipe.send({"ready": time.monotonic() - began})
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            os._exit(4)
        if command["op"] == "exit":
            served.shut_down()
            pipe.send({"value": None})
            break
        try:
            pipe.send({"value": getattr(served, command.pop("op"))(**command)})
        except Exception:  # noqa: BLE001 - told to the test
            pipe.send({"error": traceback.format_exc()})
    pipe.close()
    sys.exit(0)


class Served:
    """Each public method is a command."""

    def __init__(self, llm_args: dict[str, Any]) -> None:
        from vllm import LLM

        args = dict(llm_args)
        if args.get("kv_transfer_config") is not None:
            from vllm.config import KVTransferConfig

            args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"])
        self._llm = LLM(**args)

    # -- requests

    def generate(self, prompts: list[list[int]], max_tokens: int, salts: list[str | None]) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt (all in one batch), and how many of its tokens were not computed."""
        asked = [self._prompt(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
        return [
            {
                "tokens": list(each.outputs[0].token_ids),
                "cached": each.num_cached_tokens,
                "finish": each.outputs[0].finish_reason,
            }
            for each in self._llm.generate(asked, self._greedy(max_tokens), use_tqdm=False)
        ]

    def abort_midway(self, prompt: list[int], steps: int, max_tokens: int) -> dict[str, Any]:
        """Add a request, make `steps` steps, abort it, and step until the scheduler holds no request any more."""
        llm, scheduler = self._llm.llm_engine, self._scheduler()
        request = llm.add_request("midway", self._prompt(prompt, None), self._greedy(max_tokens))
        for _ in range(steps):
            llm.step()
        before = [each.status.name for each in scheduler.requests.values()]
        llm.abort_request([request or "midway"], internal=bool(request))
        drained_s = self.settle(20.0)
        return {"before": before, "held": list(scheduler.requests), "drained_s": drained_s}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> str:
        """Add a request and return at once; `step` moves it on. Its id inside."""
        return self._llm.llm_engine.add_request(name, self._prompt(prompt, None), self._greedy(max_tokens)) or name

    def abort(self, request: str) -> None:
        """Abort by the id that `add` returned."""
        self._llm.llm_engine.abort_request([request], internal=True)

    def step(self, times: int) -> list[dict[str, Any]]:
        """Make so many steps; what finished meanwhile."""
        done = []
        for _ in range(times):
            done += [
                {"id": each.request_id, "tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens}
                for each in self._llm.llm_engine.step()
                if each.finished
            ]
        return done

    def finish(self, deadline_s: float) -> list[dict[str, Any]]:
        """Step until every request that was added has ended; they, with the seconds until each ended."""
        began, done = time.monotonic(), []
        while self._llm.llm_engine.has_unfinished_requests():
            done += [{**each, "seconds": time.monotonic() - began} for each in self.step(1)]
            if time.monotonic() - began > deadline_s:
                raise TimeoutError(f"unfinished after {deadline_s} s; done: {done}")
        return done

    # -- time

    def settle(self, deadline_s: float, quiet_s: float = 0.3) -> float:
        """Step, as a serving loop does, until for `quiet_s` nothing was left to do; the seconds that took.

        In the same process only; the loop of a core in its own process does that by itself, and this only sleeps.
        """
        began = quiet_since = time.monotonic()
        if not self._inside():
            time.sleep(quiet_s)
            return quiet_s
        scheduler = self._scheduler()
        while time.monotonic() - quiet_since < quiet_s:
            if scheduler.has_requests():
                quiet_since = time.monotonic()
                self._core().step_fn()
            if time.monotonic() - began > deadline_s:
                raise TimeoutError(f"the scheduler still has work after {deadline_s} s: {list(scheduler.requests)}")
            time.sleep(IDLE_STEP_S)
        return time.monotonic() - began

    def sleep(self, seconds: float) -> None:
        """No steps at all for so long."""
        time.sleep(seconds)

    # -- state

    def reset(self, reset_connector: bool) -> bool:
        """Empty vLLM's own prefix cache; and the connector's, where asked. False: blocks were in use."""
        return bool(self._llm.reset_prefix_cache(reset_connector=reset_connector))

    def metrics(self) -> dict[str, float]:
        """Every counter and gauge of vLLM, summed over its labels; by name and label where there are sources."""
        found: Counter[str] = Counter()
        for each in self._llm.get_metrics():
            value = getattr(each, "value", None)
            if value is None:
                continue
            found[each.name] += value
            for label in ("source", "tier", "medium", "type"):
                if label in each.labels:
                    found[f"{each.name}[{each.labels[label]}]"] += value
        return dict(found)

    def look_inside(self) -> dict[str, Any]:
        """Of a core in this process: free blocks, requests held, and of our connector `check()` and counters."""
        scheduler = self._scheduler()
        side = self._scheduler_side()
        planner = getattr(side, "planner", None)
        return {
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "held": list(scheduler.requests),
            "running": len(scheduler.running),
            "ready": side is not None,
            "check": None if planner is None else [str(each) for each in planner.check()],
            "counters": _plain(getattr(side, "counters", None)),
        }

    def run(self, code: str) -> Any:
        """Run code with `llm`, `scheduler` and `side` (our connector's) at hand; what it sets `result` to."""
        names: dict[str, Any] = {"llm": self._llm, "result": None}
        if self._inside():
            names |= {"scheduler": self._scheduler(), "side": self._scheduler_side()}
        exec(code, names)
        return names["result"]

    def shut_down(self) -> None:
        """As vLLM ends: workers first, then the connector."""
        self._llm.llm_engine.engine_core.shutdown()

    # -- inside

    def _inside(self) -> bool:
        return hasattr(self._llm.llm_engine.engine_core, "engine_core")

    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    def _scheduler(self) -> Any:
        return self._core().scheduler

    def _scheduler_side(self) -> Any:
        connector = self._scheduler().connector
        every = [connector, *getattr(connector, "_connectors", [])]
        return next((each.scheduler_side for each in every if hasattr(each, "scheduler_side")), None)

    @staticmethod
    def _prompt(tokens: list[int], salt: str | None) -> dict[str, Any]:
        return {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt is not None else {})

    @staticmethod
    def _greedy(max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)


def _plain(counters: Any) -> dict[str, float]:
    return {} if counters is None else dataclasses.asdict(counters)
