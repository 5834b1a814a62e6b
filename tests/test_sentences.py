"""The page of all sentences is the one that the rules write, and they read as sentences."""

from __future__ import annotations

import re

from tests.sentences import PAGE, sentences


def test_the_page_has_the_sentences_of_the_package() -> None:
    assert PAGE.read_text("utf-8") == sentences(), "python -m tests.sentences writes it anew"


def test_a_sentence_begins_with_a_capital_letter_a_figure_or_a_name() -> None:
    """A template that ends as a sentence does and begins with a small letter is the rest of another."""
    entries = re.findall(r"^- (.+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    whole = [entry for entry in entries if re.match(r"[a-z]+ ", entry) and entry.endswith(".") and ". " in entry]
    assert len(entries) > 150 and not whole, whole


def test_no_sentence_has_a_phrase_that_was_rewritten() -> None:
    """The phrases that native readers had to decode."""
    text = PAGE.read_text("utf-8")
    for phrase in ("What is stored", "so are", "more than there are", "lie free", "in the end", "to blame"):
        assert phrase not in text, phrase
