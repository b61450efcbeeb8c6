"""Building blocks for generate functions: prompts, requests, responses, merged turns."""

from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    compute_routing_headers,
    get_indexer_topk_from_response,
    get_routed_experts_from_response,
    policy_uses_routing_key,
    router_url,
    update_sample_from_response,
)
from miles.rollout.generate_utils.sample_utils import merge_samples

__all__ = [
    "compute_prompt_ids_from_sample",
    "compute_request_payload",
    "compute_routing_headers",
    "get_indexer_topk_from_response",
    "get_routed_experts_from_response",
    "merge_samples",
    "policy_uses_routing_key",
    "router_url",
    "update_sample_from_response",
]
