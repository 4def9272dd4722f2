"""What is talked about: a long system prompt, the visitor's questions, and how turns become tokens."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "Good morning! When was the lighthouse built, and how many steps does the tower have?",
    "How much do two adults and three children pay?",
    "Who was Marta Lind?",
    "Thank you. I am back after lunch: when is the fog horn sounded?",
    "Can my grandmother see the view without climbing the stairs?",
    "And when does the last ferry leave in the summer?",
)
SITTINGS = (3, 2, 1)  # how many of them are asked before the process ends and another one goes on


def system_prompt() -> str:
    """Return the museum's handbook, about 1,700 tokens: what every conversation begins with."""
    return files(__package__).joinpath("handbook.txt").read_text(encoding="utf-8")


def first_turn(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the tokens of the system prompt and the first question, up to where the model answers."""
    text = f"<|im_start|>system\n{system_prompt()}<|im_end|>\n{_question(question)}"
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def next_turn(tokenizer: PreTrainedTokenizerBase, said: list[int], question: str) -> list[int]:
    """Return the tokens of the conversation so far and a new question.

    The tokens that were said are kept as they are: written out as text and split again they could differ, and then no
    stored prefix would be found.
    """
    end = tokenizer.eos_token_id
    closed = said if said[-1] == end else [*said, end]
    return closed + list(tokenizer(f"\n{_question(question)}", add_special_tokens=False).input_ids)


def answer_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, cut: bool) -> str:
    """Return an answer as a person reads it, with dots where it was `cut` off."""
    text = " ".join(str(tokenizer.decode(tokens, skip_special_tokens=True)).split())
    return f"{text} ..." if cut else text


def _question(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
