"""The Dockerfile, read; and where there is no container builder, its steps run in a folder of their own.

python -m tools.dockerfile edge --folder /tmp/edge       downloads some 200 MB; cpu: 1.1 GB

Absolute paths of the image lie below the folder. Steps that need root or Debian's archive (users, apt-get) are left out
and named. The environment is empty but for pip's own variables and those of the Dockerfile. At the end the image's
entry point runs, gateway and controller are imported, and the size is told.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FOLDERS = re.compile(r"(?<![\w/.])/(?=(?:opt|wheels|build|var)(?:/|\s|$))")
_AS_ROOT = ("apt-get", "groupadd")
_KEPT = re.compile(r"PIP_|SSL_|HTTPS?_PROXY|NO_PROXY|REQUESTS_CA_BUNDLE", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    instruction: str  # RUN, COPY, …
    text: str


@dataclass
class Stage:
    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def texts(self, instruction: str) -> list[str]:
        return [step.text for step in self.steps if step.instruction == instruction]


def stages(text: str) -> dict[str, Stage]:
    """Stages by their names, in the file's order."""
    found: dict[str, Stage] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif instruction and found:
            current.steps.append(Step(instruction, rest.strip()))
    return found


def copies(stage: Stage) -> Iterator[tuple[str | None, Sequence[str], str]]:
    """Yields for each COPY the stage it is from, or None for the build context; the sources; where to."""
    for text in stage.texts("COPY"):
        words = text.split()
        origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
        yield origin, words[:-1], words[-1]


def needed(found: dict[str, Stage], target: str) -> list[Stage]:
    """The target and all that it is made of, each after what it needs."""
    order: list[Stage] = []

    def visit(name: str) -> None:
        stage = found.get(name)
        if stage is None or stage in order:
            return
        visit(stage.base)
        for origin, _, _ in copies(stage):
            visit(origin or "")
        order.append(stage)

    visit(target)
    return order


def environment(stage: Stage, above: dict[str, str]) -> dict[str, str]:
    """The variables of a stage, those of the stages above it included."""
    found = dict(above)
    for step in stage.steps:
        if step.instruction in ("ENV", "ARG"):
            for name, value in re.findall(r"(\w+)=(\S*)", step.text):
                if step.instruction == "ENV" or name not in os.environ:
                    found[name] = re.sub(r"\$\{(\w+)\}", lambda match: found.get(match[1], ""), value)
                else:
                    found[name] = os.environ[name]
    return found


def below(folder: Path, text: str) -> str:
    return _FOLDERS.sub(f"{folder}/", text)


def run(target: str, folder: Path) -> None:
    found, variables = stages((ROOT / "Dockerfile").read_text()), dict[str, dict[str, str]]()
    kept = {name: value for name, value in os.environ.items() if _KEPT.match(name)}
    clean = kept | {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    for stage in needed(found, target):
        variables[stage.name] = environment(stage, variables.get(stage.base, clean))
        for step in stage.steps:
            match step.instruction:
                case "COPY":
                    _copy(stage, step, folder)
                case "RUN" if any(word in step.text for word in _AS_ROOT):
                    print(f"{stage.name}: left out: {step.text}", flush=True)
                case "RUN":
                    print(f"{stage.name}: {step.text}", flush=True)
                    (folder / "build").mkdir(exist_ok=True)
                    command = ["sh", "-euc", below(folder, step.text)]
                    subprocess.run(command, cwd=folder / "build", env=variables[stage.name], check=True)
    _try(target, folder, variables[target] | {"PENSTOCK_HOME": str(folder / "home")})


def _copy(stage: Stage, step: Step, folder: Path) -> None:
    ((origin, sources, to),) = copies(Stage(stage.name, stage.base, [step]))
    if origin is not None:
        return  # all stages are below one folder
    for source in sources:
        path = ROOT / source
        where = folder / "build" / (to if path.is_dir() else path.name)
        where.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, where, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(path, where)


def _try(target: str, folder: Path, variables: dict[str, str]) -> None:
    programs = folder / "opt/penstock/bin"
    variables["PATH"] = f"{programs}:/usr/bin:/bin"
    subprocess.run([programs / "penstock", "--version"], env=variables, cwd=folder, check=True)
    modules = ["penstock.cli.gateway_process", "penstock.cli.fleet_process", "kubernetes.aio", "psycopg", "redis"]
    if target != "edge":
        modules += ["torch", "penstock.runner.runner"]
    script = f"import {', '.join(modules)}"
    subprocess.run([programs / "python", "-c", script], env=variables, cwd=folder, check=True)
    found = [path for path in (folder / "opt/penstock").rglob("*") if path.is_file() and not path.is_symlink()]
    print(f"{target}: /opt/penstock has {sum(path.stat().st_size for path in found) / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["edge", "cpu", "cuda"])
    parser.add_argument("--folder", type=Path, required=True, help="where the image's files go; it must be empty")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    run(arguments.target, folder)


if __name__ == "__main__":
    main()
