"""vLLM's own tiering (DRAM over its file system tier) on a platform without a GPU.

Everything is vLLM's but the worker between engine and DRAM, which has CUDA streams there and index copies here, inside
the step. Named by `spec_name` and `spec_module_path` of an OffloadingConnector.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CopyWorker", "HostTieringSpec"]


class CopyWorker(OffloadingWorker):
    """Copies blocks between the engine's memory and the DRAM tier's."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._engine = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._host = [region.create_next_worker_view(each.shape[1]) for each in self._engine]
        self._region = region
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Engine to DRAM."""
        return self._copy(job_id, self._engine, src_spec.block_ids, self._host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """DRAM to engine."""
        return self._copy(job_id, self._host, src_spec.block_ids, self._engine, dst_spec.block_ids)

    def _copy(self, job_id: int, sources: list[Any], from_ids: Any, targets: list[Any], to_ids: Any) -> bool:
        began, nbytes = time.perf_counter(), 0
        from_rows, to_rows = (torch.as_tensor(each, dtype=torch.int64) for each in (from_ids, to_ids))
        for source, target in zip(sources, targets, strict=True):
            target.index_copy_(0, to_rows, source.index_select(0, from_rows))
            nbytes += len(from_rows) * source.shape[1]
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Give the DRAM back."""
        self._host = []
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    """See the module."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyWorker(kv_caches, region)
