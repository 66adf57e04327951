"""Text that every machine with Python already has, and what a character-level language model needs around it.

>>> text = python_docs()
>>> vocabulary = Vocabulary.of(text)
>>> train, held_out = split(vocabulary.encode(text))
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Vocabulary", "python_docs", "split"]


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
