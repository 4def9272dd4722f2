"""`examples/server.py` with fifty clients at a time, some of which leave."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "examples" / "server.py"
SHARED = "The quick brown fox jumps over the lazy dog. " * 12  # 540 bytes, a token each


@pytest.fixture
async def port(tmp_path):
    """A running server with a tiny model; it must end well."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), "--tiny", "--port", "0", "--folder", str(tmp_path / "kv"),
        "--chunk-tokens", "32", "--memory", "4MiB", "--patience", "2",
        "--results", "4MiB",  # seven of the prompts, not fifty: who waits must not hold what it loaded
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    yield int(line.split()[-1])
    assert process.returncode is None, "the server died"
    process.terminate()
    await process.wait()
    process._transport.close()


async def ask(port, prompt, *, max_tokens=4, stream=True, leave_after=None):
    """Post a completion; return the text, or None after leaving early."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    try:
        if leave_after == 0:
            await writer.drain()
            return None
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        if not stream:
            return json.loads(await reader.read())["choices"][0]["text"]
        text, pieces = "", 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return text
            text += json.loads(line[6:])["choices"][0]["text"]
            pieces += 1
            if pieces == leave_after:
                return None
        raise AssertionError("the stream ended early")
    finally:
        writer.close()
        await writer.wait_closed()


async def stats(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stats HTTP/1.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    figures = json.loads(await reader.read())
    writer.close()
    await writer.wait_closed()
    return figures


async def settled(port, *, tasks=1 << 30):
    """Wait until no request is left, and no more than so many tasks; return the figures."""
    async with asyncio.timeout(120):
        while (figures := await stats(port))["active"] > 1 or figures["tasks"] > tasks:  # the asking one is active
            await asyncio.sleep(0.05)
    return figures


@pytest.mark.timeout(280)
async def test_fifty_clients_of_which_some_leave(port):
    alone = await ask(port, SHARED + "client 0")
    assert len(alone) == 4
    before = await settled(port)
    leaving = {number: number % 3 for number in range(0, 50, 5)}  # at once, after one token, after two
    clients = [
        ask(port, SHARED + f"client {number}", stream=number % 2 == 0 or number in leaving,
            leave_after=leaving.get(number))
        for number in range(50)
    ]  # fmt: skip
    texts = await asyncio.gather(*clients)
    assert all((text is None) == (number in leaving) for number, text in enumerate(texts))
    after = await settled(port, tasks=before["tasks"])
    assert after["reads"] == after["leased"] == 0
    assert after["loaded_tokens"] > 0.8 * (after["prompt_tokens"] - before["prompt_tokens"])
    assert await ask(port, SHARED + "client 0", stream=False) == alone


@pytest.mark.timeout(280)
async def test_what_a_client_that_left_had_computed_is_stored(port):
    prompt = "An answer nobody waits for. " * 20
    assert await ask(port, prompt, max_tokens=200, leave_after=40) is None
    left = await settled(port)
    assert left["gone"] == 1
    assert await ask(port, prompt) is not None
    assert (await settled(port))["loaded_tokens"] - left["loaded_tokens"] >= len(prompt) // 32 * 32 - 32


@pytest.mark.timeout(280)
async def test_a_client_that_stops_reading_is_cut_off_and_leaves_nothing(port):
    await ask(port, "warm")
    before = await settled(port)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        body = json.dumps({"prompt": SHARED, "max_tokens": 1024, "stream": True}).encode()
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            while (await stats(port))["requests"] == before["requests"]:
                await asyncio.sleep(0.05)
            assert await ask(port, SHARED + "another") is not None  # in the model's queue behind the deaf one
        after = await settled(port, tasks=before["tasks"])
    assert after["gone"] == before["gone"] + 1
    assert after["reads"] == after["leased"] == 0


@pytest.mark.timeout(280)
async def test_a_client_that_never_asks_is_cut_off(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/comp")
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_mistakes_are_answered(port):
    for body, status in ((b"{}", b"400"), (b"no json", b"400"), (b'{"prompt": "a", "max_tokens": 0}', b"400")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.read()).split(b" ")[1] == status
        writer.close()
        await writer.wait_closed()


async def test_prompts_may_be_tokens_and_metrics_are_shown(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": list(b"as tokens"), "max_tokens": 3}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    choice = json.loads((await reader.read()).split(b"\r\n\r\n", 1)[1])["choices"][0]
    writer.close()
    assert len(choice["token_ids"]) == 3
    assert choice["text"] == await ask(port, "as tokens", max_tokens=3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    assert 'kvtier_tier_up{tier="local-disk"} 1.0' in page
    assert "kvtier_first_token_seconds_count 2.0" in page
    assert 'kvtier_prompt_tokens_total{result="computed"} 18.0' in page
