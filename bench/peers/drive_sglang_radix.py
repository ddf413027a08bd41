"""SGLang's radix tree, driven by the benchmark: drive_sglang_radix.py rust|python

A lookup is `match_prefix` and the gathering of the matched slots, since that is what a match is for. The slots are one
int64 a token, as SGLang keeps them.
"""

from __future__ import annotations

import sys
import warnings
from array import array
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from protocol import serve
from standins import sglang_without_gpu
from workload import BLOCK_TOKENS, Tokens, branches, others, prompt, timed

warnings.simplefilter("ignore")
STANDINS = sglang_without_gpu()

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


def key_of(tokens: Tokens) -> RadixKey:
    """The tokens as SGLang hands them to its tree: a fresh array of int64."""
    return RadixKey(array("q", tokens.astype(np.int64).tobytes()))


class PythonTree:
    """RadixCache, as one makes it without memory pools."""

    def __init__(self) -> None:
        self.tree = RadixCache.create_simulated(page_size=BLOCK_TOKENS)

    def insert(self, key: RadixKey, slots: torch.Tensor) -> None:
        """Put a prompt in."""
        self.tree.insert(InsertParams(key=key, value=slots))

    def match(self, key: RadixKey) -> torch.Tensor:
        """Slots of the longest prefix held."""
        return self.tree.path_device_indices(self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node)


class RustTree:
    """The Rust tree core behind SGLang's adapter."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.tree = RustUnifiedTreeCore(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                page_size=BLOCK_TOKENS,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.root = self.tree.root_node_handle(None)

    def insert(self, key: RadixKey, slots: torch.Tensor) -> None:
        """Put a prompt in."""
        step = self.tree.begin_insert(InsertParams(key=key, value=slots))
        while step.result is None:
            step = self.tree.resume_insert()
        self.tree.end_insert()

    def match(self, key: RadixKey) -> torch.Tensor:
        """Slots of the longest prefix held."""
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        return self.tree.collect_full_device_indices(found.last_device_node, self.root)


class Driver:
    """One tree at a time."""

    def __init__(self, kind: str) -> None:
        torch.set_num_threads(1)
        self.make = RustTree if kind == "rust" else PythonTree
        self.tree: Any = self.make()
        self.seed = 0

    def hello(self) -> dict[str, Any]:
        """Versions."""
        versions = {"sglang": version("sglang"), "torch": torch.__version__, "numpy": np.__version__}
        return {"versions": versions, "standins": STANDINS}

    def lookup_setup(self, blocks: int, nodes: int, other: int) -> dict[str, Any]:
        """A prompt of `blocks` blocks on a path of `nodes` nodes, beside `other` unrelated prompts."""
        self.tree = self.make()
        self.tokens = prompt(nodes, blocks)
        for tokens in [self.tokens, *branches(self.tokens, nodes), *others(other)]:
            self.tree.insert(key_of(tokens), torch.arange(len(tokens)))
        return {"blocks": len(self.tree.match(key_of(self.tokens))) // BLOCK_TOKENS}

    def lookup(self, hit: bool) -> dict[str, Any]:
        """One lookup, with a fresh key."""
        self.seed += 1
        key = key_of(self.tokens if hit else prompt(5_000_000 + self.seed, len(self.tokens) // BLOCK_TOKENS))
        seconds, slots = timed(lambda: self.tree.match(key))
        return {"s": seconds, "blocks": len(slots) // BLOCK_TOKENS}


if __name__ == "__main__":
    serve(lambda: Driver(sys.argv[1]))
