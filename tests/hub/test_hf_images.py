"""What a directory says of how its images are made ready, in every form that transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import VisionConfig
from penstock.hub.hf_images import image_processor

TILES = VisionConfig("idefics3", 64, 96, num_layers=1, num_heads=2, patch_size=16, merge_size=4, image_size=512)
PATCHES = VisionConfig(
    "qwen2_5_vl", 64, 96, num_layers=1, num_heads=2, patch_size=14, merge_size=2, temporal_patch_size=2, window_size=112
)
# As SmolVLM's and Qwen2.5-VL's own directories have them.
SMOLVLM: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Idefics3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 512},
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 2048},
}
QWEN: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}


def write(directory: Path, name: str, content: object) -> Path:
    (directory / name).write_text(json.dumps(content))
    return directory


def test_smolvlms_own(tmp_path: Path) -> None:
    found = image_processor(write(tmp_path, "preprocessor_config.json", SMOLVLM), TILES)
    assert found is not None
    assert (found.family, found.tile_size, found.longest_edge, found.is_split) == ("idefics3", 512, 2048, True)
    assert (found.tile_tokens, found.placeholder, found.resample) == (64, "<image>", 1)
    write(tmp_path, "processor_config.json", {"image_seq_len": 64, "processor_class": "Idefics3Processor"})
    assert image_processor(tmp_path, TILES) == found


def test_qwens_own(tmp_path: Path) -> None:
    found = image_processor(write(tmp_path, "preprocessor_config.json", QWEN), PATCHES)
    assert found is not None
    assert (found.family, found.min_pixels, found.max_pixels) == ("qwen_vl", 3136, 12845056)
    assert (found.patch_size, found.merge_size, found.temporal_patch_size, found.resample) == (14, 2, 2, 3)
    sized = {name: value for name, value in QWEN.items() if "pixels" not in name}
    sized["size"] = {"shortest_edge": 3136, "longest_edge": 12845056}
    assert image_processor(write(tmp_path, "preprocessor_config.json", sized), PATCHES) == found


def test_newer_directories_have_it_inside_the_processors(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    write(old, "preprocessor_config.json", QWEN)
    write(new, "processor_config.json", {"image_processor": QWEN, "processor_class": "Qwen2_5_VLProcessor"})
    assert image_processor(new, PATCHES) == image_processor(old, PATCHES)


def test_what_is_not_said_is_as_the_reference_has_it(tmp_path: Path) -> None:
    found = image_processor(write(tmp_path, "preprocessor_config.json", {"patch_size": 14}), PATCHES)
    assert found is not None
    assert (found.min_pixels, found.max_pixels, found.mean[0]) == (56 * 56, 28 * 28 * 1280, 0.48145466)


def test_a_model_without_images_and_a_directory_that_says_nothing(tmp_path: Path) -> None:
    assert image_processor(tmp_path, TILES) is None
    assert image_processor(write(tmp_path, "preprocessor_config.json", SMOLVLM), None) is None


@pytest.mark.parametrize(
    "said",
    [
        SMOLVLM | {"max_image_size": {"longest_edge": 364}},
        SMOLVLM | {"max_image_size": {}},
        SMOLVLM | {"max_image_size": "large"},
        SMOLVLM | {"size": {"longest_edge": 0}},
        SMOLVLM | {"size": {"longest_edge": 1 << 40}},
        SMOLVLM | {"do_resize": False},
        SMOLVLM | {"image_mean": [0.5]},
        SMOLVLM | {"image_mean": None},
        SMOLVLM | {"image_std": [0, 1, 1]},
        SMOLVLM | {"resample": 9},
        SMOLVLM | {"resample": "lanczos"},
        SMOLVLM | {"image_seq_len": 81},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupported):
        image_processor(write(tmp_path, "preprocessor_config.json", said), TILES)


@pytest.mark.parametrize(
    "said",
    [QWEN | {"patch_size": 16}, QWEN | {"merge_size": 1}, QWEN | {"min_pixels": -1}, QWEN | {"max_pixels": "many"}],
    ids=json.dumps,
)
def test_so_are_patches_that_the_encoder_does_not_take(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupported):
        image_processor(write(tmp_path, "preprocessor_config.json", said), PATCHES)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelCorrupt):
        image_processor(tmp_path, TILES)
