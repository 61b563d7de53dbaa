"""The names that stock Endpoint Pickers read a model server by."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually


def families(replica: Replica) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value of each of vLLM's metrics."""
    text = replica.call("GET", "/metrics")[2].decode()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {one.name: (one.labels, one.value) for one in found if one.name.startswith("vllm:")}


def test_load_and_cache_are_told_under_vllms_names() -> None:
    with serving(num_blocks=64, block_size=4, step_s=0.05, max_loras=2) as replica:
        stream = replica.openai.completions.create(
            model=NAME, prompt="the first", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        busy = eventually(lambda: families(replica), lambda found: found["vllm:num_requests_running"][1] == 1)
        assert busy["vllm:num_requests_running"][0] == {"model_name": NAME}
        assert busy["vllm:num_requests_waiting"] == ({"model_name": NAME}, 0)
        assert 0 < busy["vllm:kv_cache_usage_perc"][1] <= 1
        assert busy["vllm:cache_config_info"] == ({"block_size": "4", "num_gpu_blocks": "64"}, 1)
        labels, told_at = busy["vllm:lora_requests_info"]
        assert labels == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert told_at > 1e9  # which of several series is the newest
        stream.close()
