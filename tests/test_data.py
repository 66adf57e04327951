"""weft.data: the text and the syntax trees inside CPython, ListOps, treebanks, and what models need around them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys

import pytest
import torch
import weft
from hypothesis import given
from hypothesis import strategies as st
from weft.data import Tree, Vocabulary, listops, python_asts, python_docs, split, sst

from tests.common import treebank


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


def check_post_order(tree: Tree) -> None:
    """Every vertex but the last is the child of one later vertex, siblings in order, subtrees unbroken."""
    n = len(tree.children)
    assert len(tree.symbols) == len(tree.labels) == n
    size = []
    for v, children in enumerate(tree.children):
        size.append(1 + sum(size[child] for child in children))
        # Subtrees lie one after the other before their parent.
        at = v - size[v] + 1
        for child in children:
            at += size[child]
            assert child == at - 1
    assert size[-1] == n
    weft.Graphs.from_children([tree.children])


SENTENCE = "(3 (2 It) (4 (2 's) (3 a\u00a0b)))"


def test_sst_reads_a_tree_per_line(tmp_path):
    file = tmp_path / "trees.txt"
    file.write_bytes(f"{SENTENCE}\r\n\n \t\r\n(0\t(1  (2 \\/)(3 caf\u00e9 )) ( 4 -LRB-))\n(2 one)".encode())
    trees = sst(file)
    assert trees == sst(str(file))
    assert trees[0] == Tree([[], [], [], [1, 2], [0, 3]], ["It", "'s", "a\u00a0b", None, None], [2, 2, 3, 4, 3])
    assert trees[1] == Tree([[], [], [0, 1], [], [2, 3]], ["\\/", "caf\u00e9", None, "-LRB-", None], [2, 3, 1, 4, 0])
    assert trees[2] == Tree([[]], ["one"], [2])
    for tree in trees:
        check_post_order(tree)
    with pytest.raises(dataclasses.FrozenInstanceError):
        trees[0].labels = []


UNBALANCED = ["(3 (2 a)", "(3 (2 a)))", "(", ")", "a", "(2 a) (2 b)", "((2 a))"]
MISLABELLED = ["(5 a)", "(-1 a)", "(a)", "()", "(2.0 a)", "(\u00b2 a)", "(2a)"]
MISFILLED = ["(2)", "(2 a (2 b))", "(2 a b)", "(2 (2 a) b)", "(2 (2 ))"]


@pytest.mark.parametrize("line", UNBALANCED + MISLABELLED + MISFILLED)
def test_sst_says_in_which_line_brackets_or_labels_are_malformed(tmp_path, line):
    file = tmp_path / "trees.txt"
    # Characters at which str.splitlines would break a line do not count.
    file.write_text(f"(2 a\x85b\u2028c)\n\n{line}\n(2 a)\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: "):
        sst(file)


def test_sst_reads_deep_trees(tmp_path):
    file = tmp_path / "trees.txt"
    file.write_text("(2 (2 a) " * 20_000 + "(2 b)" + ")" * 20_000)
    (tree,) = sst(file)
    assert len(tree.children) == 40_001 and weft.Graphs.from_children([tree.children]).num_levels == 20_001


def test_the_treebank_itself():
    trees = sst(treebank() / "train.txt")
    assert len(trees) == 8544
    assert sum(len(tree.children) for tree in trees) == 318_582
    # Known from the papers: 8544 sentences, of which these many have each of the five sentiments.
    assert [sum(tree.labels[-1] == label for tree in trees) for label in range(5)] == [1092, 2218, 1624, 2322, 1288]
    for tree in trees[:300]:
        check_post_order(tree)
        assert {len(children) for children in tree.children} <= {0, 2}
        assert [symbol is None for symbol in tree.symbols] == [bool(children) for children in tree.children]


def test_python_asts_are_the_outermost_functions_in_order(tmp_path, monkeypatch):
    (tmp_path / "weft_sample.py").write_text(
        "class A:\n"
        "    @property\n"
        "    def first(self): return self.x\n"
        "    async def second(self):\n"
        "        def inside(): pass\n"
        "        class Also:\n"
        "            def inside(self): pass\n"
        "if True:\n"
        "    for x in y:\n"
        "        def third(a, *b): a = lambda: -1\n"
        "else:\n"
        "    def fourth(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trees = python_asts(["json.decoder", "weft_sample"])
    sample = [tree for tree in trees if tree.labels[0] == 1]
    for tree in trees:
        check_post_order(tree)
        assert set(tree.labels) <= {0, 1} and len(set(tree.labels)) == 1
        assert not {"Load", "Store", "Del"} & set(tree.symbols)
    assert [tree.symbols[-1] for tree in sample] == ["FunctionDef", "AsyncFunctionDef", "FunctionDef", "FunctionDef"]
    assert sample[0] == Tree(
        [[], [0], [], [2], [3], [], [1, 4, 5]],
        ["arg", "arguments", "Name", "Attribute", "Return", "Name", "FunctionDef"],
        [1] * 7,
    )
    assert sample[1].symbols.count("FunctionDef") == 2 and "ClassDef" in sample[1].symbols
    assert sample[2].symbols[:3] == ["arg", "arg", "arguments"] and "Lambda" in sample[2].symbols


def test_python_asts_of_twenty_modules_by_default():
    trees = python_asts()
    assert python_asts(["json.decoder"]) == python_asts(["json.decoder"])
    assert {tree.labels[0] for tree in trees} == set(range(20))
    assert len(trees) > 1500 and max(len(children) for tree in trees for children in tree.children) > 10
    assert python_asts([]) == []


def test_python_asts_of_modules_that_are_frozen():
    assert python_asts(["os"]) and python_asts(["collections.abc"]) is not None


@pytest.mark.parametrize("modules", ["json", 3, [3], [None]])
def test_python_asts_takes_names(modules):
    with pytest.raises(TypeError, match="python_asts"):
        python_asts(modules)


@pytest.mark.parametrize("name", ["no_such_module", "json.no_such_module", "json.decoder.x", "sys", "__main__", ""])
def test_python_asts_needs_a_module_with_source(name):
    with pytest.raises(ValueError, match="python_asts"):
        python_asts(["json", name])


@pytest.mark.parametrize(("depth", "arity"), [(1, 2), (5, 5), (40, 3), (2, 50), (10_000, 5)])
def test_listops_are_expressions_with_their_values(depth, arity):
    trees = listops(200, max_depth=depth, max_arity=arity, seed=3)
    assert trees == listops(200, max_depth=depth, max_arity=arity, seed=3)
    assert trees != listops(200, max_depth=depth, max_arity=arity, seed=4)
    assert len(trees) == 200
    seen = set()
    for tree in trees:
        check_post_order(tree)
        depths = []
        for symbol, children, label in zip(tree.symbols, tree.children, tree.labels, strict=True):
            values = [tree.labels[child] for child in children]
            depths.append(1 + max(depths[child] for child in children) if children else 0)
            if children:
                value = {
                    "MAX": lambda v: max(v),
                    "MIN": lambda v: min(v),
                    "MED": lambda v: math.floor(statistics.median(v)),
                    "SM": lambda v: sum(v) % 10,
                }[symbol](values)
                assert label == value and 2 <= len(children) <= arity
                seen.add((symbol, len(children)))
            else:
                assert symbol == str(label) and 0 <= label <= 9
        assert 1 <= depths[-1] <= depth
    assert {symbol for symbol, _ in seen} == {"MAX", "MIN", "MED", "SM"}
    assert max(n for _, n in seen) == arity


def test_listops_refuses_what_cannot_be():
    assert listops(0) == []
    for wrong in ({"count": -1}, {"count": 1, "max_depth": 0}, {"count": 1, "max_arity": 1}):
        with pytest.raises(ValueError, match="listops"):
            listops(**wrong)


def test_tagged_sentences(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("The|O Mad|I-ORG a|b|X\t\N{NO-BREAK SPACE}c|Y\r\n\n|||Z\n".encode())
    assert weft.data.tagged(path) == [
        weft.data.Sentence(["The", "Mad", "a|b", "\N{NO-BREAK SPACE}c"], ["O", "I-ORG", "X", "Y"]),
        weft.data.Sentence(["||"], ["Z"]),
    ]
    path.write_text("a|B\n\nc|D e\n")
    with pytest.raises(ValueError, match=r"weft\.data\.tagged: .*: line 3: 'e' has no tag"):
        weft.data.tagged(str(path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        weft.data.Sentence(["a"], ["B"]).words = []
