"""A tokenizer from GGUF metadata, equal to the one the model was trained with.

GGUF keeps the vocabulary and the merges but only names the rule that splits text into words, so the rules live here.
A name that is not known is refused: wrong tokens are worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import ModelCorrupt, ModelUnsupported

_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's tokens

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_WORDS = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ends}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ends}"
    r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  # at the end of a word


@dataclass(frozen=True)
class _WordRule:
    """Word rule that `tokenizer.ggml.pre` stands for."""

    pattern: str | None = None  # None: GPT-2's own
    splits_digits: bool = False  # each digit is a word, before anything else
    composes: bool = False  # text is first brought to NFC
    ignores_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # when the file does not say


_GPT2 = _WordRule()
_SMOLLM = _WordRule(splits_digits=True)
_LLAMA3 = _WordRule(_CL100K_WORDS % r"\p{N}{1,3}", ignores_merges=True, adds_bos=True)
_QWEN2 = _WordRule(_CL100K_WORDS % r"\p{N}", composes=True)
_TEKKEN = _WordRule(_O200K_WORDS.format(ends="", digits=r"\p{N}"), ignores_merges=True, adds_bos=True)
_GPT4 = _WordRule(_CL100K_WORDS % r"\p{N}{1,3}")
_GPT4O = _WordRule(_O200K_WORDS.format(ends=_SHORTENED, digits=r"\p{N}{1,3}"))

_WORD_RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "refact": _SMOLLM,  # Granite 3
    "olmo": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
    "dbrx": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "smaug-bpe": _GPT4,  # SmolLM3
    "gpt-4o": _GPT4O,
}


def build(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name."""
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens: list[str] = _required(values, "tokens")
    match values.get("model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(tokens, values)
        case "llama":
            tokenizer, adds_bos = _sentencepiece(tokens, values)
        case other:
            raise ModelUnsupported(f"tokenizers of the kind '{other}' (tokenizer.ggml.model) are not supported")
    # Phi-3's were made with blanks and newlines behind its own tokens dropped; no key says so.
    strips = metadata.get("general.architecture") == "phi3" and values["model"] == "llama"
    tokenizer.add_tokens(_added_tokens(tokens, _required(values, "token_type"), strips=strips))
    special_tokens = _special_tokens(tokens, values)
    bos = special_tokens.get("bos_token") if values.get("add_bos_token", adds_bos) else None
    eos = special_tokens.get("eos_token") if values.get("add_eos_token", False) else None
    tokenizer.post_processor = _surround(tokenizer, bos, eos)
    return tokenizer, special_tokens


def _byte_level(tokens: list[str], values: dict[str, Any]) -> tuple[Tokenizer, bool]:
    rule = _WORD_RULES.get(values.get("pre", ""))
    if rule is None:
        raise ModelUnsupported(
            f"the GGUF file's pre-tokenizer '{values.get('pre')}' (tokenizer.ggml.pre) is not known; "
            f"known are {', '.join(_WORD_RULES)}"
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _required(values, "merges"))]
    tokenizer = _bpe(tokens, merges, ignore_merges=rule.ignores_merges)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _pre_tokenizer(rule: _WordRule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(tokens: list[str], values: dict[str, Any]) -> tuple[Tokenizer, bool]:
    unknown = tokens[values.get("unknown_token_id", 0)]
    merges = _recover_merges(tokens, _required(values, "scores"), _required(values, "token_type"))
    tokenizer = _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    to_text: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    from_text: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if values.get("add_space_prefix", True):
        from_text.insert(0, normalizers.Prepend("▁"))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(from_text)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer, True


def _recover_merges(tokens: list[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins any two neighbours whose union is a piece, best score first; as merges, that is every way
    to cut every piece in two, in the order of the scores."""
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    cuts = [
        (score, token[:i], token[i:])
        for token, score in pieces.items()
        for i in range(1, len(token))
        if token[:i] in pieces and token[i:] in pieces
    ]
    cuts.sort(key=lambda cut: (cut[0], len(cut[1]), len(cut[2])), reverse=True)
    return [(left, right) for _, left, right in cuts]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise ModelCorrupt(f"the GGUF file's vocabulary and merges do not fit together: {error}") from None


def _added_tokens(tokens: list[str], types: Sequence[int], *, strips: bool) -> list[AddedToken]:
    """The tokens that are found whole in a text before it is split into words; some swallow the blanks behind them."""
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False, rstrip=strips and token not in _NEVER_STRIP)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _surround(tokenizer: Tokenizer, before: str | None, after: str | None) -> TemplateProcessing:
    added = [token for token in (before, after) if token is not None]
    return TemplateProcessing(
        single=[token for token in (before, "$A", after) if token is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(added)],
    )


def _special_tokens(tokens: list[str], values: dict[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: values.get(f"{key}_token_id") for name, key in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _required(values: dict[str, Any], key: str) -> Any:
    if not values.get(key):
        raise ModelCorrupt(f"the GGUF file has no tokenizer.ggml.{key}")
    return values[key]
