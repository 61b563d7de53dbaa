"""The words for whoever started a server: what loads, and once it is ready its settings and a line to try it with."""

from __future__ import annotations

import socket
from pathlib import Path

from penstock.core.settings import Settings
from penstock.engine.messages import EngineInfo


def client_url(listener: socket.socket, *, is_tls: bool) -> str:
    """An address that a client on this machine can use."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if is_tls else 'http'}://{shown}:{port}"


def loading_message(name: str, settings: Settings, path: Path) -> str:
    weights = "random weights for" if settings.engine.load == "dummy" else "loading"
    return f"{weights} {name} from {path}"


def _recurrent_state(info: EngineInfo) -> dict[str, str]:
    if not info.state_bytes:
        return {}
    each, count, kept = info.state_bytes / 2**20, info.limits.max_num_seqs, info.state_snapshots
    told = f"{each:,.1f} MiB a sequence, {each * count:,.0f} MiB for {count}"
    told += f"; {kept} more for prompts that begin alike" if kept else "; no prefix cache"
    return {"recurrent state": told}


def ready_message(
    name: str,
    info: EngineInfo,
    url: str,
    took: str,
    *,
    has_console: bool,
    num_replicas: int = 1,
    needs_key: bool = False,
) -> str:
    weights = "" if info.quant == "none" else f", {info.quant} weights"
    limits = info.limits
    cache = f"{limits.num_blocks:,} blocks of {limits.block_size} tokens, {info.kv_bytes / 2**20:,.0f} MiB"
    cache += f", {info.kv_dtype}"
    cache += f"; {info.host_blocks:,} more in host memory" if info.host_blocks else ""
    cache += f"; {info.disk_blocks:,} more on disk" if info.disk_blocks else ""
    lines = {"replicas": f"{num_replicas} behind a gateway, each with:"} if num_replicas > 1 else {}
    lines["device"] = f"{info.device}, {info.kernels} kernels, {info.number_format}{weights}"
    if info.parallelism:
        lines["parallelism"] = "\n".join(info.parallelism).replace("\n", f"\n  {'':<15} ")
    if info.generates:
        lines |= {
            "KV cache": cache,
            **_recurrent_state(info),
            "max_num_seqs": str(limits.max_num_seqs),
            "chunk_tokens": str(limits.chunk_tokens),
            "max_model_len": str(limits.max_model_len),
            "speculation": info.speculation,
        }
        if info.kv_port:
            lines["KV transfer"] = f"port {info.kv_port}, by {' or '.join(info.kv_movers)}"
        message = '{"role":"user","content":"Why is the sky blue?"}'
        body = f'{{"model":"{name}","stream":true,"temperature":0,"messages":[{message}]}}'
        call = f"curl -N {url}/v1/chat/completions"
    elif not info.embeds:
        lines["device"] = f"{info.device}, {info.kernels}"
        lines["it takes"] = "tensors, over the Open Inference Protocol"
        return _ready(name, url, took, lines, f"curl {url}/v2/models/{name}")
    else:
        lines["device"] = f"{info.device}, {info.kernels} kernels, {info.number_format}"
        lines |= {
            "it makes": "vectors of texts, and no texts",
            "longest text": f"{limits.max_model_len} tokens",
            "batch": f"{limits.chunk_tokens} tokens",
        }
        body = f'{{"model":"{name}","input":["a cat","a kitten"]}}'
        call = f"curl {url}/v1/embeddings"
    key = " -H 'authorization: Bearer KEY'" if needs_key else ""
    return _ready(name, url, took, lines, f"{call}{key} -d '{body}'", has_console=has_console)


def _ready(name: str, url: str, took: str, lines: dict[str, str], call: str, *, has_console: bool = False) -> str:
    settings = "\n".join(f"  {label:<15} {value}" for label, value in lines.items())
    in_browser = f", here or in a browser at {url}" if has_console else ""
    return f"""
penstock serves {name} at {url}   ({took})

{settings}

Try it{in_browser}:

  {call}
"""
