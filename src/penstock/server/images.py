"""Images of requests: fetched or read from the body, looked at, counted, and at last decoded; all of it beside the
event loop, in a few threads of their own. Errors about an image name the part that shows it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from penstock.api.openai.chat import ImageAsked
from penstock.core.errors import InvalidImage, Overloaded
from penstock.core.images import ImageInput
from penstock.core.settings import ServerSettings
from penstock.http.outside import Outside
from penstock.images.prompt import PlacedPrompt
from penstock.images.reading import ImageReader, ReadImage, named
from penstock.images.source import data_bytes, is_data
from penstock.server.served_model import ServedImages, ServedModel

_FLOAT_BYTES = 4
_MAX_FETCHING = 64  # images at a time, whose servers may be slow
_MAX_WAITING = 64  # images that wait for a thread; beyond it requests are refused

T = TypeVar("T")
ImagesByUrl = dict[tuple[str, bool], ReadImage]  # and by whether few tokens are to be spent on it


class Images:
    def __init__(self, model: ServedModel, settings: ServerSettings, outside: Outside | None = None) -> None:
        self._model = model
        self._settings = settings
        self._outside = outside or Outside(settings.image_hosts, settings.max_image_bytes, settings.image_timeout_s)
        self._threads = ThreadPoolExecutor(settings.image_threads, thread_name_prefix="images")
        self._num_waiting = self._num_fetching = 0
        self._num_held = 0  # bytes, of images that were fetched and of pixels
        self._most_bytes = int(settings.max_image_gib * (1 << 30))
        served = model.images
        self._reader = ImageReader(served.processor, max_pixels=settings.max_image_pixels) if served else None

    def check(self, asked: Sequence[ImageAsked]) -> None:
        """Refuses what a request may not show, before anything is read."""
        self._model.check_sees(asked[0].path)
        if len(asked) > self._settings.max_images:
            raise InvalidImage(
                f"{asked[self._settings.max_images].path}: this server takes {self._settings.max_images} images in a "
                f"request, and there are {len(asked)}",
                param=asked[self._settings.max_images].path,
                reason="images",
            )

    async def read(self, asked: Sequence[ImageAsked], held: ExitStack) -> ImagesByUrl:
        """Looked at and not decoded. Raises what is wrong with one of them, naming it. `held`: gives back the room of
        what was fetched for it."""
        served = self._model.check_sees(asked[0].path)
        found: ImagesByUrl = {}
        num_bytes = 0
        for image in asked:
            key = (image.url, image.is_low)
            if key not in found:
                with named(image.path):
                    found[key] = await self._read(image, served, held)
                    num_bytes += len(found[key].data)
                    if num_bytes > self._settings.max_images_bytes:
                        most = self._settings.max_images_bytes
                        raise InvalidImage(f"all images together have more than {most} bytes", reason="bytes")
        return found

    async def _read(self, image: ImageAsked, served: ServedImages, held: ExitStack) -> ReadImage:
        assert self._reader is not None
        if is_data(image.url):
            data = await self._run(partial(data_bytes, image.url, self._settings.max_image_bytes))
        else:
            data = await self._fetch(image.url, held)
        read = await self._run(partial(self._reader.read, data, is_low=image.is_low))
        for tile in read.layout.tiles:
            if tile.num_tokens > served.max_tile_tokens:
                raise InvalidImage(
                    f"has {tile.num_tokens} tokens; this server takes up to {served.max_tile_tokens} "
                    "(engine.max_image_tokens)",
                    reason="tokens",
                )
        return read

    @contextmanager
    def held(self, asked: Sequence[ImageAsked], images: ImagesByUrl, num_choices: int) -> Iterator[None]:
        """Room for what is made of the images, for as long as their request is open."""
        shown = [images[image.url, image.is_low] for image in asked]
        num_bytes = num_choices * sum(
            _FLOAT_BYTES * math.prod(tile.shape) for one in shown for tile in one.layout.tiles
        )
        if num_bytes > self._most_bytes:
            raise InvalidImage(
                f"{asked[0].path}: decoded, all images of all choices have {num_bytes} bytes; this server takes up to "
                f"{self._most_bytes} (max_image_gib)",
                param=asked[0].path,
                reason="memory",
            )
        with self._room(num_bytes):
            yield

    @contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        if self._num_held + num_bytes > self._most_bytes:
            raise Overloaded("too many images are being looked at", retry_after_s=1.0)
        self._num_held += num_bytes
        try:
            yield
        finally:
            self._num_held -= num_bytes

    async def inputs(
        self, asked: Sequence[ImageAsked], images: ImagesByUrl, placed: PlacedPrompt
    ) -> tuple[ImageInput, ...]:
        """The engine's inputs. Raises InvalidImage, naming the image whose pixels are wrong."""
        assert self._reader is not None
        made: dict[tuple[str, bool], list[ImageInput]] = {}
        found: list[ImageInput] = []
        for image, tiles in zip(asked, placed.tiles, strict=True):
            key = (image.url, image.is_low)
            if key not in made:
                with named(image.path):
                    made[key] = await self._run(partial(self._reader.inputs, images[key]))
            found += [replace(one, start=tile.start) for one, tile in zip(made[key], tiles, strict=True)]
        return tuple(found)

    async def _fetch(self, url: str, held: ExitStack) -> bytes:
        """The bytes behind a URL. An image's limit is reserved for them while they come."""
        if self._num_fetching >= _MAX_FETCHING:
            raise Overloaded("too many images are being fetched", retry_after_s=1.0)
        self._num_fetching += 1
        try:
            with self._room(min(self._settings.max_image_bytes, self._most_bytes)):
                data = await self._outside.fetch(url)
            held.enter_context(self._room(len(data)))
            return data
        finally:
            self._num_fetching -= 1

    async def _run(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many images are being read", retry_after_s=1.0)
        self._num_waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._ended)
        return await running

    def _ended(self, done: asyncio.Future[T]) -> None:
        self._num_waiting -= 1
