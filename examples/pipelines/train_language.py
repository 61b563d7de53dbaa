"""Trains a classifier of languages and writes it as ONNX: python train_language.py [FILE], by default language.onnx.

It is a naive Bayes classifier over n-grams of one to four characters, which ONNX Runtime counts itself. Its input is
`letters` INT64 [batch, 256], code points as `steps.letters` makes them; its output `languages` FP32 [batch, 5] has the
probability of each of LABELS. It learns from `sentences.txt`, with a language and a sentence in each line, and needs
numpy and onnx.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from steps import LENGTH, letters

LABELS = ("de", "en", "es", "fr", "it")  # as `labels` of the step that asks it
_LONGEST = 4  # characters of an n-gram
_SMOOTHING = 0.2  # of n-grams that were not seen in a language
_OPSET = 17


def ngrams(text: str) -> Iterator[tuple[int, ...]]:
    points = [one for one in letters(text) if one]
    for size in range(1, _LONGEST + 1):
        for at in range(len(points) - size + 1):
            yield tuple(points[at : at + size])


def learned(lines: list[str]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The n-grams, shorter ones first, and the logarithm of how likely each is in each language."""
    counts: dict[str, Counter[tuple[int, ...]]] = {label: Counter() for label in LABELS}
    for line in lines:
        label, _, sentence = line.partition(" ")
        counts[label].update(ngrams(sentence))
    known = sorted({one for counter in counts.values() for one in counter}, key=lambda one: (len(one), one))
    table = np.array([[counts[label][one] + _SMOOTHING for label in LABELS] for one in known])
    sizes = np.array([len(one) for one in known])
    for size in range(1, _LONGEST + 1):
        rows = sizes == size
        table[rows] /= table[rows].sum(axis=0)
    return known, np.log(table)


def graph_of(known: list[tuple[int, ...]], weights: np.ndarray) -> onnx.GraphProto:
    sizes = [len(one) for one in known]
    starts = [sum(size for size in sizes if size < longest) for longest in range(1, _LONGEST + 1)]
    count = helper.make_node(
        "TfIdfVectorizer",
        ["letters"],
        ["counts"],
        mode="TF",
        min_gram_length=1,
        max_gram_length=_LONGEST,
        max_skip_count=0,
        ngram_counts=starts,
        ngram_indexes=list(range(len(known))),
        pool_int64s=[point for one in known for point in one],
    )
    return helper.make_graph(
        [
            count,
            helper.make_node("MatMul", ["counts", "weights"], ["sums"]),
            helper.make_node("Softmax", ["sums"], ["languages"], axis=-1),
        ],
        "language",
        [helper.make_tensor_value_info("letters", TensorProto.INT64, ["batch", LENGTH])],
        [helper.make_tensor_value_info("languages", TensorProto.FLOAT, ["batch", len(LABELS)])],
        [numpy_helper.from_array(weights.astype(np.float32), "weights")],
    )


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "language.onnx")
    lines = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    known, weights = learned(lines)
    model = helper.make_model(graph_of(known, weights), opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    onnx.save(model, path)
    print(f"{path}: {len(known)} n-grams of {len(lines)} sentences in {len(LABELS)} languages")


if __name__ == "__main__":
    main()
