"""`TierCacheConnector`: tiercache as a KV connector of vLLM. Thin: each hook hands over to one of the two halves.

`--kv-transfer-config '{"kv_connector": "TierCacheConnector", "kv_connector_module_path": "tiercache.integrations.vllm",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"tiers": ["dram:64GiB"]}}'`
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tiercache.integrations.vllm_config import read_settings
from tiercache.integrations.vllm_events import BlockEvents
from tiercache.integrations.vllm_identity import engine_identity, layer_specs, rank_parts, vllm_ranks
from tiercache.integrations.vllm_messages import SYMBOL_NBYTES, Hello, StepOrders, StepReport
from tiercache.integrations.vllm_metrics import (
    TierCachePromMetrics,
    TierCacheStats,
    hit_sources,
    kv_events,
    publishes_events,
    stats_of,
)
from tiercache.integrations.vllm_plugin import register
from tiercache.integrations.vllm_rows import pages_of
from tiercache.integrations.vllm_scheduler import SchedulerSide
from tiercache.integrations.vllm_support import check_supported
from tiercache.integrations.vllm_worker import Finished, WorkerSide

__all__ = ["TierCacheConnector"]

_log = logging.getLogger("tiercache.vllm")


def _share_the_log() -> None:
    """What tiercache says appears where vLLM's own words do, unless somebody has set that up already."""
    ours, theirs = logging.getLogger("tiercache"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers and ours.level == logging.NOTSET:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)


class TierCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """One per role: the scheduler's, and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError where the configuration is wrong, or the engine is one that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        _share_the_log()
        self._engine = read_settings(vllm_config)
        warnings = check_supported(vllm_config, kv_cache_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._block_pool: Any = None
        self._finished = Finished()
        self._identity = engine_identity(vllm_config, kv_cache_config, named=self._engine.named)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler_side = SchedulerSide(self._engine, self._identity.digest)
            if publishes_events(vllm_config):
                self.scheduler_side.events = BlockEvents(SYMBOL_NBYTES, self.scheduler_side.block_tokens)
            for warning in warnings:
                _log.warning(warning)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, nothing more."""
        return False

    # -- a worker's -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV memory is there: open tiers and files."""
        config = self._kv_cache_config
        ranks = vllm_ranks()
        page_nbytes = {name: spec.page_size_bytes for name, spec in layer_specs(config).items()}
        pages = pages_of(kv_caches, config.num_blocks, page_nbytes)
        parts = rank_parts(self._vllm_config, config, ranks=ranks, kv_caches=kv_caches)
        namespace = self._identity.namespace(parts)
        rank = int(self._vllm_config.parallel_config.rank)
        self.worker_side = WorkerSide(self._engine, rank, pages, self._identity.parts, self._identity.digest, namespace)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank found in its files."""
        return _HelloMetadata(self.worker_side.hello()) if self.worker_side is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's copies, and end those out of blocks that the step overwrites."""
        if self.worker_side is not None and isinstance(kv_connector_metadata, _OrdersMetadata):
            self.worker_side.take(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As `handle_preemptions`, which came before in the same step, or did not."""
        if self.has_connector_metadata():
            self.handle_preemptions(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step depends on a load that is under way."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored, once their step is over."""

    def wait_for_save(self) -> None:
        """Nothing: see `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over on this rank, each told once."""
        if self.worker_side is None:
            return None, None
        self._finished = self.worker_side.finished()
        return None, self._finished.requests or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the requests that `get_finished` just told, into which nothing valid was loaded."""
        invalid, self._finished = self._finished.invalid, Finished()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's half must hear of this step."""
        report = self.worker_side.report() if self.worker_side is not None else None
        return None if report is None else _ReportMetadata(report)

    def shutdown(self) -> None:
        """Finish what is queued, within the time that vLLM gives."""
        if self.worker_side is not None:
            self.worker_side.shutdown()

    # -- the scheduler's --------------------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None, "this is a worker's connector"
        return self.scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Only looked at when the cache is reset."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Ranks introduce themselves. (Another connector's may come instead: then the first step asks for it.)"""
        for each in metadata.values():
            if isinstance(each, _HelloMetadata):
                self._scheduler.take_hello(each.hello)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As `set_xfer_handshake_metadata`."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def on_new_request(self, request: Any) -> None:
        """Follow it."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded; always asynchronously. None: ask again, a remote tier has not answered yet."""
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the ranks have to do in this step."""
        return _OrdersMetadata(self._scheduler.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks reported."""
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.take_report(
            meta.report if isinstance(meta, _ReportMetadata) else None,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Store what is left; the blocks are never held."""
        self._scheduler.finish(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """While stores copy."""
        return self._scheduler.has_work()

    def reset_cache(self) -> bool:
        """Nothing stored so far is ever found again."""
        cached = getattr(self._block_pool, "cached_block_hash_to_block", None)
        self._scheduler.reset(engine_cache_is_empty=cached is not None and len(cached) == 0)
        return True

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """From which tiers the tokens come that were just promised."""
        planner = self._scheduler.planner
        by_level = self._scheduler.hit_sources(request, num_external_tokens)
        return hit_sources(by_level, planner.levels) if planner is not None else {}

    def take_events(self) -> Iterable[Any]:
        """KV events, where the engine publishes any."""
        events, planner = self._scheduler.events, self._scheduler.planner
        if events is None or planner is None:
            return ()
        return kv_events(events.take(), planner.levels, self._scheduler.block_tokens)

    # -- both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TierCacheStats | None:
        """What this half counted since it was last asked."""
        half = self.scheduler_side or self.worker_side
        return None if half is None else stats_of(half.counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierCacheStats | None:
        """From what another process sent."""
        return TierCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierCachePromMetrics:
        """Our metrics; their names begin with `vllm:tiercache_`."""
        return TierCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _HelloMetadata(KVConnectorHandshakeMetadata):
    def __init__(self, hello: Hello) -> None:
        self.hello = hello


class _OrdersMetadata(KVConnectorMetadata):
    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class _ReportMetadata(KVConnectorWorkerMetadata):
    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _ReportMetadata)
        self.report.aggregate(other.report)
        return self


register()  # vLLM's MultiConnector looks its parts' statistics up by their names, also where we came by our path
