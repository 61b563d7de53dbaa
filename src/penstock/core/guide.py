"""Guide of an answer's form: a rule that every token of it has to follow.

Three kinds are enough: any JSON object is a schema, and a choice among texts is a small grammar. A guide says nothing
of tokens; whether it is a rule that can be followed is told by `text.grammars`, before anything is generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

GuideKind = Literal["json_schema", "regex", "grammar"]


class Guide(msgspec.Struct, frozen=True, gc=False, array_like=True):
    kind: GuideKind
    source: str  # the schema as JSON text; the regular expression; the grammar in Lark's language

    @classmethod
    def json_object(cls) -> Guide:
        """Any JSON object, on one line or indented: a model that is not told what to write should write as it likes,
        but not blanks without end."""
        style = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,32}"}
        separators = {"item_separator": ",", "key_separator": ":"}
        return cls("json_schema", json.dumps({"type": "object", "x-guidance": style | separators}))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Guide:
        """One of `texts`, to the letter. Lark writes strings as JSON does."""
        return cls("grammar", f"start: {' | '.join(map(json.dumps, texts))}")
