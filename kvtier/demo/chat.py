"""One sitting: a process of its own that opens the store, goes on with the conversation, measures, and ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import kvtier
from kvtier.adapters.transformers import cached_generate, kv_layout
from kvtier.demo.conversation import QUESTIONS, answer_text, first_turn, next_turn
from kvtier.demo.model import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK_TOKENS = 64  # small chunks for a small model: less of a turn is left to compute
ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What was measured of one turn; times to the first token in seconds, with and without the store."""

    number: int
    sitting: int
    prompt_tokens: int
    loaded_tokens: int
    tiers: dict[str, int]
    warm_seconds: float
    cold_seconds: float
    equal: bool
    question: str
    answer: str


class FirstToken:
    """A streamer that notes when the first new token came, and tells of each."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.began: float = time.perf_counter()
        self.seconds: float = 0.0
        self._tell = tell
        self._puts = 0

    def put(self, _value: torch.Tensor) -> None:
        """Called by `generate`: first with the prompt, then with each new token."""
        self._puts += 1
        if self._puts == 2:  # noqa: PLR2004  # the prompt came first
            self.seconds = time.perf_counter() - self.began
        if self._puts > 1:
            self._tell()

    def end(self) -> None:
        """Called by `generate` at the end."""


def config(folder: Path) -> dict[str, object]:
    """Return the demo's tiers: some DRAM over a folder on disk."""
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "512MiB"},
            {"backend": "local-disk", "path": str(folder), "capacity": "2GiB"},
        ],
    }


class Sitting:
    """The model, its store and the bars of one process."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, store: kvtier.KVStore, progress: Progress
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._store = store
        self._progress = progress

    async def ask(self, prompt: list[int], number: int) -> tuple[Turn, list[int]]:
        """Answer one prompt with the store and, to compare, without; return the measurements and all tokens said."""
        question = QUESTIONS[number]
        ids = torch.tensor([prompt])
        warm = self._watch(f"turn {number + 1}: with kvtier")
        out = await cached_generate(
            self._model, self._store, ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, streamer=warm
        )
        cold = self._watch(f"turn {number + 1}: without, to compare")
        plain = await asyncio.to_thread(self._generate, ids, cold)
        said = out.sequences[0].tolist()
        turn = Turn(
            number=number + 1,
            sitting=0,
            prompt_tokens=len(prompt),
            loaded_tokens=out.num_loaded,
            tiers=dict(out.tiers),
            warm_seconds=warm.seconds,
            cold_seconds=cold.seconds,
            equal=said == plain[0].tolist(),
            question=question,
            answer=answer_text(self._tokenizer, said[len(prompt) :], cut=len(said) == len(prompt) + ANSWER_TOKENS),
        )
        return turn, said

    def _watch(self, what: str) -> FirstToken:
        task = self._progress.add_task(what, total=ANSWER_TOKENS)
        return FirstToken(lambda: self._progress.advance(task))

    def _generate(self, ids: torch.Tensor, streamer: FirstToken) -> torch.Tensor:
        tokens: torch.Tensor = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            streamer=streamer,
        )
        return tokens


async def sit(options: argparse.Namespace, console: Console) -> None:
    """Go on with the conversation for `options.count` questions; write transcript and measurements to files."""
    model, tokenizer = load(options.model)
    model.generate(torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 3), max_new_tokens=2)  # first-call costs
    said: list[int] = json.loads(options.transcript.read_text()) if options.transcript.exists() else []
    namespace = kvtier.Namespace.from_model(model)
    layout = kv_layout(model)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    async with kvtier.open(config(options.store), namespace=namespace, layout=layout) as store:
        for number in range(options.first, options.first + options.count):
            question = QUESTIONS[number]
            prompt = next_turn(tokenizer, said, question) if said else first_turn(tokenizer, question)
            console.print(f"[bold]visitor[/bold] {question}")
            with Progress(*columns, console=console, transient=True) as progress:
                turn, said = await Sitting(model, tokenizer, store, progress).ask(prompt, number)
            console.print(f"[bold green]model[/bold green]   {turn.answer}\n")
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(replace(turn, sitting=options.sitting))) + "\n")
        await store.flush()
    options.transcript.write_text(json.dumps(said))


def main() -> None:
    """Run one sitting as the parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "store", "transcript", "results"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("sitting", "first", "count"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asyncio.run(sit(parser.parse_args(), Console()))


if __name__ == "__main__":
    main()
