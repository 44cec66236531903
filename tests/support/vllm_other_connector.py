"""Another connector, to stand beside the plug-in's in a multi connector: it transfers nothing, and takes its time.

Each request is told "ask again later" for a few steps, as a connector does that looks something up elsewhere.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

STEPS = 3


class OtherMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """Nothing."""


class OtherConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Holds every request for some steps."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._asked[request.request_id] = asked = self._asked.get(request.request_id, 0) + 1
        return (None, False) if asked <= STEPS else (0, False)

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        return OtherMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._asked.pop(request.request_id, None)
        return False, None

    request_finished_all_groups = request_finished

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing
