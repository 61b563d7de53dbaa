"""Compiles every kernel as the host code launches it, for a GPU that is not there: `report_of(90)` for sm_90.

That takes a process of its own, without the interpreter. A stand-in for Triton's driver names the target, and the host
code runs on CPU tensors (`launches`); instead of a launch, the kernel's signature, constants and options are
kept. Of these enough are compiled to show every type of argument and every choice that a constant makes, down to the
binary: only the assembler reads the instructions that kernels write themselves. Then each kernel is translated with
every integer argument at 1, which Triton makes a constant.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import penstock.model.ops
from penstock.hub.home import penstock_home

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of memory that one program may have
MAX_THREADS = 1024
MAIN_TARGET = 90  # compiled in more variants than others
MAX_PROCESSES = 8
PROCESSORS = {80: 108, 90: 132, 100: 148}
PACKAGE = "penstock.model.ops.triton"
SOURCE = Path(penstock.model.ops.__file__).parent / "triton"


@dataclass
class Report:
    launched: int  # variants in all
    kernels: dict[str, int]  # compiled, and in how many variants
    with_ones: int  # variants that were translated with integers of 1
    failures: list[str]


@dataclass(frozen=True)
class Variant:
    """One kernel as it was launched."""

    kernel: Any  # triton's JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    integers: dict[str, bool]  # arguments that are plain integers, and whether Triton looks at their values

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.removeprefix(PACKAGE + '.')}.{self.kernel.fn.__name__}"

    def __str__(self) -> str:
        constants = {self.kernel.arg_names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}
        return f"{self.name} {self.signature} {constants} warps={self.options.get('num_warps')}"


class Recorder:
    """Keeps each variant once."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}

    def record(
        self, kernel: Any, _key: Any, signature: Any, _device: Any, constants: Any, options: Any, *rest: Any
    ) -> None:
        integers = {
            param.name: not (param.do_not_specialize or param.is_constexpr)
            for param in kernel.params
            if signature.get(param.name) in ("i32", "i64")
        }
        variant = Variant(kernel, dict(signature), dict(constants), dict(rest[0]), dict(options.__dict__), integers)
        self.variants.setdefault(f"{variant} {variant.attributes} {variant.options}", variant)


def stand_in(arch: int) -> Recorder:
    """Answers whatever Triton and our kernels ask of a GPU, for this one."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from penstock.model.ops.triton.common import device

    recorder = Recorder()

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    def scaled_product(a: torch.Tensor, b: torch.Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> torch.Tensor:
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)  # cuBLAS's

    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_capability=lambda _: divmod(arch, 10),
        get_device_properties=lambda _: SimpleNamespace(multi_processor_count=PROCESSORS[arch]),
    )
    driver.set_active(Driver())
    device.torch = SimpleNamespace(cuda=cuda)
    JITFunction._do_compile = lambda kernel, *launch: recorder.record(kernel, *launch)
    torch._scaled_mm = scaled_product
    return recorder


def compiled(variant: Variant, arch: int) -> str | None:
    """None, or why there is no binary, or none that such a GPU takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    try:
        metadata = compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options).metadata
    except Exception as error:
        return f"{variant}: {error_text(error)}"
    if metadata.shared > SHARED_BYTES[arch]:
        return f"{variant}: takes {metadata.shared:,} bytes of shared memory, and there are {SHARED_BYTES[arch]:,}"
    if metadata.num_warps * 32 > MAX_THREADS:
        return f"{variant}: {metadata.num_warps} warps are more than a program may have"
    return None


def error_text(error: BaseException) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return " <- ".join(f"{type(each).__name__}: {each}" for each in causes)


def with_ones(variant: Variant) -> Iterator[Variant]:
    """The same with one integer argument of 1, for each that Triton would make a constant; and with all of them."""
    names = [name for name, is_special in variant.integers.items() if is_special]
    for ones in [[name] for name in names] + ([names] if len(names) > 1 else []):
        places = {(variant.kernel.arg_names.index(name),) for name in ones}
        yield replace(
            variant,
            signature=variant.signature | dict.fromkeys(ones, "constexpr"),
            constants=variant.constants | dict.fromkeys(places, 1),
            attributes={path: value for path, value in variant.attributes.items() if path not in places},
        )


def translated(variant: Variant, arch: int) -> str | None:
    """None, or why the kernel's Python is not accepted: the first stage of compiling, and far the shortest."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options(variant.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except Exception as error:
        return f"{variant}: {error_text(error)}"
    return None


def covering(variants: list[Variant], features: Callable[[Variant], Iterable[object]]) -> list[Variant]:
    """Returns of each kernel as few variants as have every feature of all of them."""
    chosen = []
    by_kernel: dict[str, list[tuple[Variant, set[object]]]] = {}
    for variant in variants:
        by_kernel.setdefault(variant.name, []).append((variant, set(features(variant))))
    for some in by_kernel.values():
        missing = set().union(*(found for _, found in some))
        while missing:
            best, found = max(some, key=lambda pair: len(pair[1] & missing))
            missing -= found
            chosen.append(best)
    return chosen


def formats(variant: Variant) -> Iterator[object]:
    """Weights of how many bits, and whether anything is in FP8: other instructions."""
    yield *bits(variant), "fp8" in str(variant.signature)


def bits(variant: Variant) -> list[int]:
    return [value for path, value in variant.constants.items() if variant.kernel.arg_names[path[0]] == "BITS"]


def types_and_choices(variant: Variant) -> Iterator[object]:
    """Each argument's type too, and each constant's value where it chooses between ways to go."""
    yield from formats(variant)
    yield next(iter(variant.signature.values())), *bits(variant)
    for name, kind in variant.signature.items():
        yield name, str(kind).partition("[")[0]  # of a tile without its size
    for path, value in variant.constants.items():
        name = variant.kernel.arg_names[path[0]]
        for part, each in (asdict(value) if is_dataclass(value) else {"": value}).items():
            yield name, *path[1:], part, choice(each)


def choice(value: object) -> object:
    """Sizes choose nothing, unless they are no powers of two."""
    if isinstance(value, float):
        return value != 0
    if isinstance(value, int) and value > 16:
        return "large and even" if value & (value - 1) == 0 else "large"
    return str(value)


def all_failures(work: list[tuple[Callable[[Variant, int], str | None], Variant, int]]) -> list[str]:
    """Returns all failures, found in a process per processor. They are forked: variants hold functions of Triton's. A
    compiler that aborts takes its process with it, which raises."""
    global _work
    _work = work
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:
        return [failure for failure in pool.map(_one, range(len(work))) if failure]


_work: list[tuple[Callable[[Variant, int], str | None], Variant, int]] = []


def _one(place: int) -> str | None:
    compiles, variant, arch = _work[place]
    return compiles(variant, arch)


def report(arch: int) -> Report:
    from tests.model.ops.triton.launches import launch_all

    recorder = stand_in(arch)
    launch_all()
    launched = list(recorder.variants.values())
    chosen = covering(launched, types_and_choices if arch == MAIN_TARGET else formats)
    ones = [one for variant in chosen for one in with_ones(variant)] if arch == MAIN_TARGET else []
    failures = all_failures(
        [(compiled, variant, arch) for variant in chosen] + [(translated, variant, arch) for variant in ones]
    )
    return Report(len(launched), dict(Counter(variant.name for variant in chosen)), len(ones), failures)


def report_of(arch: int) -> Report:
    """Returns the report of a child process. Triton's cache is in the penstock home, by the kernels' source, Triton's
    own and the target: what has not changed is not compiled again, in whichever checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Triton keeps absolute paths there: by way of this run's own home, the next run would find none of them.
    directory = (penstock_home() / "triton").resolve()
    cache = {"TRITON_CACHE_DIR": str(directory), "TRITON_STORE_BINARY_ONLY": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.model.ops.triton.compiler", str(arch)],
        env=environment | cache | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},  # a GPU there is not asked
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Report(**json.loads(child.stdout.splitlines()[-1]))


def launchable() -> set[str]:
    """The names of all kernels: whatever `triton.jit` decorates and no other such function calls."""
    decorated, called = set(), set()
    for path in sorted(SOURCE.rglob("*.py")):
        module, name = ast.parse(path.read_text()), ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        origins = {
            each.asname or each.name: f"{(statement.module or '').removeprefix(PACKAGE + '.')}.{each.name}"
            for statement in module.body
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(PACKAGE)
            for each in statement.names
        }
        for function in filter(_is_jitted, module.body):
            decorated.add(f"{name}.{function.name}")
            called |= {
                origins.get(node.func.id, f"{name}.{node.func.id}")
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
    return decorated - called


def _is_jitted(statement: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(statement, ast.FunctionDef) and any(
        ast.unparse(each).startswith("triton.jit") for each in statement.decorator_list
    )


if __name__ == "__main__":
    print(json.dumps(asdict(report(int(sys.argv[1])))))
