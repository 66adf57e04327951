"""Data that every machine with Python already has, readers of what it has not, and what models need around both.

Text, for character-level language models:

>>> text = weft.data.python_docs()
>>> vocabulary = weft.data.Vocabulary.of(text)
>>> train, held_out = weft.data.split(vocabulary.encode(text))

Trees, for vertex functions:

>>> trees = weft.data.python_asts(["json.decoder"])
>>> graphs = weft.Graphs.from_children([tree.children for tree in trees])
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sentence", "Tree", "Vocabulary", "listops", "python_asts", "python_docs", "split", "sst", "tagged"]


def python_docs() -> str:
    """English prose, about 0.5 MB: the language reference that ``help("TOPIC")`` prints, inside every CPython.

    The topics of :mod:`pydoc_data.topics` in alphabetical order, with an empty line between them. The text follows
    the Python version, so results on it compare only within one version.

    Raises:
        RuntimeError: this Python was installed without ``pydoc_data`` (some distributions split the standard library).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError("weft.data.python_docs: this Python lacks the standard module pydoc_data.topics") from error
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics)) + "\n"


class Vocabulary:
    """The characters of a text, numbered in code point order from 0.

    Args:
        characters: the characters, each once; duplicates are dropped and the order does not matter.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters: list[str] = sorted(set(characters))
        self._index = {character: i for i, character in enumerate(self.characters)}

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """The vocabulary of exactly the characters that occur in `text`."""
        return cls(text)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Indices of the characters of `text`: int64, shape ``(len(text),)``.

        Raises:
            ValueError: a character is not in the vocabulary; the message names it and its position.
        """
        index = self._index
        try:
            return torch.tensor([index[character] for character in text], dtype=torch.int64)
        except KeyError:
            position = next(i for i, character in enumerate(text) if character not in index)
            raise ValueError(
                f"Vocabulary.encode: text[{position}] is {text[position]!r}, which is not among the "
                f"{len(self)} characters of the vocabulary"
            ) from None

    def decode(self, indices: Tensor | Iterable[int]) -> str:
        """The text of `indices`, integers in ``[0, len(self))`` of shape ``(N,)``.

        Raises:
            ValueError: an index lies outside the vocabulary.
        """
        values = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        for position, value in enumerate(values):
            if not 0 <= value < len(self):
                raise ValueError(
                    f"Vocabulary.decode: indices[{position}] is {value}, outside the {len(self)} characters"
                )
        return "".join(self.characters[value] for value in values)


def split(tokens: Tensor, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """Splits a sequence of shape ``(N, ...)`` in time: the first part to train on, the last `held_out` of it to test.

    The held-out part is ``floor(N * held_out)`` tokens long; both are views of `tokens`.

    Raises:
        ValueError: `held_out` lies outside ``[0, 1]``.
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"split: held_out must lie in [0, 1], got {held_out}")
    boundary = tokens.shape[0] - int(tokens.shape[0] * held_out)
    return tokens[:boundary], tokens[boundary:]


@dataclass(frozen=True)
class Tree:
    """A tree with a symbol and a label at each vertex, as lists with one entry per vertex.

    Vertices are numbered in post-order: a vertex after all its descendants, siblings from left to right, the root last.
    ``Graphs.from_children([tree.children for tree in trees])`` is a batch of them.

    Attributes:
        children: the children of each vertex, in order.
        symbols: what stands at each vertex.
        labels: what is to be predicted of each vertex.
    """

    children: list[list[int]]
    symbols: list[str | None]
    labels: list[int]


def sst(path: str | os.PathLike[str]) -> list[Tree]:
    """One file of the Stanford Sentiment Treebank (Socher et al. 2013) in bracket format: a tree in each line.

    Symbols are the words as in the file at the leaves, None at inner vertices; labels are the sentiments 0 to 4. The
    file is UTF-8; only space, tab, CR and LF separate, as words hold no-break spaces. Empty lines are skipped.

    Raises:
        ValueError: malformed brackets or labels; the message says in which line, counted from 1.
    """
    with open(path, encoding="utf-8", newline="\n") as file:
        trees = []
        for number, line in enumerate(file, 1):
            tokens = re.findall(r"[()]|[^() \t\r\n]+", line)
            if tokens:
                trees.append(_bracketed(tokens, f"weft.data.sst: {os.fspath(path)}: line {number}: "))
        return trees


def _bracketed(tokens: list[str], where: str) -> Tree:
    tree = Tree([], [], [])
    # Of each open bracket: its label, its word, its children.
    opened: list[tuple[int, list[str], list[int]]] = []
    rest = iter(enumerate(tokens))
    for place, token in rest:
        if token == "(":
            if not opened and place > 0:
                raise ValueError(f"{where}more than one tree")
            _, label = next(rest, (0, "the end"))
            if label not in ("0", "1", "2", "3", "4"):
                raise ValueError(f"{where}a label must be one of 0 to 4, got {label!r}")
            opened.append((int(label), [], []))
        elif not opened:
            raise ValueError(f"{where}expected an opening bracket, got {token!r}")
        elif token == ")":
            label, words, children = opened.pop()
            if len(words) + bool(children) != 1:
                raise ValueError(f"{where}a bracket must hold one word or trees, got {' '.join(words) or 'nothing'!r}")
            tree.children.append(children)
            tree.symbols.append(words[0] if words else None)
            tree.labels.append(label)
            if opened:
                opened[-1][2].append(len(tree.children) - 1)
        else:
            opened[-1][1].append(token)
    if opened:
        raise ValueError(f"{where}{len(opened)} brackets are not closed")
    return tree


@dataclass(frozen=True)
class Sentence:
    """A sentence with a tag for each word.

    Attributes:
        words: as they stand in the text.
        tags: one for each word.
    """

    words: list[str]
    tags: list[str]


def tagged(path: str | os.PathLike[str]) -> list[Sentence]:
    """Sentences of tagged words, a sentence in each line: ``The|O Mad|I-ORG Capsule|I-ORG``, as WikiNER has them.

    The tag follows the last ``|`` of a word. The file is UTF-8; only space, tab, CR and LF separate. Empty lines are
    skipped.

    Raises:
        ValueError: a word has no tag; the message says in which line, counted from 1.
    """
    with open(path, encoding="utf-8", newline="\n") as file:
        sentences = []
        for number, line in enumerate(file, 1):
            found = [token.rpartition("|") for token in re.findall(r"[^ \t\r\n]+", line)]
            for word, bar, rest in found:
                if not bar:
                    raise ValueError(f"weft.data.tagged: {os.fspath(path)}: line {number}: {word or rest!r} has no tag")
            if found:
                sentences.append(Sentence([word for word, _, _ in found], [tag for _, _, tag in found]))
        return sentences


_MODULES = (
    "argparse",
    "configparser",
    "difflib",
    "doctest",
    "fractions",
    "ftplib",
    "http.client",
    "imaplib",
    "inspect",
    "ipaddress",
    "logging",
    "mailbox",
    "optparse",
    "pickle",
    "statistics",
    "subprocess",
    "tarfile",
    "typing",
    "urllib.request",
    "xml.dom.minidom",
)


def python_asts(modules: Iterable[str] | None = None) -> list[Tree]:
    """The syntax trees of functions in Python modules of the running interpreter: trees of any arity on every machine.

    One tree for each ``def`` or ``async def`` that is not inside another one, methods included, in source order.
    Children are those of :func:`ast.iter_child_nodes` without ``Load``, ``Store`` and ``Del``; symbols are the names of
    the nodes' classes; labels are all the module's position in `modules`. The trees follow the Python version, so
    results on them compare only within one version.

    Args:
        modules: names, dotted ones too; by default 20 modules of the standard library.

    Raises:
        TypeError: `modules` is one str, or a name is none.
        ValueError: a module is unknown or has no source.
    """
    names = _MODULES if modules is None else modules
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"weft.data.python_asts: modules must be names of modules, got {names!r}")
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"weft.data.python_asts: a name must be a str, got {type(name).__name__}")
    return [
        _syntax_tree(function, label)
        for label, name in enumerate(names)
        for function in _outermost_functions(ast.parse(_source(name)))
    ]


def _source(name: str) -> str:
    package = name.rpartition(".")[0]
    try:
        path = importlib.import_module(package).__path__ if package else None
        # What is frozen into the interpreter has its source in the file that the second finds.
        found = [importlib.util.find_spec(name), importlib.machinery.PathFinder.find_spec(name, path)]
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"weft.data.python_asts: there is no module {name!r} ({error})") from None
    if found == [None, None]:
        raise ValueError(f"weft.data.python_asts: there is no module {name!r}")
    for loader in (spec.loader for spec in found if spec is not None):
        with contextlib.suppress(ImportError):
            text = loader.get_source(name) if hasattr(loader, "get_source") else None
            if text is not None:
                return text
    raise ValueError(f"weft.data.python_asts: module {name!r} has no source")


def _outermost_functions(module: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        else:
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _syntax_tree(function: ast.AST, label: int) -> Tree:
    tree = Tree([], [], [])
    # Each node that has been entered, what remains of its children, and the vertices of those that are done.
    entered: list[tuple[ast.AST, Iterator[ast.AST], list[int]]] = [(function, ast.iter_child_nodes(function), [])]
    while entered:
        node, rest, done = entered[-1]
        child = next((child for child in rest if not isinstance(child, (ast.Load, ast.Store, ast.Del))), None)
        if child is not None:
            entered.append((child, ast.iter_child_nodes(child), []))
            continue
        entered.pop()
        tree.children.append(done)
        tree.symbols.append(type(node).__name__)
        tree.labels.append(label)
        if entered:
            entered[-1][2].append(len(tree.children) - 1)
    return tree


_OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MAX": max,
    "MIN": min,
    "MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "SM": lambda values: sum(values) % 10,
}


def listops(count: int, *, max_depth: int = 5, max_arity: int = 5, seed: int = 0) -> list[Tree]:
    """Random expressions whose value is a digit (ListOps, Nangia and Bowman 2018).

    Operators MAX, MIN, MED (median, rounded down) and SM (sum modulo 10) take 2 to `max_arity` arguments, digits or
    expressions; at most `max_depth` operators lie one inside the other, at least one. Symbols are ``"MAX"``, ... or
    ``"7"``; labels are the value at each vertex. The same arguments give the same list.

    Raises:
        ValueError: `count`, `max_depth` or `max_arity` is below 0, 1 or 2.
    """
    for name, value, least in (("count", count, 0), ("max_depth", max_depth, 1), ("max_arity", max_arity, 2)):
        if value < least:
            raise ValueError(f"weft.data.listops: {name} must be at least {least}, got {value}")
    draw = random.Random(seed)
    return [_expression(draw, max_depth, max_arity) for _ in range(count)]


def _expression(draw: random.Random, max_depth: int, max_arity: int) -> Tree:
    # Below one operator on average, so that expressions are finite at any depth.
    chance = 0.9 / ((2 + max_arity) / 2)
    tree = Tree([], [], [])

    def below(n: int) -> int:
        return int(draw.random() * n)

    def operator() -> tuple[str, int, list[int]]:
        return list(_OPERATORS)[below(len(_OPERATORS))], 2 + below(max_arity - 1), []

    def add(symbol: str, children: list[int], label: int) -> None:
        tree.children.append(children)
        tree.symbols.append(symbol)
        tree.labels.append(label)
        if opened:
            opened[-1][2].append(len(tree.children) - 1)

    opened = [operator()]
    while opened:
        symbol, arity, children = opened[-1]
        if len(children) == arity:
            opened.pop()
            add(symbol, children, _OPERATORS[symbol]([tree.labels[child] for child in children]))
        elif len(opened) < max_depth and draw.random() < chance:
            opened.append(operator())
        else:
            digit = below(10)
            add(str(digit), [], digit)
    return tree
