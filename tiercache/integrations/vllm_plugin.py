"""The entry point `vllm.general_plugins`: makes the connector known to vLLM by its name."""

from __future__ import annotations

__all__ = ["NAME", "register"]

NAME = "TierCacheConnector"


def register() -> None:
    """Called by vLLM in each of its processes. Imports no more of tiercache than this."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "tiercache.integrations.vllm", NAME)
