"""What is measured inside the process of a vLLM, where its core is in the same one."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from bench.vllm.model import FIRST_BYTE

__all__ = ["first_token", "hook_shares", "prompt_of"]


def prompt_of(name: str, tokens: int) -> list[int]:
    """Random bytes as token ids; another for each name."""
    draw = random.Random(name)
    return [FIRST_BYTE + draw.randrange(256) for _ in range(tokens)]


def _greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)


def first_token(llm: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """One request from its arrival to its first token, alone in the engine. `cached`: tokens that were not computed.
    `cpu_s`: processor seconds of all threads until then."""
    engine = llm.llm_engine
    cpu, began, first, cpu_s = time.process_time(), time.perf_counter(), 0.0, 0.0
    engine.add_request(f"bench-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, _greedy(max_tokens))
    while True:
        for each in engine.step():
            first, cpu_s = first or time.perf_counter() - began, cpu_s or time.process_time() - cpu
            if each.finished:
                tokens = list(each.outputs[0].token_ids)
                return {"first_s": first, "cpu_s": cpu_s, "tokens": tokens, "cached": each.num_cached_tokens or 0}


def hook_shares(llm: Any, requests: int, prompt_tokens: int, max_tokens: int, seed: str) -> dict[str, Any]:
    """Time inside the hooks of a TimedConnector, of steps that compute prompts (none is cached) and of those that only
    decode `requests` requests. Seconds, and shares of the time of those steps."""
    from bench.vllm.timed import SPENT

    engine = llm.llm_engine
    SPENT.clear()
    began = time.perf_counter()
    for i in range(requests):
        prompt = {"prompt_token_ids": prompt_of(f"{seed} {i}", prompt_tokens)}
        engine.add_request(f"hooks-{seed}-{i}", prompt, _greedy(max_tokens))
    adding, adding_hooks = time.perf_counter() - began, sum(SPENT.values())
    steps: list[tuple[float, float]] = []
    prefills = 0
    seen: set[str] = set()
    while engine.has_unfinished_requests():
        hooks, began = sum(SPENT.values()), time.perf_counter()
        outputs = engine.step()
        steps.append((time.perf_counter() - began, sum(SPENT.values()) - hooks))
        if len(seen) < requests:
            prefills, seen = len(steps), seen | {each.request_id for each in outputs}
    prefill, decode = steps[:prefills], steps[prefills:]
    prefill.append((adding, adding_hooks))
    return {
        "hooks_s": dict(SPENT),
        **{
            name: {
                "steps": len(part),
                "step_s": statistics.median(each[0] for each in part),
                "hooks_s": statistics.median(each[1] for each in part),
                "longest_hooks_s": max(each[1] for each in part),
                "share": sum(each[1] for each in part) / sum(each[0] for each in part),
            }
            for name, part in (("prefill", prefill), ("decode", decode))
        },
    }
