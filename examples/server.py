"""An OpenAI-compatible server around a transformers model: `POST /v1/completions`, streamed or whole.

The model runs in one thread, a request at a time; the store runs on the loop, so that the next requests load and others
save meanwhile. A client that goes away ends its request: at the next token if the model is at it, at once if it still
loads; what was computed until then stays stored. One that stops reading is cut off after `--patience` seconds.

    python examples/server.py --port 8000
    curl -N localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 20, "stream": true}'
    kvtier top http://localhost:8000/metrics

Plain asyncio streams speak HTTP here, to show what happens to a connection; a service would use a web framework.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, generate_latest
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvtier
from kvtier.adapters.transformers import Loaded, kv_layout, load_prefix, save_prefix
from kvtier.metrics.prometheus import StoreCollector
from kvtier.metrics.requests import RequestMetrics

LARGEST_BODY = 1 << 20
LOADED_AHEAD = 3  # requests beside the running one that may hold their KV in memory: the others wait without any
UNREAD_BYTES = 16 << 10  # of an answer, kept for a client that is slow to read; the kernel keeps about as much again
STEP_TOKENS = 128  # computed at a time: a request that was given up ends after at most that many


class Service:
    """A model, a store, and a way to turn text into tokens and back."""

    def __init__(
        self,
        model: PreTrainedModel,
        store: kvtier.KVStore,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        *,
        cached: bool = True,
        patience: float = 10.0,
    ) -> None:
        self.model = model
        self.store = store
        self.encode = encode
        self.decode = decode
        self.cached = cached
        self.patience = patience
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(store))
        self.metrics = RequestMetrics(self.registry)
        self.turn = asyncio.Lock()  # one model, one request at a time
        self.ahead = asyncio.Semaphore(1 + LOADED_AHEAD)
        self.figures = {"requests": 0, "loaded_tokens": 0, "prompt_tokens": 0, "gone": 0, "active": 0}

    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> int:
        """Run tokens on top of the cache; return the next one."""
        with torch.no_grad():
            output = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    async def in_thread(self, ids: torch.Tensor, cache: DynamicCache) -> int:
        """Run `forward` beside the loop. Cancelled, it returns when the model has let go of the cache."""
        job = asyncio.ensure_future(asyncio.to_thread(self.forward, ids, cache))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait({job})
            raise

    async def keep(self, ids: torch.Tensor, cache: DynamicCache, *, start: int, lossy: bool) -> None:
        """Store what the cache holds; also in a request that is being cancelled, which waits for it."""
        save = asyncio.ensure_future(save_prefix(self.model, self.store, ids, cache, start=start, lossy=lossy))
        while not save.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({save})
        if (error := save.exception()) is not None:
            print(f"not stored: {error!r}", file=sys.stderr)

    async def load(self, ids: torch.Tensor) -> Loaded:
        """Return what is stored of a prompt."""
        if self.cached:
            return await load_prefix(self.model, self.store, ids)
        return Loaded(cache=DynamicCache(config=self.model.config), num_tokens=0, hits=(None,))

    async def generate(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        """Yield the answer's tokens."""
        began = time.perf_counter()
        ids = torch.tensor([prompt])
        ended = False
        try:
            async with self.ahead:
                loaded = await self.load(ids)
                self.figures["loaded_tokens"] += loaded.num_tokens
                self.figures["prompt_tokens"] += len(prompt)
                async with self.turn, aclosing(self.compute(ids, loaded, max_tokens)) as tokens:
                    first = True
                    async for token in tokens:
                        if first:
                            self.metrics.observe(
                                prompt_tokens=len(prompt),
                                loaded_tokens=loaded.num_tokens,
                                first_token_seconds=time.perf_counter() - began,
                            )
                        first = False
                        yield token
            ended = True
        finally:
            self.figures["gone"] += not ended

    async def compute(self, ids: torch.Tensor, loaded: Loaded, max_tokens: int) -> AsyncGenerator[int, None]:
        """Compute the rest of the prompt, then the answer; store what is new, also for a client that is gone."""
        cache, done, token = loaded.cache, loaded.num_tokens, 0  # one token of the prompt at least is left to compute
        try:
            while done < ids.shape[1]:
                step = ids[:, done : done + STEP_TOKENS]
                token = await self.in_thread(step, cache)
                done += step.shape[1]
            for number in range(max_tokens):
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
                yield token
                if number + 1 < max_tokens:
                    token = await self.in_thread(ids[:, -1:], cache)
        finally:
            done = cache.get_seq_length()  # a forward pass may have ended after its client was gone
            if self.cached and done > loaded.num_tokens:  # what is computed is worth keeping, whoever asked for it
                await self.keep(ids[:, :done], cache, start=loaded.num_tokens, lossy=loaded.lossy)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Return method, path and body of one HTTP request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.split("\r\n")
    method, path, _ = line.split(" ", 2)
    lengths = [field.split(":", 1)[1] for field in fields if field.lower().startswith("content-length:")]
    size = int(lengths[0]) if lengths else 0
    if size > LARGEST_BODY:
        raise ValueError("the body is too large")
    return method, path, await reader.readexactly(size)


def answer(status: str, body: object) -> bytes:
    """Return a whole HTTP answer."""
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content


async def send(service: Service, writer: asyncio.StreamWriter, content: bytes) -> None:
    """Write; wait while the client has too much left to read, but not for ever: the model waits as well.

    Raises:
        TimeoutError: it read nothing, or too little, for `patience` seconds.
    """
    writer.write(content)
    async with asyncio.timeout(service.patience):
        await writer.drain()


def tokens_of(service: Service, prompt: object) -> list[int]:
    """Return a request's prompt as tokens; it may be text, or tokens already."""
    if isinstance(prompt, list):
        return [int(token) for token in prompt]
    return service.encode(str(prompt))


async def complete(service: Service, body: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer one completion request, piece by piece if that was asked for."""
    try:
        wanted = json.loads(body)
        prompt, limit = tokens_of(service, wanted["prompt"]), int(wanted.get("max_tokens", 16))
        if not prompt or not 1 <= limit <= 1024:
            raise ValueError("a prompt and 1 to 1024 tokens are needed")  # noqa: TRY301  # one answer for all mistakes
    except (ValueError, KeyError, TypeError) as exc:
        writer.write(answer("400 Bad Request", {"error": {"message": str(exc), "type": "invalid_request_error"}}))
        return
    service.figures["requests"] += 1
    about = {"id": f"cmpl-{service.figures['requests']}", "object": "text_completion", "created": int(time.time())}
    async with aclosing(service.generate(prompt, limit)) as pieces:  # closed here, also by a client that is gone
        if not wanted.get("stream"):
            tokens = [token async for token in pieces]
            text = "".join(service.decode([token]) for token in tokens)
            choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": "length"}
            writer.write(answer("200 OK", {**about, "choices": [choice]}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async for token in pieces:
            choice = {"index": 0, "text": service.decode([token]), "token_ids": [token], "finish_reason": None}
            await send(service, writer, f"data: {json.dumps({**about, 'choices': [choice]})}\n\n".encode())
    writer.write(b"data: [DONE]\n\n")


async def connection(service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection; a client that closes it cancels the request."""
    service.figures["active"] += 1
    writer.transport.set_write_buffer_limits(high=UNREAD_BYTES)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
    try:
        async with asyncio.timeout(service.patience):
            method, path, body = await read_request(reader)
        if (method, path) == ("POST", "/v1/completions"):
            work = asyncio.ensure_future(complete(service, body, writer))
            gone = asyncio.ensure_future(reader.read(1))  # nothing more is expected: it returns when the client leaves
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
            if not work.cancelled() and isinstance(error := work.exception(), Exception):
                raise error
        elif (method, path) == ("GET", "/metrics"):
            page = generate_latest(service.registry)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n\r\n" + page
            )
        elif (method, path) == ("GET", "/stats"):
            stats = service.store.stats()
            left = {"reads": stats.reads_under_way, "leased": stats.memory.leased, "tasks": len(asyncio.all_tasks())}
            writer.write(answer("200 OK", {**service.figures, **left}))
        else:
            writer.write(answer("404 Not Found", {"error": {"message": f"no {method} {path}"}}))
        writer.close()
        async with asyncio.timeout(service.patience):
            await writer.wait_closed()  # until the client has it all
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as exc:
        print(f"a request ended early: {exc!r}", file=sys.stderr)
    finally:
        writer.transport.abort()  # drops what was never read; nothing is left where the answer went out whole
        service.figures["active"] -= 1


def tiny_model() -> PreTrainedModel:
    """Return a model of random weights that reads bytes: for trying the server out within a second."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()
    return model


def real_model() -> tuple[PreTrainedModel, Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return SmolLM2-135M-Instruct and its tokenizer."""
    from kvtier.demo.model import load, prepare  # noqa: PLC0415  # needs the demo extra
    from kvtier.keys import user_cache_folder  # noqa: PLC0415

    model, tokenizer = load(prepare(user_cache_folder(), print))
    return model, lambda text: tokenizer(text).input_ids, tokenizer.decode


async def main(options: argparse.Namespace) -> None:
    """Serve until interrupted."""
    if options.tiny:
        model = tiny_model()
        encode: Callable[[str], list[int]] = lambda text: list(text.encode())  # noqa: E731
        decode: Callable[[list[int]], str] = lambda ids: bytes(ids).decode("latin-1")  # noqa: E731
    else:
        model, encode, decode = real_model()
    tiers: list[dict[str, object]] = [
        {"backend": "pinned-cpu", "capacity": options.memory},
        {"backend": "local-disk", "path": str(options.folder), "capacity": "4GiB"},
    ]
    if options.redis is not None:  # it may be away: then the other tiers serve
        redis = {"backend": "redis", "url": options.redis, "capacity": "1GiB", "required": False}
        tiers.append({**redis, "deadline_seconds": 1.0})
    config = {
        "chunk_tokens": options.chunk_tokens,
        "tiers": tiers,
        "memory": {"results_bytes": options.results},
    }
    namespace = kvtier.Namespace.from_model(model) if not options.tiny else kvtier.Namespace(model="tiny", revision="1")
    async with kvtier.open(config, namespace=namespace, layout=kv_layout(model)) as store:
        service = Service(model, store, encode, decode, cached=not options.no_cache, patience=options.patience)
        server = await asyncio.start_server(
            lambda reader, writer: connection(service, reader, writer), "127.0.0.1", options.port
        )
        async with server:
            print(f"serving on port {server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--port", type=int, default=8000, help="0 for any free one")
    flags.add_argument("--folder", type=Path, default=Path("kv"), help="where the disk tier keeps its files")
    flags.add_argument("--memory", default="1GiB", help="capacity of the memory tier")
    flags.add_argument("--results", default="1GiB", help="memory for the loaded KV of requests that wait or run")
    flags.add_argument("--redis", help="URL of a Redis or Valkey server for a third tier")
    flags.add_argument("--no-cache", action="store_true", help="compute every prompt, to compare")
    flags.add_argument("--patience", type=float, default=10.0, help="seconds for a client to send, or to read on")
    flags.add_argument("--chunk-tokens", type=int, default=256)
    flags.add_argument("--tiny", action="store_true", help="a model of random weights that starts at once")
    with suppress(KeyboardInterrupt):
        asyncio.run(main(flags.parse_args()))
