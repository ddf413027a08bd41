"""Real vLLM, on CPUs. Where it is not installed these tests skip; `make test-vllm` installs it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import MAX_TOKENS, Output, Vllm
from vllm_model import write_model

HERE = Path(__file__).parent


def _vllm_is_here() -> bool:
    """Without it the name is found all the same: it is that of this folder, which is no package."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents and item.get_closest_marker("vllm")]
    missing = not _vllm_is_here()
    for item in ours:
        item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and what it imports warn of much
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of all tests but those that change its weights."""
    return write_model(tmp_path_factory.mktemp("model"))


class Reference:
    """What vLLM alone answers, computed once per prompt; a tensor-parallel one adds up in another order, so each size
    has its own."""

    def __init__(self, model: Path, logs: Path, stack: contextlib.ExitStack) -> None:
        self._model, self._logs, self._stack = model, logs, stack
        self._alone: Vllm | None = None
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[int, ...]] = {}

    def __call__(self, *prompts: Sequence[int], max_tokens: int = MAX_TOKENS, ranks: int = 1) -> list[tuple[int, ...]]:
        """The greedy tokens of each prompt."""
        keys = [(ranks, max_tokens, tuple(tokens)) for tokens in prompts]
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            with self._vllm(ranks) as vllm:
                outputs = vllm.one_by_one(*(key[2] for key in missing), max_tokens=max_tokens)
            self._known |= {key: output.tokens for key, output in zip(missing, outputs, strict=True)}
        return [self._known[key] for key in keys]

    def steady(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> list[Sequence[int]]:
        """n of these prompts whose tokens are the same alone and in batches. bfloat16 adds up in another order there,
        which decides where two tokens are nearly equally likely. To be used where many tokens are compared."""
        alone = self(*prompts, max_tokens=max_tokens)
        kept = list(range(len(prompts)))
        with self._vllm(1) as vllm:
            for size in (2, 3, len(prompts)):
                for begin in range(0, len(prompts), size):
                    batch = range(begin, min(begin + size, len(prompts)))
                    outputs = vllm.generate(*(prompts[i] for i in batch), max_tokens=max_tokens)
                    kept = [i for i in kept if i not in batch or outputs[i - begin].tokens == alone[i]]
        assert len(kept) >= n, f"only {len(kept)} of {len(prompts)} prompts are steady"
        return [prompts[i] for i in kept[:n]]

    @contextlib.contextmanager
    def _vllm(self, ranks: int) -> Iterator[Vllm]:
        if ranks > 1:
            with Vllm(self._model, self._logs, enable_prefix_caching=False, tensor_parallel_size=ranks) as vllm:
                yield vllm
            return
        if self._alone is None:
            self._alone = self._stack.enter_context(Vllm(self._model, self._logs, enable_prefix_caching=False))
        yield self._alone


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Greedy tokens of vLLM without any cache."""
    with contextlib.ExitStack() as stack:
        yield Reference(model, tmp_path_factory.mktemp("reference"), stack)


class Launch:
    """Starts vLLM with our connector; checks at the end of each that nothing is left inside."""

    def __init__(self, model: Path, tmp: Path) -> None:
        self.model, self._tmp = model, tmp

    def __call__(self, kv_transfer_config: dict[str, Any] | None, **arguments: Any) -> Vllm:
        return Vllm(arguments.pop("model", self.model), self._tmp, kv_transfer_config, **arguments)


@pytest.fixture
def launch(model: Path, tmp_path: Path) -> Launch:
    """Start a vLLM whose log lies in the folder of the test."""
    return Launch(model, tmp_path)


def tokens_of(outputs: Sequence[Output]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]
