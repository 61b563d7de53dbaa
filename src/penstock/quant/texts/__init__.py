"""Two texts in the public domain, to quantize with and to judge by: nothing is ever judged by what it was fitted to.

calibration.txt is Lewis Carroll's Alice's Adventures in Wonderland (1865), evaluation.txt the first two acts of William
Shakespeare's As You Like It (1623).
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal


def text(name: Literal["calibration", "evaluation"]) -> str:
    return files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
