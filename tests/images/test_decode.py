from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from penstock.core.errors import InvalidImage
from penstock.images.decode import decode, read_header
from tests.images.samples import encoded, noise

MOST = 1 << 20  # pixels


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, read_header(data, MOST)))


def reason(data: bytes) -> str | None:
    with pytest.raises(InvalidImage) as refused:
        pixels(data)
    return refused.value.reason


def png(width: int, height: int, *chunks: tuple[bytes, bytes], kind: int = 2, depth: int = 8) -> bytes:
    """A PNG that says what it is told to."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    found = [b"\x89PNG\r\n\x1a\n"]
    for name, body in ((b"IHDR", head), *chunks, (b"IEND", b"")):
        found.append(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)))
    return b"".join(found)


@pytest.mark.parametrize(
    "image",
    [
        noise(9, 7, mode="RGB"),
        noise(9, 7, mode="RGBA"),
        noise(9, 7, mode="L"),
        noise(9, 7, mode="LA"),
        noise(9, 7).convert("P"),
        noise(9, 7).convert("1"),
    ],
    ids=lambda image: image.mode,
)
def test_every_mode_becomes_what_the_reference_makes_of_it(image: Image.Image) -> None:
    data = encoded(image)
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "GIF", "PNG"])
def test_every_form_and_its_first_frame(form: str) -> None:
    frames = [noise(12, 10, seed).convert("RGB") for seed in range(3)]
    more = {} if form == "JPEG" else {"save_all": True, "append_images": frames[1:]}
    data = encoded(frames[0], form, **more)
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))


def test_colours_for_print_and_a_palette_with_a_hole() -> None:
    data = encoded(noise(9, 7, mode="CMYK"), "JPEG")
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))
    data = encoded(noise(9, 7).convert("P"), transparency=0)
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_strips_of_an_image_make_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.images.decode._STRIP_PIXELS", 30)
    image = noise(9, 20).convert("P") if mode == "P" else noise(9, 20, mode=mode)
    data = encoded(image, transparency=3) if mode == "P" else encoded(image)
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))


def test_grey_of_16_bits_keeps_its_upper_eight() -> None:
    values = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    found = pixels(encoded(Image.fromarray(values)))
    assert np.array_equal(found[..., 0], values >> 8)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_as_its_camera_was(turn: int, form: str) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(noise(12, 8), form, exif=exif.tobytes())
    header = read_header(data, MOST)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if form != "PNG":  # whose EXIF data may lie behind the pixels, which a header does not reach
        assert (header.width, header.height) == upright.size
        assert np.array_equal(pixels(data), np.asarray(upright.convert("RGB")))
    assert pixels(data).shape == (header.height, header.width, 3)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "type"),
        (b"GIF89a", "type"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "type"),
        (b"<!DOCTYPE html><html><script>alert(1)</script></html>", "type"),
        (b"%PDF-1.7", "type"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "type"),
        (encoded(noise(8, 8), "BMP"), "type"),
        (encoded(noise(8, 8), "TIFF"), "type"),
        (encoded(noise(8, 8), "ICO"), "type"),
        (encoded(noise(40, 40), "JPEG")[:300], "broken"),
        (encoded(noise(40, 40))[:200], "broken"),
        (encoded(noise(40, 40), "WEBP")[:100], "broken"),
        (encoded(noise(40, 40), "GIF")[:900], "broken"),
        (png(40, 40), "broken"),
        (png(40, 40, (b"IDAT", b"no zlib")), "broken"),
        (png(0, 0), "type"),
        (png(0, 9, (b"IDAT", zlib.compress(b""))), "type"),
        (png(100_000, 100_000, (b"IDAT", zlib.compress(bytes(9)))), "pixels"),
        (png(0xFFFFFFFF, 0xFFFFFFFF, (b"IDAT", zlib.compress(bytes(9)))), "pixels"),
        (png(1025, 1024, (b"IDAT", zlib.compress(bytes(9)))), "pixels"),
        (png(40, 40, (b"tEXt", b"a\0" + bytes(9)), (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24)))), "broken"),
        (png(40, 40, (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 24)))), "broken"),
        (encoded(noise(8, 8), "JPEG") + b"\xff\xda" * 200, "scans"),
        (encoded(noise(8, 8), "MPO", save_all=True, append_images=[noise(8, 8)]) + b"\xff\xda" * 200, "scans"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(bytes(value[:12])),
)
def test_bytes_that_are_no_image_to_take(data: bytes, why: str) -> None:
    assert reason(data) in (why, "broken" if why == "type" else why)


def test_a_webp_has_a_limit_of_its_own() -> None:
    data = encoded(Image.new("L", (4000, 3600)), "WEBP", method=0)
    with pytest.raises(InvalidImage, match="14000000"):
        read_header(data, 50_000_000)


def test_a_bomb_is_refused_by_its_header() -> None:
    """Twenty thousand pixels each way, of nothing, in few bytes."""
    data = png(20_000, 20_000, (b"IDAT", zlib.compress(bytes(1 << 20))))
    with pytest.raises(InvalidImage, match="pixels"):
        read_header(data, 50_000_000)


def test_a_png_with_more_data_than_it_tells_of_is_cut() -> None:
    rows = b"".join(b"\0" + bytes(3 * 4) for _ in range(4))
    found = pixels(png(4, 4, (b"IDAT", zlib.compress(rows + bytes(1 << 22)))))
    assert found.shape == (4, 4, 3)
