"""The table of the router's families of metrics.

`metrics` counts them, and docs/metrics.md is generated from them. If vLLM has a family of the same
meaning, the name is vLLM's with `baton_` in place of `vllm:`.
"""

from baton.runtime.metrics import Family

_PAIR = ("prefill", "decode")

BUILD_INFO = Family(
    "baton_build_info", "gauge",
    "The version and the served model, as labels; always 1, and empty until a node has been ready",
    ("version", "dtype", "block_size", "max_model_len", "features"), "vllm:cache_config_info",
)  # fmt: skip
ANSWERS = Family(
    "baton_http_answers", "counter",
    "HTTP answers by route and status; 499 means that the client left", ("route", "status"),
)  # fmt: skip
REFUSALS = Family(
    "baton_refusals", "counter",
    "Errors with status 429, 503 or 504, as answers or inside streams", ("status", "code"),
)  # fmt: skip
REQUESTS = Family(
    "baton_requests", "counter",
    "Ended requests, one per prompt; outcome is finished, client_gone or an error code",
    ("path", "outcome"),
)  # fmt: skip
SUCCESSES = Family(
    "baton_request_success", "counter", "Choices that ended, by the reason: stop or length",
    ("finished_reason",), "vllm:request_success",
)  # fmt: skip
PROMPT_TOKENS = Family(
    "baton_prompt_tokens", "counter", "Tokens of the prompts of ended requests", (),
    "vllm:prompt_tokens",
)  # fmt: skip
CACHED_TOKENS = Family(
    "baton_cached_prompt_tokens", "counter",
        "Tokens of the prompts of ended requests that a prefix cache held", (),
    "vllm:prompt_tokens_cached",
)  # fmt: skip
PREDICTED_TOKENS = Family(
    "baton_predicted_cached_prompt_tokens", "counter",
    "Tokens of the prompts of ended requests that the router expected to be cached at the chosen "
    "node", (),
)  # fmt: skip
MISPREDICTED_TOKENS = Family(
    "baton_mispredicted_cached_prompt_tokens", "counter",
    "Sum over requests of the difference between predicted and actually cached tokens", (),
)  # fmt: skip
OUTPUT_TOKENS = Family(
    "baton_generation_tokens",
    "counter",
    "Tokens that were sent to clients",
    (),
    "vllm:generation_tokens",
)
RETRIES = Family(
    "baton_retries", "counter",
    "Attempts that followed a loss before the first token, by the code of the loss", ("reason",),
)  # fmt: skip
RESUMES = Family(
    "baton_resumes", "counter",
    "Choices that went on at another node after a loss, by the code of the loss", ("reason",),
)  # fmt: skip
RUNNING = Family(
    "baton_num_requests_running", "gauge", "Requests that have nodes", (),
    "vllm:num_requests_running",
)  # fmt: skip
WAITING = Family(
    "baton_num_requests_waiting", "gauge", "Requests that wait for nodes", (),
    "vllm:num_requests_waiting",
)  # fmt: skip
FIRST_TOKEN = Family(
    "baton_time_to_first_token_seconds", "histogram",
    "From arrival to the first token that was sent", (), "vllm:time_to_first_token_seconds",
)  # fmt: skip
TOKEN_GAPS = Family(
    "baton_inter_token_latency_seconds", "histogram",
    "Between two deltas of one choice, which usually have one token each", (),
    "vllm:inter_token_latency_seconds",
)  # fmt: skip
PER_TOKEN = Family(
    "baton_request_time_per_output_token_seconds", "histogram",
    "Mean time per token after the first one, of requests with one choice", (),
    "vllm:request_time_per_output_token_seconds",
)  # fmt: skip
E2E = Family(
    "baton_e2e_request_latency_seconds", "histogram",
    "From arrival to the end, of requests that had tokens", (),
    "vllm:e2e_request_latency_seconds",
)  # fmt: skip
QUEUE_TIME = Family(
    "baton_request_queue_time_seconds", "histogram",
    "Time of waiting for nodes in the router and for blocks on the node that computes the prompt",
    (),
    "vllm:request_queue_time_seconds",
)  # fmt: skip
PREFILL_TIME = Family(
    "baton_request_prefill_time_seconds", "histogram", "Computing the prompt", (),
    "vllm:request_prefill_time_seconds",
)  # fmt: skip
DECODE_TIME = Family(
    "baton_request_decode_time_seconds", "histogram", "From the first token to the end", (),
    "vllm:request_decode_time_seconds",
)  # fmt: skip
INFERENCE_TIME = Family(
    "baton_request_inference_time_seconds", "histogram",
    "From arrival to the end, less the queue time", (), "vllm:request_inference_time_seconds",
)  # fmt: skip
STAGES = Family(
    "baton_stage_seconds", "histogram",
        "Durations of the stages of a request, which the timeline names too",
    ("stage",),
)  # fmt: skip
PROMPT_LENGTHS = Family(
    "baton_request_prompt_tokens", "histogram", "Tokens per prompt", (),
    "vllm:request_prompt_tokens",
)  # fmt: skip
OUTPUT_LENGTHS = Family(
    "baton_request_generation_tokens", "histogram", "Tokens that were sent per request", (),
    "vllm:request_generation_tokens",
)  # fmt: skip
TRANSFERS = Family("baton_transfers", "counter", "Handoffs that succeeded, by pair of nodes", _PAIR)
TRANSFER_FAILURES = Family(
    "baton_transfer_failures", "counter", "Handoffs that failed, by pair of nodes", _PAIR
)
TRANSFER_BYTES = Family(
    "baton_transfer_bytes", "counter", "KV bytes that handoffs moved, by pair of nodes", _PAIR
)
TRANSFER_SECONDS = Family(
    "baton_transfer_seconds", "counter",
    "Seconds from the first read of a handoff to the end of the last one, summed over handoffs",
    _PAIR,
)  # fmt: skip
KNOWN_BLOCKS = Family(
    "baton_known_cached_blocks", "gauge",
    "Blocks in the prefix cache of a node, as far as the router knows", ("node", "role"),
)  # fmt: skip
CACHE_GAPS = Family(
    "baton_cache_gaps", "counter",
    "How often the router missed an announcement of a node's cache and asked for all of it", (),
)  # fmt: skip
OLDEST_WAIT = Family(
    "baton_router_oldest_wait_seconds", "gauge",
    "Time since nodes last made progress with the running request that waits longest", (),
)  # fmt: skip
NODES = Family("baton_nodes", "gauge", "Nodes by role and state", ("role", "state"))

ROUTER_FAMILIES = (
    BUILD_INFO, ANSWERS, REFUSALS, REQUESTS, SUCCESSES, PROMPT_TOKENS, CACHED_TOKENS,
    PREDICTED_TOKENS, MISPREDICTED_TOKENS, OUTPUT_TOKENS, RETRIES, RESUMES, RUNNING, WAITING,
    FIRST_TOKEN, TOKEN_GAPS, PER_TOKEN, E2E, QUEUE_TIME, PREFILL_TIME, DECODE_TIME, INFERENCE_TIME,
    STAGES, PROMPT_LENGTHS, OUTPUT_LENGTHS, TRANSFERS, TRANSFER_FAILURES, TRANSFER_BYTES,
    TRANSFER_SECONDS, KNOWN_BLOCKS, CACHE_GAPS, OLDEST_WAIT,
    NODES,
)  # fmt: skip
