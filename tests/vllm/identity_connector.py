"""A connector that caches nothing and writes down what it finds of an engine's identity; runs inside vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_identity import engine_identity, rank_parts, vllm_ranks
from tiercache.integrations.vllm_support import check_supported


class IdentityConnector(KVConnectorBase_V1, SupportsHMA):
    """One file per process and role: `<role>-<pid>.json` under kv_connector_extra_config "out"."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._kv_config = vllm_config, kv_cache_config
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._file = Path(extra["out"]) / f"{role.name}-{os.getpid()}.json"
        found: dict[str, Any] = {"role": role.name}
        if memory := os.environ.get("VLLM_DIST_IDENT"):
            (self._file.parent / f"{os.getpid()}.shm").write_text(memory)
        try:
            found["warnings"] = check_supported(vllm_config, kv_cache_config)
            identity = engine_identity(vllm_config, kv_cache_config, named=extra.get("namespace"))
            found |= {"parts": dict(identity.parts), "digest": identity.digest.hex()}
            if role == KVConnectorRole.WORKER:
                rank = rank_parts(vllm_config, kv_cache_config, ranks=vllm_ranks())
                found |= {"rank": rank, "namespace": identity.namespace(rank).digest.hex()}
        except ConfigError as error:
            self._file.write_text(json.dumps({**found, "refused": str(error)}))
            raise
        self._found = found
        self._file.write_text(json.dumps(found))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with_pages = rank_parts(self._config, self._kv_config, ranks=vllm_ranks(), kv_caches=kv_caches)
        self._file.write_text(json.dumps({**self._found, "with_pages": with_pages}))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
