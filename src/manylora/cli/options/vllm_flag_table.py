"""The flags of `vllm serve` that manylora does not have, each with a reason of one line.

A flag is *ignored* if manylora always does what it asks for, does not need it, or if it only tunes vLLM's kernels and
changes no answer. It is *limited* if only some of its values are so. All others are *refused*: they ask for a feature
that is missing, or would change answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SAME_AS", "TRANSLATED", "VLLM_FLAGS", "VllmFlag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """A flag of ``vllm serve`` that is ignored or refused."""

    why: str  # the reason, for the remark or the error
    has_value: bool = False  # whether the flag has a value
    # Values that are ignored with a remark; ``None`` for all. Any other value is refused; empty refuses all.
    fine: tuple[str, ...] | None = None


_ONE_DEVICE = "--tensor-parallel-size divides one model among devices; --replicas starts several engines"
_KERNELS = "kernels and graphs are chosen by device and batch; it changes no answer"
_NO_VALUE: Mapping[str, str] = {
    "adapters are always enabled": "--enable-lora",
    "it is on with --tool-call-parser": "--enable-auto-tool-choice",
    "it is on unless --no-prefix-caching is given": "--enable-prefix-caching",
    "it is on unless --step-composition turns it off": "--enable-chunked-prefill",
    "steps that cannot be captured run eagerly": "--enforce-eager --no-enforce-eager",
    "it is on; --no-plan-ahead turns it off": "--async-scheduling",
    "requests are logged only with --enable-log-requests": "--disable-log-requests --no-enable-log-requests",
    "responses are logged only with --enable-log-requests": "--disable-uvicorn-access-log",
    "figures are at /metrics, not in the log": "--disable-log-stats --aggregate-engine-logging"
    " --enable-logging-iteration-details",
    "certificates that change are read again": "--enable-ssl-refresh",
    "/load always answers": "--enable-server-load-tracking",
    "engines have processes of their own; --in-process is for debuggers": "--disable-frontend-multiprocessing",
    "/docs is a page without assets of others": "--enable-offline-docs",
    "both forms of LoRA on experts are read": "--enable-mixed-moe-lora-format",
    "it is how pages are managed": "--use-v2-block-manager",
    "model code and weights are loaded without progress bars": "--use-tqdm-on-load --no-use-tqdm-on-load",
    "the server takes text only": "--language-model-only",
    "a request is admitted with the pages of its whole prompt": "--scheduler-reserve-full-isl",
    "of vLLM's environment it reads the key and the switch for adapters": "--fail-on-environ-validation",
    _KERNELS: "--disable-custom-all-reduce --disable-cascade-attn --disable-async-output-proc --enable-dbo"
    " --disable-nccl-for-dp-synchronization --enable-batch-sharded-sampling --enable-cumem-allocator"
    " --enable-flashinfer-autotune --monokernel --specialize-active-lora",
}
_ANY_VALUE: Mapping[str, str] = {
    "every adapter is kept at its own rank, there is no largest one": "--max-lora-rank",
    "pre-empted requests are computed again, not swapped": "--swap-space",
    "older names are always shown": "--show-hidden-metrics-for-version",
    "texts are never logged": "--max-log-len",
    "--log-level sets the level": "--uvicorn-log-level",
    "requests are logged only with --enable-log-requests": "--disable-access-log-for-endpoints",
    "headers are bounded by 64 KiB and 128": "--h11-max-incomplete-event-size --h11-max-header-count",
    "adapters add no tokens to the vocabulary": "--lora-extra-vocab-size",
    "blocks are named by their contents": "--prefix-caching-hash-algo",
    _KERNELS: "--compilation-config --cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size"
    " --max-seq-len-to-capture --optimization-level --attention-backend --mm-encoder-attn-backend --attention-config"
    " --dbo-decode-token-threshold --dbo-prefill-token-threshold --ir-op-priority --jit-monitor-mode"
    " --jit-monitor-verbose --kernel-config --linear-backend --moe-backend --performance-mode --ubatch-size",
    "weights are read once and frozen": "--safetensors-load-strategy --max-parallel-loading-workers --ignore-patterns"
    " --safetensors-prefetch-block-size --safetensors-prefetch-num-threads",
    "there is no traffic between devices": "--cpu-distributed-timeout-seconds --distributed-timeout-seconds",
}
_LIMITED: Mapping[str, tuple[str, str]] = {
    "--pipeline-parallel-size": ("1", _ONE_DEVICE),
    "--data-parallel-size": ("1", _ONE_DEVICE),
    "--decode-context-parallel-size": ("1", _ONE_DEVICE),
    "--prefill-context-parallel-size": ("1", _ONE_DEVICE),
    "--nnodes": ("1", _ONE_DEVICE),
    "--api-server-count": ("1", "one process speaks HTTP; `manylora route` spreads over several servers"),
    "--distributed-executor-backend": ("mp uni", "each engine is a process of its own"),
    "--lora-dtype": ("auto", "--adapter-dtype chooses"),
    "--tokenizer-mode": ("auto hf", "the tokenizer is that of Hugging Face's library"),
    "--load-format": ("auto safetensors hf gguf bitsandbytes", "weights are read from safetensors or GGUF"),
    "--quantization": (
        "awq awq_marlin gptq gptq_marlin compressed-tensors bitsandbytes gguf torchao",
        "the checkpoint says how it is quantised; --base-dtype rounds one that is not",
    ),
    "--config-format": ("auto hf", "the configuration is Hugging Face's"),
    "--model-impl": ("auto transformers", "the module tree is transformers'"),
    "--task": ("auto generate", "the server generates text"),
    "--runner": ("auto generate", "the server generates text"),
    "--convert": ("auto none", "the server generates text"),
    "--preemption-mode": ("recompute", "pre-empted requests are computed again"),
    "--num-scheduler-steps": ("1", "each step is planned by itself"),
    "--num-lookahead-slots": ("0", "there is no speculative decoding"),
    "--stream-interval": ("1", "under load one event carries several tokens"),
    "--scheduler-delay-factor": ("0 0.0", "a step never waits for more prompts"),
    "--cpu-offload-gb": ("0 0.0", "the base is held on its device"),
    "--guided-decoding-backend": ("auto guidance", "grammars are compiled by llguidance"),
    "--logprobs-mode": ("raw_logprobs", "log-probabilities are those of the model"),
    "--chat-template-content-format": ("auto string", "messages are given to the template as one text"),
    "--response-role": ("assistant", "the role of an answer is assistant"),
    "--worker-cls": ("auto", "an engine has no worker classes"),
    "--scheduler-cls": ("auto", "--policy names a policy, also one of your own"),
    "--ssl-keyfile-password": ("", "the key must be readable without a password"),
}
_REFUSED: Mapping[str, str] = {
    _ONE_DEVICE: "--fully-sharded-loras --enable-expert-parallel --enable-eplb --eplb-config --all2all-backend"
    " --expert-placement-strategy --num-redundant-experts --data-parallel-rank --data-parallel-start-rank"
    " --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port --data-parallel-backend"
    " --data-parallel-hybrid-lb --data-parallel-external-lb --master-addr --master-port --node-rank --headless"
    " --ray-workers-use-nsight --data-parallel-multi-port-external-lb --data-parallel-supervisor-port"
    " --cp-kv-cache-interleave-size --dcp-kv-cache-interleave-size --dcp-comm-backend --dcp-q-replicate"
    " --dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s"
    " --dp-sync-interval --elastic-ep-max-dp-size --enable-elastic-ep --enable-ep-weight-filter --enable-hc-sp"
    " --enable-nccl-comm-suspend",
    "--device names the device, --devices those of several engines": "--device-ids",
    "engines restart by themselves; --hang-timeout and --start-timeout bound a hang": "--watchdog-config"
    " --enable-fault-tolerance --fault-tolerance-config",
    "start the server under numactl": "--numa-bind --numa-bind-cpus --numa-bind-nodes",
    "the checkpoint says how it is quantised": "--quantization-config --allow-deprecated-quantization"
    " --quantization-param-path",
    "KV has one type in all layers, and its own scales": "--calculate-kv-scales --kv-cache-dtype-skip-layers",
    "adapters are loaded beside the base": "--qlora-adapter-name-or-path",
    "there is no speculative decoding": "--speculative-config --speculative-model --num-speculative-tokens"
    " --ngram-prompt-lookup-max --ngram-prompt-lookup-min --speculative-max-model-len --spec-method --spec-model"
    " --spec-tokens --per-request-spec-decode-metrics",
    "KV stays in the engine that computed it": "--kv-transfer-config --kv-events-config --ec-transfer-config"
    " --kv-offloading-size --kv-offloading-backend --kv-sharing-fast-prefill --ec-manager-config --engram-config"
    " --enable-shm-tensor-arena",
    "the base is held on its device": "--offload-backend --offload-group-size --offload-num-in-group"
    " --offload-params --offload-prefetch-step --cpu-offload-params",
    "the server takes text only": "--limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs --mm-processor-kwargs"
    " --mm-processor-cache-gb --disable-mm-preprocessor-cache --mm-processor-cache-type --mm-encoder-tp-mode"
    " --interleave-mm-strings --skip-mm-profiling --video-pruning-rate --allowed-local-media-path"
    " --allowed-media-domains --default-mm-loras --disable-chunked-mm-input --enable-prompt-embeds"
    " --enable-tower-connector-lora --enable-flash-late-interaction --mm-device-do-normalize --mm-encoder-attn-dtype"
    " --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path"
    " --mm-encoder-only --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-processor-device"
    " --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --trust-request-mm-kwargs --video-pruning-method",
    "the server generates text": "--pooler-config --override-pooler-config --io-processor-plugin --max-lora-cls-labels",
    "it generates token by token": "--diffusion-config",
    "change config.json of the checkpoint": "--hf-overrides --rope-scaling --rope-theta --hf-config-path"
    " --disable-sliding-window --override-attention-dtype --model-class-overrides",
    "generation_config.json has them; --generation-config DIR names its folder": "--override-generation-config",
    "it must be in the same revision as the model": "--tokenizer-revision --code-revision",
    "the environment variable HF_TOKEN has the key of the hub": "--hf-token",
    "requests bring text, and answers are text": "--skip-tokenizer-init --tokens-only",
    "give a tool strict": "--tool-strict-level",
    "reasoning is part of the chat template: its variables are chat_template_kwargs": "--reasoning-config"
    " --reasoning-effort-map",
    "requests bring them": "--default-chat-template-kwargs --return-tokens-as-token-ids --enable-force-include-usage",
    "templates always show the tools": "--exclude-tools-when-tool-choice-none",
    "formats of tool calls are built in; --tool-call-parser names one": "--tool-parser-plugin --tool-server",
    "formats of reasoning are built in; --reasoning-parser names one": "--reasoning-parser-plugin",
    "the grammar's settings are those of a request": "--structured-outputs-config --guided-decoding-disable-fallback"
    " --guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties",
    "it would run code of yours in the server; put a proxy in front": "--middleware --logits-processors"
    " --logits-processor-pattern --worker-extension-cls",
    "texts are never logged": "--enable-log-outputs --enable-log-deltas",
    "--log-level and the log on standard error are the settings": "--log-config-file --log-error-stack"
    " --logging-config",
    "there is no such route": "--enable-per-request-metrics --grpc --grpc-port"
    " --enable-scale-out --anthropic-disabled-thinking-effort --cohere-format --cohere-is-reasoning-model",
    "answers have no such field": "--return-sampling-mask --enable-return-routed-experts --aux-output-config"
    " --enable-trace-replay --watermark --watermark-config",
    "events come as tokens do; raise the proxy's timeout": "--sse-keep-alive-interval",
    "weights are not replaced while the server runs": "--weight-transfer-config",
    "buckets are those of vLLM's dashboards": "--custom-histogram-buckets",
    "/metrics and --step-log have the times of steps": "--collect-detailed-traces"
    " --enable-layerwise-nvtx-tracing --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics"
    " --kv-cache-metrics-sample --profiler-config",
    "--step-target and --step-composition limit the prompts in a step": "--long-prefill-token-threshold"
    " --max-num-partial-prefills --max-long-partial-prefills --multi-step-stream-outputs"
    " --long-prefill-token-threshold-adaptive --prefill-schedule-interval",
    "--max-waiting limits the requests that wait": "--max-num-queued-reqs --max-num-queued-tokens",
    "--max-num-seqs is the limit": "--max-num-active-seqs",
    "--max-num-batched-tokens is the limit": "--max-num-scheduled-tokens",
    "a prefix is shared in whole blocks; --block-size sets their length": "--prefix-match-unit"
    " --prefix-cache-retention-interval --swa-bounded-replay",
    "draws are those of a counter, in 64 bits": "--use-fp64-gumbel",
    "the model's memory is not given back": "--enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph"
    " --sleep-preserve-parameter-names",
    "states of recurrent layers are in pages of the pool, in float32": "--mamba-cache-dtype --mamba-ssm-cache-dtype"
    " --mamba-block-size"
    " --disable-hybrid-kv-cache-manager --enable-mamba-cache-stochastic-rounding --mamba-backend --mamba-cache-mode"
    " --enable-mamba-shared-prefix-checkpoint --mamba-cache-philox-rounds --mamba-ssu-algorithm --gdn-prefill-backend"
    " --kda-decode-backend --kda-prefill-backend --replayssm-buffer-len --use-replayssm --sparse-indexer-topk-backend",
    "an adapter changes the modules that its folder says": "--lora-target-modules",
    "every expert has LoRA of its own": "--enable-moe-shared-loras",
    "only LoRA adapters are served": "--enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token"
    " --prompt-adapters --enable-lora-bias --long-lora-scaling-factors",
    "system_fingerprint names the server and the adapter's version": "--fingerprint-mode --fingerprint-value",
    "it is vLLM's own": "--additional-config --model-loader-extra-config --override-neuron-config"
    " --pt-load-map-location --renderer-num-workers",
}

VLLM_FLAGS: Mapping[str, VllmFlag] = {
    **{flag: VllmFlag(why=why) for why, flags in _NO_VALUE.items() for flag in flags.split()},
    **{flag: VllmFlag(why=why, has_value=True) for why, flags in _ANY_VALUE.items() for flag in flags.split()},
    **{flag: VllmFlag(why=why, has_value=True, fine=tuple(values.split())) for flag, (values, why) in _LIMITED.items()},
    **{flag: VllmFlag(why=why, fine=()) for why, flags in _REFUSED.items() for flag in flags.split()},
}
"""Flags by name."""

_SHORT = """
    -tp --tensor-parallel-size  -pp --pipeline-parallel-size  -dp --data-parallel-size
    -dcp --decode-context-parallel-size  -pcp --prefill-context-parallel-size  -asc --api-server-count
    -q --quantization  -O --optimization-level  -cc --compilation-config  -ep --enable-expert-parallel  -n --nnodes
    -r --node-rank  -dpn --data-parallel-rank  -dpr --data-parallel-start-rank  -dpl --data-parallel-size-local
    -dpa --data-parallel-address  -dpp --data-parallel-rpc-port  -dpb --data-parallel-backend
    -dph --data-parallel-hybrid-lb  -dpe --data-parallel-external-lb  -dpm --data-parallel-multi-port-external-lb
    -sc --speculative-config  -dc --diffusion-config  -ac --attention-config
"""
SAME_AS: Mapping[str, str] = dict(zip(_SHORT.split()[::2], _SHORT.split()[1::2], strict=True))  # vLLM's short flags

TRANSLATED: Mapping[str, Mapping[str, str]] = {
    "--no-enable-prefix-caching": {"": "--no-prefix-caching"},
    "--no-chunked-prefill": {"": "--step-composition=whole-prompts"},
    "--no-enable-chunked-prefill": {"": "--step-composition=whole-prompts"},
    "--no-async-scheduling": {"": "--no-plan-ahead"},
    "--scheduling-policy": {"fcfs": "--policy=fifo", "priority": "--policy=priority"},
    "--num-gpu-blocks-override": {"*": "--num-pages=*"},
    "--kv-cache-memory-bytes": {"*": "--memory=*"},
    "--shutdown-timeout": {"*": "--drain-timeout=*"},
    "--device-memory-utilization": {"*": "--gpu-memory-utilization=*"},
}
"""Flags under another name here, by value: empty for a flag without one, ``*`` for any."""
