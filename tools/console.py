"""The console's page, built from web/ into the package: `make console`. The build is committed, so nobody needs Node.

python tools/console.py           build it (needs npm)
python tools/console.py --check   say whether the committed build is of these sources (needs nothing)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
WEB = ROOT / "web"
ASSETS = ROOT / "src/penstock/console/assets"
STAMP = ASSETS / "sources.sha256"
_SOURCES = ("src/**/*", "index.html", "package-lock.json", "tsconfig.json", "vite.config.ts")
_RUNBOOKS = "docs/runbooks/*.md"  # the page brings them along


def digest_of_sources() -> str:
    """Hash of the names and contents that the build depends on."""
    found = sha256()
    sources = [path for pattern in _SOURCES for path in WEB.glob(pattern)]
    for path in sorted(path for path in [*sources, *ROOT.glob(_RUNBOOKS)] if path.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def is_fresh() -> bool:
    return STAMP.exists() and STAMP.read_text().strip() == digest_of_sources()


def build() -> None:
    subprocess.run(["npm", "install", "--no-save"], cwd=WEB, check=True)  # `ci` wants all platforms in the lock
    subprocess.run(["npm", "run", "build"], cwd=WEB, check=True)
    STAMP.write_text(f"{digest_of_sources()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="build nothing; fail if the build is not of these sources")
    if not parser.parse_args().check:
        build()
    elif not is_fresh():
        sys.exit("the console's build is not of the sources in web/: run `make console`")


if __name__ == "__main__":
    main()
