"""Stand-ins for what vLLM's server tests import, as a plugin of pytest: their server is a penstock server.

Loaded with `-p stand_ins` in a process of its own, where `tests` is vLLM's package and not ours. What the tests take
of vLLM's own classes is a name that cannot be used: a test that does so is a test of these classes and fails.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import importlib.abc
import importlib.machinery
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import anthropic
import openai
import pytest
from openai._models import FinalRequestOptions
from transformers import AutoTokenizer

CHAT_MODEL = os.environ["PENSTOCK_VLLM_TESTS_CHAT_MODEL"]
BASE_MODEL = os.environ["PENSTOCK_VLLM_TESTS_BASE_MODEL"]
ADAPTER = os.environ["PENSTOCK_VLLM_TESTS_ADAPTER"]
RESULTS = Path(os.environ["PENSTOCK_VLLM_TESTS_RESULTS"])
NOT_RUN = os.environ["PENSTOCK_VLLM_TESTS_NOT_RUN"].splitlines()  # patterns of names
BASE_MODELS = ("facebook/opt-125m", "openai-community/gpt2")  # of vLLM's tests: they go on with a text
OWN_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # named by a test, and the model that stands for all others
CONTEXTS = {CHAT_MODEL: 8192, BASE_MODEL: 256}
SEED = 1
MAX_CONTEXT = 3072  # of a stand-in: an answer without a limit ends there


class RemoteOpenAIServer:
    """A penstock server under the name of the model that the test names. Flags that have no meaning here (number
    formats, parsers, backends) are left out."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: dict[str, str] | None = None, **options: Any
    ) -> None:
        flags = _flags(model, list(vllm_serve_args))
        self.model = flags["--name"][0]
        self._ended = contextlib.ExitStack()
        with contextlib.ExitStack() as starting:
            words = [word for flag, values in flags.items() for value in values for word in (flag, value) if word]
            self.url_root = _started(starting, ["serve", _directory(model), *words])
            if (env_dict or {}).get("VLLM_ENABLE_RESPONSES_API_STORE"):  # it is the gateway that keeps responses
                home = Path(starting.enter_context(tempfile.TemporaryDirectory()))
                config = {"store": f"sqlite:///{home}/store", "models": {self.model: {"replicas": [self.url_root]}}}
                (home / "gateway.yaml").write_text(json.dumps(config))
                self.url_root = _started(starting, ["gateway", "--config", str(home / "gateway.yaml")])
            self._ended = starting.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.close()

    @property
    def host(self) -> str:
        return str(urllib.parse.urlparse(self.url_root).hostname)

    @property
    def port(self) -> int:
        return int(urllib.parse.urlparse(self.url_root).port or 0)

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts)

    def get_client(self, **options: Any) -> openai.OpenAI:
        return _Client(base_url=self.url_for("v1"), default_model=self.model, **_client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return _AsyncClient(base_url=self.url_for("v1"), default_model=self.model, **_client_options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return _AsyncAnthropicClient(base_url=self.url_root, **_client_options(options))


class _Client(openai.OpenAI):
    """A client that names what the test leaves out: the model, since vLLM has one only, and a seed, so that answers
    are the same every time."""

    def __init__(self, *, default_model: str, **options: Any) -> None:
        super().__init__(**options)
        self._default_model = default_model

    def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        return _completed(options, self._default_model)


class _AsyncClient(openai.AsyncOpenAI):
    def __init__(self, *, default_model: str, **options: Any) -> None:
        super().__init__(**options)
        self._default_model = default_model

    async def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        return _completed(options, self._default_model)


class _AsyncAnthropicClient(anthropic.AsyncAnthropic):
    async def _prepare_options(self, options: Any) -> Any:
        if options.method == "post" and isinstance(options.json_data, dict):
            options.json_data = {"seed": SEED, **options.json_data}
        return options


def _completed(options: FinalRequestOptions, model: str) -> FinalRequestOptions:
    if options.method == "post" and isinstance(options.json_data, dict):
        given = {name: value for name, value in options.json_data.items() if name != "model" or value}
        options.json_data = {"model": model, "seed": SEED} | given
    return options


def _started(ending: contextlib.ExitStack, words: list[str]) -> str:
    """The address of a process of penstock's, once it takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    log = Path(ending.enter_context(tempfile.TemporaryDirectory()), "log")
    command = [sys.executable, "-m", "penstock", *words, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    ending.callback(_end, process)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120.0
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(log.read_text(errors="replace")[-3000:])
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10.0):
                return url
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server is not ready after two minutes")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _directory(model: str) -> str:
    return BASE_MODEL if model in BASE_MODELS else CHAT_MODEL


def _client_options(given: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": RemoteOpenAIServer.DUMMY_API_KEY, "timeout": 600.0, "max_retries": 0} | given


def _flags(model: str, given: list[str]) -> dict[str, list[str]]:
    """penstock's flags for vLLM's, each with its values."""
    context = CONTEXTS[_directory(model)] if model == OWN_MODEL else min(MAX_CONTEXT, CONTEXTS[_directory(model)])
    flags = {"--name": [model], "--max-model-len": [str(context)]}
    for flag, value in zip(given, [*given[1:], ""], strict=True):
        match flag.replace("_", "-"):
            case "--max-model-len":
                flags["--max-model-len"] = [str(min(int(value), context))]
            case "--served-model-name":
                flags["--name"] = [value]
            case "--lora-modules":
                flags.setdefault("--lora", []).append(value)
            case "--no-enable-prefix-caching":
                flags["--no-prefix-cache"] = [""]
    return flags


class _Unusable(type):
    """A class of vLLM's own: it can be named, as in an annotation, and not called."""

    def __call__(cls, *args: object, **options: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is a class of vLLM's own")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unusable(name, (Exception,), {})


class _Hub:
    """The Hugging Face Hub, whose only repository is a LoRA adapter of the model."""

    def snapshot_download(self, repo_id: str, **options: object) -> str:
        return ADAPTER


class _ModelConfig:
    """The part of a model's configuration that the tests ask for."""

    def __init__(self, model: str, **options: Any) -> None:
        self._vocab_size: int = json.loads(Path(_directory(model), "config.json").read_text())["vocab_size"]

    def get_vocab_size(self) -> int:
        return self._vocab_size


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: False


def _tokenizer(tokenizer_name: str, **options: Any) -> Any:
    return AutoTokenizer.from_pretrained(_directory(tokenizer_name))


_KNOWN: dict[str, dict[str, object]] = {
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda *args, **options: CHAT_MODEL},
    "pybase64": vars(base64),
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
        "VLLM_PATH": Path(),
    },
}


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []  # a package: any module may be in it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unusable(name, (Exception,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _KNOWN or fullname.partition(".")[0] in ("vllm", "fastapi"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = _Module(spec.name)
        vars(made).update(_KNOWN.get(spec.name, {}))
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not any(fnmatch.fnmatchcase(item.nodeid, one) for one in NOT_RUN)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each phase of a test: setup, the call, teardown."""
    said = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr or "")
    line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "said": said[:2000]}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
