"""weft.data: the text inside CPython, and what a character-level model needs around it."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.data import Vocabulary, python_docs, split


def test_python_docs_is_the_same_english_text_every_time():
    text = python_docs()
    assert text == python_docs()
    assert 300_000 < len(text) < 1_500_000
    assert len(set(text)) < 200
    # Prose, not markup or source alone: the commonest English words make up a good part of it.
    words = text.split()
    assert sum(word in ("the", "of", "a", "is", "to", "and", "in") for word in words) > 0.15 * len(words)


def test_python_docs_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"pydoc_data\.topics"):
        python_docs()


@settings(derandomize=True, deadline=None)
@given(st.text(min_size=1))
def test_vocabulary_round_trip(text):
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(text),)
    assert len(vocabulary) == len(set(text))
    assert 0 <= tokens.min() and tokens.max() < len(vocabulary)
    assert vocabulary.decode(tokens) == text
    assert vocabulary.decode(tokens.tolist()) == text


def test_vocabulary_numbers_do_not_depend_on_order():
    assert Vocabulary("cab").characters == Vocabulary("bcaa").characters == ["a", "b", "c"]


def test_encode_names_the_unknown_character_and_its_place():
    with pytest.raises(ValueError, match=r"text\[2\] is 'x'.*3 characters"):
        Vocabulary("abc").encode("abx")
    assert Vocabulary("abc").encode("").shape == (0,)


@pytest.mark.parametrize("index", [-1, 3])
def test_decode_refuses_what_is_outside(index):
    with pytest.raises(ValueError, match=rf"indices\[1\] is {index}"):
        Vocabulary("abc").decode(torch.tensor([0, index]))


@pytest.mark.parametrize(("size", "held_out", "expected"), [(100, 0.1, 10), (19, 0.1, 1), (0, 0.1, 0), (7, 1.0, 7)])
def test_split_keeps_the_last_part_apart(size, held_out, expected):
    tokens = torch.arange(size)
    train, test = split(tokens, held_out)
    assert len(test) == expected
    assert torch.equal(torch.cat([train, test]), tokens)


@pytest.mark.parametrize("held_out", [-0.1, 1.5, float("nan")])
def test_split_refuses_a_part_that_is_none(held_out):
    with pytest.raises(ValueError, match="held_out must lie in"):
        split(torch.arange(3), held_out)
