"""Detection of the kind of server that answers: the one that shows the most of the signs that the tables name."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.dialects.dialect import Dialect, Sign
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.liveness import Answer


def paths(model: str) -> list[str]:
    """Returns the paths to ask an unknown server for; each is free, and one that is not known says something too."""
    found = {_filled(sign, model): None for dialect in DIALECTS.values() for sign in dialect.signs if sign.path}
    return list(found)


def detect(answers: Mapping[str, Answer], model: str = "") -> Dialect:
    """`answers` by path, as many as came; plain OpenAI if nothing tells."""
    shown = {name: sum(_is_shown(sign, answers, model) for sign in dialect.signs) for name, dialect in DIALECTS.items()}
    name = max(shown, key=shown.__getitem__)
    return DIALECTS[name] if shown[name] else OPENAI


def _is_shown(sign: Sign, answers: Mapping[str, Answer], model: str) -> bool:
    if sign.header is not None:
        header = sign.header
        return any(header in answer.headers and sign.text in answer.headers[header] for answer in answers.values())
    answer = answers.get(_filled(sign, model))
    if answer is None or answer.status != 200:
        return False
    return sign.text in answer.body or sign.text in answer.body.replace(b'": ', b'":')


def _filled(sign: Sign, model: str) -> str:
    return (sign.path or "").replace("{model}", model)
