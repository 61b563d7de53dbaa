"""Answers of the engines' metrics paths, cut to what matters and a few lines that do not."""

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="None",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="1000"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 70.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 30.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 2000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 1500.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 800.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="m"} 40.0
"""

VLLM_OLD = VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")

SGLANG = b"""# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 6.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.2
sglang:swa_token_usage{model_name="m",tp_rank="0"} 0.7
sglang:max_total_num_tokens{model_name="m"} 50000.0
sglang:page_size{model_name="m"} 1.0
sglang:gen_throughput{model_name="m",tp_rank="0"} 321.5
"""

SGLANG_LOADS = (
    b'{"timestamp":"2026-09-01T00:00:00Z","version":"0.5.23","loads":['
    b'{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"num_waiting_uncached_tokens":900,"num_used_tokens":4000,'
    b'"num_total_tokens":5000,"max_total_num_tokens":20000,"max_running_requests":48,"token_usage":0.2,'
    b'"gen_throughput":100.5,"cache_hit_rate":0.1,"utilization":0.0,"something_new":{"a":1}},'
    b'{"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":0,"num_waiting_uncached_tokens":0,"num_used_tokens":8000,'
    b'"num_total_tokens":8000,"max_total_num_tokens":20000,"max_running_requests":48,"token_usage":0.4,'
    b'"gen_throughput":99.5,"cache_hit_rate":0.1,"utilization":0.0}]}'
)

TRTLLM = b"""trtllm_num_requests_waiting{model_name="m",engine_type="pytorch"} 7.0
trtllm_num_requests_running{model_name="m",engine_type="pytorch"} 8.0
trtllm_kv_cache_utilization{model_name="m"} 0.5
trtllm_kv_cache_host_utilization{model_name="m"} 0.9
trtllm_kv_cache_tokens_per_block{model_name="m"} 32.0
trtllm_kv_cache_max_blocks{model_name="m"} 100.0
"""

TRITON_TRTLLM = b"""# HELP nv_trt_llm_request_metrics TRT LLM request metrics
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""

TGI = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 11
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
tgi_batch_current_max_tokens 4096
tgi_batch_max_total_tokens 16384
tgi_batch_inference_count{method="prefill"} 10
tgi_batch_inference_count{method="decode"} 90
tgi_request_input_length_sum 1000
tgi_request_input_length_count 10
"""

LLAMACPP = b"""# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
llamacpp:requests_deferred 2
llamacpp:n_decode_total 108
llamacpp:prompt_tokens_total 3200
llamacpp:prompt_seconds_total 10
llamacpp:tokens_predicted_total 100
llamacpp:tokens_predicted_seconds_total 5
"""
