"""A Hugging Face directory of a shape that was never trained, to measure what depends on sizes alone: cold starts.

    python -m tools.random_checkpoint llama8b DIRECTORY --tokenizer TOKENIZER_JSON

The weights are drawn by the GPU, if there is one, and stored as BF16. The tokenizer may be that of a smaller model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.capacity.shapes import SHAPES
from penstock.hub.convert import hf_config
from penstock.model.random_weights import RandomCheckpoint

_JOINED = ("qkv_proj.weight", "gate_up_proj.weight")  # as some families have them; others have the parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape]
    checkpoint = RandomCheckpoint(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = {name for name in checkpoint.tensor_names() if not name.endswith(_JOINED)}
    names -= {"lm_head.weight"} if config.tied_embeddings else set()
    arguments.directory.mkdir(parents=True)
    tensors = {name: checkpoint.draw(name, device).to(torch.bfloat16).cpu() for name in sorted(names)}
    save_file(tensors, arguments.directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(arguments.tokenizer, arguments.directory / "tokenizer.json")
    (arguments.directory / "config.json").write_text(json.dumps(hf_config(config, "bfloat16")))


if __name__ == "__main__":
    main()
