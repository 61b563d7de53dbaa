"""Encoded images: what their first bytes say, and their pixels. Bytes decide what an image is.

Nothing is decoded before the size that the header tells was looked at; one that tells a lie decodes into no more than
it told. Pillow is imported with the first image: most processes that can count tokens of images never see one.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidImage

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_JPEGS = ("JPEG", "MPO")  # the latter: one with more images behind it, of which the first is taken
_NAMES = "PNG, JPEG, WebP and GIF"
_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_LYING = (5, 6, 7, 8)  # of these, by which width and height change places
_STRIP_PIXELS = 1 << 20
_MAX_WEBP_PIXELS = 14_000_000  # which Pillow copies with the interpreter's lock: some 30 ms
_WHITE = (255, 255, 255, 255)
_SCAN = b"\xff\xda"
_MAX_SCANS = 128  # of a JPEG, each of which takes time for all of its pixels, however few its bytes are

# Exceptions of Pillow for bytes that are a broken image, besides the one for bytes that it does not know.
_BROKEN = (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError, struct.error, zlib.error)


@dataclass(frozen=True)
class Header:
    format: str
    width: int  # width and height after EXIF rotation
    height: int
    turn: int  # EXIF's number of how its pixels lie in the file; 1: as they are to be seen


def read_header(data: bytes, max_pixels: int) -> Header:
    """Raises InvalidImage."""
    image = _opened(data)
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidImage(f"has {width}x{height} pixels", reason="size")
    most = min(max_pixels, _MAX_WEBP_PIXELS) if image.format == "WEBP" else max_pixels
    if width * height > most:
        raise InvalidImage(f"has {width}x{height} pixels; the most that are taken are {most} in all", reason="pixels")
    if image.format in _JPEGS and data.count(_SCAN) > _MAX_SCANS:
        raise InvalidImage(f"is a JPEG of more than {_MAX_SCANS} scans", reason="scans")
    turn = _turn_of(image)
    if turn in _LYING:
        width, height = height, width
    return Header(str(image.format), width, height, turn)


def decode(data: bytes, header: Header) -> Image.Image:
    """The pixels in RGB, the first frame's, turned as they are to be seen. Raises InvalidImage."""
    from PIL.Image import Transpose

    image = _opened(data)
    try:
        image.load()
        image = _rgb(image)
        if header.turn in _TURNS:
            image = image.transpose(Transpose[_TURNS[header.turn]])
    except _BROKEN as error:
        raise InvalidImage(f"is broken or truncated: {_words(error)}", reason="broken") from None
    if image.size != (header.width, header.height):
        raise InvalidImage("has other pixels than it says", reason="broken")
    return image


def _opened(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise InvalidImage("has more pixels than are ever taken", reason="pixels") from None
    except UnidentifiedImageError:
        raise InvalidImage(f"is no image of a kind that is known here: {_NAMES}", reason="type") from None
    except _BROKEN as error:
        raise InvalidImage(f"is broken: {_words(error)}", reason="broken") from None


def _rgb(image: Image.Image) -> Image.Image:
    """The image in RGB. Transparency is composed on white, as in transformers' convert_to_rgb. 16-bit grey, which
    Pillow would make white, keeps its upper eight bits. A strip at a time: Pillow holds the GIL meanwhile."""
    from PIL import Image

    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    found = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        found.paste(_strip_in_rgb(strip), (0, top))
    return found


def _strip_in_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    if image.mode.startswith("I"):
        import numpy as np

        upper: Any = np.clip(np.asarray(image), 0, 65535) >> 8
        image = Image.fromarray(upper.astype(np.uint8))
    return image.convert("RGB")


def _turn_of(image: Image.Image) -> int:
    """Orientation by the EXIF data before the pixels; data that cannot be read is ignored. Pillow's own reading of a
    PNG would decode it, to see whether there is more behind the pixels."""
    from PIL.Image import Image as PlainImage

    try:
        turn = PlainImage.getexif(image).get(_ORIENTATION, 1)
    except _BROKEN:
        return 1
    return turn if isinstance(turn, int) and turn in _TURNS else 1


def _words(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
