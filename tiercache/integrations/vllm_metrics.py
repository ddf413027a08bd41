"""vLLM's side of what `vllm_counts` and `vllm_events` collect: its stats, its Prometheus metrics, its KV events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tiercache.config_remote import REMOTE_NAME
from tiercache.integrations.vllm_counts import METRICS, PREFIX, TTFT_S, Metric, Payload, add_up, split_key, summary
from tiercache.integrations.vllm_events import BlockChange
from tiercache.types import LevelSpec

__all__ = ["TierCachePromMetrics", "TierCacheStats", "hit_sources", "kv_events", "publishes_events", "stats_of"]

MEDIUM_MEMORY, MEDIUM_DISK = "CPU", "STORAGE"
"""As vLLM's own offloading names them."""


class TierCacheStats(KVConnectorStats):
    """A `vllm_counts.Payload` in `data`: only dicts, lists, texts and numbers, so it survives any process boundary."""

    def reset(self) -> None:
        """Forget all of it."""
        self.data: Payload = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another side, or a later step, says."""
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Nothing to say?"""
        return not any(self.data.values())


def stats_of(payload: Payload | None) -> TierCacheStats | None:
    """As vLLM takes it; None: nothing to say."""
    return None if payload is None else TierCacheStats(data=payload)


class TierCachePromMetrics(KVConnectorPromMetrics):
    """The metrics of `vllm_counts.METRICS`, with the labels of vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {each.name: self._family(each) for each in METRICS}
        self._bound: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], dict[str, float]] = {}
        """Latest value by who says so."""
        for engine in per_engine_labelvalues:
            for metric in METRICS:
                if not metric.label:
                    self._of(engine, metric.name)  # shown as 0 from the start

    def _family(self, metric: Metric) -> Any:
        labels = [*self._labelnames, *([metric.label] if metric.label else [])]
        common: dict[str, Any] = {"name": PREFIX + metric.name, "documentation": metric.text, "labelnames": labels}
        if metric.kind == "gauge":
            return self._gauge_cls(multiprocess_mode="mostrecent", **common)
        if metric.kind == "histogram":
            return self._histogram_cls(buckets=list(TTFT_S), **common)
        return self._counter_cls(**common)

    def _of(self, engine: int, key: str) -> Any:
        bound = self._bound.get((engine, key))
        if bound is None:
            metric, label = split_key(key)
            values = [*self.per_engine_labelvalues[engine], *([label] if metric.label else [])]
            bound = self._bound[engine, key] = self._families[metric.name].labels(*values)
        return bound

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over what one step of one engine had to say."""
        for key, amount in transfer_stats_data.get("counters", {}).items():
            self._of(engine_idx, key).inc(amount)
        for key, values in transfer_stats_data.get("gauges", {}).items():
            latest = self._gauges.setdefault((engine_idx, key), {})
            latest.update(values)
            self._of(engine_idx, key).set(sum(latest.values()))
        for key, values in transfer_stats_data.get("samples", {}).items():
            histogram = self._of(engine_idx, key)
            for value in values:
                histogram.observe(value)


def hit_sources(by_level: Mapping[str, int], levels: Sequence[LevelSpec]) -> dict[Any, int]:
    """Tokens by tier as vLLM's `CacheHitSource`: memory is its host, a disk its disk, and for another machine it has no
    name of its own. Older versions have none at all."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    found: dict[Any, int] = {}
    for level in levels:
        tokens = by_level.get(level.name, 0)
        if tokens:
            source = CacheHitSource.DISK if level.persistent else CacheHitSource.HOST
            found[source] = found.get(source, 0) + tokens
    if by_level.get(REMOTE_NAME):
        found[CacheHitSource.EXTERNAL_UNSPECIFIED] = by_level[REMOTE_NAME]
    return found


def publishes_events(vllm_config: Any) -> bool:
    """Does this engine publish KV events?"""
    return bool(getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False))


def kv_events(changes: Iterable[BlockChange], levels: Sequence[LevelSpec], block_tokens: int) -> Iterator[Any]:
    """As vLLM publishes them."""
    for change in changes:
        if change.level < 0:
            yield AllBlocksCleared()
            continue
        medium = MEDIUM_DISK if levels[change.level].persistent else MEDIUM_MEMORY
        hashes = [maybe_convert_block_hash(BlockHash(each)) for each in change.hashes]
        if not change.readable:
            yield BlockRemoved(block_hashes=hashes, medium=medium, **_GROUP_REMOVED)
            continue
        parent = None if change.parent is None else maybe_convert_block_hash(BlockHash(change.parent))
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=change.tokens,
            block_size=block_tokens,
            lora_id=None if change.lora is None else change.lora.adapter_id,
            medium=medium,
            lora_name=None if change.lora is None else change.lora.name,
            **_GROUP_STORED,
        )


def _group(event: Any) -> dict[str, Any]:
    """The one group of blocks that there is, where events tell of groups."""
    return {"group_idx": 0} if "group_idx" in event.__struct_fields__ else {}


_GROUP_STORED, _GROUP_REMOVED = _group(BlockStored), _group(BlockRemoved)
