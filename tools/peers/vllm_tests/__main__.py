"""vLLM's own tests of its OpenAI and Anthropic entry points, run against a penstock server.

    python -m tools.peers.vllm_tests .peers                       # all that tests.toml names
    python -m tools.peers.vllm_tests .peers openai/chat_completion/test_chat.py -k logprobs

Nothing of vLLM is in this repository: the tests are fetched, in the version that source.py names. Every test must pass
but those that tests.toml lists as not applicable, each with its reason; one of these that passes is told.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.model.lora import write_adapter
from tools.peers.vllm_tests.source import VERSION, fetched
from tools.stories15m import stories15m

from penstock.hub.resolve import resolve

_HERE = Path(__file__).parent
_FOLDER = "tests/entrypoints"
_MODEL = "smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peers.vllm_tests", description=__doc__)
    parser.add_argument("directory", type=Path, help="where vLLM's source is kept")
    parser.add_argument("files", nargs="*", help=f"some of the files, below {_FOLDER}; all by default")
    parser.add_argument("-k", help="only tests whose names fit, as pytest has it")
    arguments = parser.parse_args()
    listed = tomllib.loads((_HERE / "tests.toml").read_text())
    home = (arguments.directory / "vllm-tests").absolute()
    root = fetched(home)
    results = home / "results.jsonl"
    results.unlink(missing_ok=True)
    files = [f"{_FOLDER}/{name}" for name in arguments.files or listed["files"]]
    # vLLM's own conftest.py, above this folder, imports its engine.
    words = ["-p", "stand_ins", "-c", os.devnull, "--rootdir", ".", "--confcutdir", _FOLDER, "-p", "no:cacheprovider"]
    words += ["-o", "asyncio_default_fixture_loop_scope=function"]
    words += ["-q", "--tb=short", *(["-k", arguments.k] if arguments.k else [])]
    environment = {
        "PYTHONPATH": str(_HERE),
        "PENSTOCK_VLLM_TESTS_CHAT_MODEL": str(_model(home)),
        "PENSTOCK_VLLM_TESTS_BASE_MODEL": str(stories15m()),
        "PENSTOCK_VLLM_TESTS_ADAPTER": str(_adapter(home)),
        "PENSTOCK_VLLM_TESTS_RESULTS": str(results),
        "PENSTOCK_VLLM_TESTS_NOT_RUN": "\n".join(_patterns(listed, lambda group: not group.get("run", True))),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", *words, *files]
    with (home / "log").open("w") as log:
        ended = subprocess.run(command, cwd=root, env=os.environ | environment, stdout=log, stderr=log, check=False)
    if ended.returncode not in (0, 1):  # not even collected
        sys.exit((home / "log").read_text()[-5000:])
    sys.exit(_compare(results, _patterns(listed, lambda group: True)))


def _model(home: Path) -> Path:
    """The model as a Hugging Face directory: the tests tokenize with transformers."""
    found = home / _MODEL
    if not found.exists():
        subprocess.run([sys.executable, "-m", "penstock", "convert", _MODEL, str(found)], check=True)
    return found


def _adapter(home: Path) -> Path:
    return write_adapter(home / "adapter", resolve(_MODEL).config, rank=2, targets=("q_proj",))


def _patterns(listed: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> list[str]:
    groups = [group for group in listed["not_applicable"] if wanted(group)]
    return [f"{_FOLDER}/{pattern}" for group in groups for pattern in group["tests"]]


def _compare(results: Path, excuses: list[str]) -> int:
    said: dict[str, str] = {}
    for line in results.read_text().splitlines():
        found = json.loads(line)
        before = said.get(found["test"], "")
        said[found["test"]] = before or (found["said"] or "skipped" if found["outcome"] != "passed" else "")
    counts: Counter[str] = Counter()
    for test, failure in said.items():
        excused = any(fnmatch.fnmatchcase(test, pattern) for pattern in excuses)
        outcome = ("not applicable" if excused else "FAILED") if failure else "passed"
        counts[outcome] += 1
        if outcome == "FAILED":
            print(f"FAILED {test}\n    {failure.splitlines()[0][:500]}")
        elif excused and not failure:
            print(f"passes, though it is listed as not applicable: {test}")
    print(f"vLLM {VERSION}'s tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    main()
