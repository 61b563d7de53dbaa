"""Reasoning: how each family of models writes its thoughts before an answer, and how they are told apart from it."""

from __future__ import annotations

from penstock.text.reasoning.answer import AnswerParser
from penstock.text.reasoning.formats import FORMATS, ReasoningFormat, choose
from penstock.text.reasoning.splitter import Splitter
from penstock.text.reasoning.tracker import ReasoningTracker

__all__ = ["FORMATS", "AnswerParser", "ReasoningFormat", "ReasoningTracker", "Splitter", "choose"]
