"""Values of 32 MiB to and from an S3 server, four in flight, beside one `curl --parallel` and aioboto3 as it comes.

Two servers on loopback, on the cores that the clients use: nginx with WebDAV in memory (no S3, but as good as free: it
shows what a client costs) and SeaweedFS (a real one, which is the limit for writes). The server's share of the
processors' time is reported per case.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import aioboto3

from benchmarks.harness import MIB, Case, fill, measure, parser, save, show
from benchmarks.loop_lag import lag_beside
from kvtier.backends.base import Read, Write, Written
from kvtier.backends.s3 import S3Backend
from kvtier.backends.s3_wire import Request
from kvtier.options import Secret
from kvtier.testing.context import lend_context
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, SeaweedServer
from kvtier.testing.servers.process import free_port, tied

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from benchmarks.harness import Figure

VALUE = 32 * MIB
VALUES = 8
IN_FLIGHT = 4
BUCKET = "benchmark"
MEMORY = "/dev/shm"  # noqa: S108  # directories of our own are made there
GOALS = {"get": 1.0, "put": 0.95}
CLIENT_GOAL = 3.0
NGINX = """
daemon off; worker_processes 2; pid {root}/nginx.pid; error_log {root}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; sendfile on; client_max_body_size 0; keepalive_requests 100000;
    client_body_temp_path {root}/body; proxy_temp_path {root}/p; fastcgi_temp_path {root}/f;
    uwsgi_temp_path {root}/u; scgi_temp_path {root}/s;
    server {{
        listen 127.0.0.1:{port}; root {root}/files;
        location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
    }}
}}
"""


def _require(condition: bool) -> None:  # noqa: FBT001  # as `assert`
    if not condition:
        raise RuntimeError("a value did not get there, or not as it was")


class Nginx:
    """nginx that takes PUT and gives GET, on files in memory."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        (root / "files").mkdir(mode=0o777)
        root.chmod(0o777)
        (root / "files").chmod(0o777)
        config = root / "nginx.conf"
        config.write_text(NGINX.format(root=root, port=self.port))
        self._process = subprocess.Popen(tied(["nginx", "-c", str(config)]))
        time.sleep(1.0)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its children so far."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in {int(stat.parent.name), int(fields[1])}:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Shares:
    """How much of the machine's processor time the server took, per case."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.of: dict[str, list[float]] = {}

    def watched(self, name: str, call: Callable[[], object]) -> Callable[[], None]:
        """Return `call` so that each call's share is noted."""

        def run() -> None:
            busy, began = cpu_seconds(self._pid), time.perf_counter()
            call()
            spent = (time.perf_counter() - began) * (os.cpu_count() or 1)
            self.of.setdefault(name, []).append((cpu_seconds(self._pid) - busy) / spent)

        return run


class Bench:
    """The clients, on one loop and one set of buffers."""

    def __init__(self, url: str, folder: Path, runner: asyncio.Runner) -> None:
        self.url = url
        self._run = runner.run
        self._values = []
        for seed in range(VALUES):
            view = memoryview(mmap.mmap(-1, VALUE))
            fill(view, seed=seed)
            self._values.append(view)
        self._bytes = [bytes(value) for value in self._values]
        self._into = [memoryview(mmap.mmap(-1, VALUE)) for _ in range(VALUES)]
        for view in self._into:
            fill(view, seed=99)  # faulted in
        self._files = [folder / f"value{index}" for index in range(VALUES)]
        for file, value in zip(self._files, self._values, strict=True):
            file.write_bytes(value)

    async def connect(self) -> None:
        """Open the clients."""
        self.backend = S3Backend(
            bucket=BUCKET,
            endpoint=self.url,
            region="us-east-1",
            addressing="path",
            access_key=Secret(ACCESS_KEY),
            secret_key=Secret(SECRET_KEY),
            lazy=True,
        )
        self._context = lend_context(threads=IN_FLIGHT)
        await self.backend.open(replace(await self._context.__aenter__(), deadline_seconds=60.0))
        session = aioboto3.Session(aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY)
        self._making = session.client("s3", endpoint_url=self.url, region_name="us-east-1")
        self._client = await self._making.__aenter__()

    async def close(self) -> None:
        """Close them."""
        await self._making.__aexit__(None, None, None)
        await self.backend.aclose()
        await self._context.__aexit__(None, None, None)

    # --- kvtier

    async def kvtier_put(self) -> None:
        """Write all values in one batch."""
        writes = [Write(f"n{index}", [value]) for index, value in enumerate(self._values)]
        _require(all(isinstance(answer, Written) for answer in await self.backend.write_many(writes)))

    async def kvtier_get(self) -> None:
        """Read all values in one batch."""
        reads = [Read(f"n{index}", [view]) for index, view in enumerate(self._into)]
        _require(list(await self.backend.read_many(reads)) == [VALUE] * VALUES)

    def check(self) -> None:
        """What was read last is what was put."""
        _require(all(view == value for view, value in zip(self._into, self._values, strict=True)))

    # --- the control of the loop's lag: the same bytes by plain threads

    async def threads_get(self) -> None:
        """Read all values."""
        await self._in_threads("get_object", "GET")

    async def threads_put(self) -> None:
        """Write all values."""
        await self._in_threads("put_object", "PUT")

    async def _in_threads(self, operation: str, method: str) -> None:
        control, values = self.backend._use().control, self.backend._use().values  # noqa: SLF001  # the same wire
        urls = [await control.presign(operation, self._key(index)) for index in range(VALUES)]
        wire = await values._connect(urls[0])  # type: ignore[attr-defined]  # noqa: SLF001  # see above; made by the first
        rest = list(range(VALUES))

        def work() -> None:
            while rest:
                index = rest.pop()
                body, into = ([self._values[index]], []) if method == "PUT" else ([], [self._into[index]])
                wire.exchange(Request(method, urls[index], {}, body), into, time.monotonic() + 60)

        threads = [threading.Thread(target=work) for _ in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])

    # --- aioboto3 as it comes

    async def aioboto3_put(self) -> None:
        """Write all values."""
        turns = asyncio.Semaphore(IN_FLIGHT)

        async def one(index: int) -> None:
            async with turns:
                await self._client.put_object(Bucket=BUCKET, Key=self._key(index), Body=self._bytes[index])

        await asyncio.gather(*map(one, range(VALUES)))

    async def aioboto3_get(self) -> None:
        """Read all values."""
        turns = asyncio.Semaphore(IN_FLIGHT)

        async def one(index: int) -> None:
            async with turns:
                answer = await self._client.get_object(Bucket=BUCKET, Key=self._key(index))
                _require(len(await answer["Body"].read()) == VALUE)

        await asyncio.gather(*map(one, range(VALUES)))

    # --- curl

    def sign(self, operation: str) -> None:
        """Make the URLs that curl is given."""
        control = self.backend._use().control  # noqa: SLF001  # the same signatures
        self._urls = [self._run(control.presign(operation, self._key(index))) for index in range(VALUES)]

    def curl(self, verb: str) -> None:
        """Move all values by one process."""
        command = ["curl", "-s", "-f", "--parallel", "--parallel-max", str(IN_FLIGHT)]
        for url, file in zip(self._urls, self._files, strict=True):
            command += [*(["-T", str(file)] if verb == "put" else []), url, "-o", "/dev/null"]
        subprocess.run(command, check=True, capture_output=True)

    def _key(self, index: int) -> str:
        return f"kvtier/entries/n{index}"

    def cases(self, verb: str, shares: Shares) -> list[Case]:
        """Return what is timed."""
        size = VALUE * VALUES
        names = {
            "kvtier": f"kvtier_{verb}",
            "plain threads": f"threads_{verb}",
            "aioboto3 defaults": f"aioboto3_{verb}",
        }
        calls = {name: lambda method=method: self._run(getattr(self, method)()) for name, method in names.items()}
        made = [Case(name=name, call=shares.watched(name, call), size=size) for name, call in calls.items()]
        operation = f"{verb}_object"
        curl = shares.watched("curl", lambda: self.curl(verb))
        return [*made, Case(name="curl", call=curl, size=size, prepare=lambda: self.sign(operation))]


@contextmanager
def serving(name: str) -> Generator[tuple[str, int], None, None]:
    """Start a server; yields its URL and process."""
    with tempfile.TemporaryDirectory(dir=MEMORY if name == "nginx" else None) as folder:
        if name == "nginx":
            nginx = Nginx(Path(folder))
            try:
                yield nginx.url, nginx.pid
            finally:
                nginx.stop()
            return
        with SeaweedServer(Path(folder)) as server:
            server.make_bucket(BUCKET)
            yield server.url, server.pid


def lag_of(bench: Bench, runner: asyncio.Runner, rounds: int) -> dict[str, dict[str, float]]:
    """Return how late the loop was beside each way to move the values, in milliseconds."""
    late: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, work in _works(bench):
            late.setdefault(name, []).extend(runner.run(lag_beside(work)))
    return {
        name: {"p99": 1e3 * statistics.quantiles(beats, n=100)[98], "max": 1e3 * max(beats)}
        for name, beats in late.items()
    }


def _works(bench: Bench) -> Sequence[tuple[str, Callable[[], Awaitable[None]]]]:
    return [
        ("kvtier get", bench.kvtier_get),
        ("threads get", bench.threads_get),
        ("kvtier put", bench.kvtier_put),
        ("threads put", bench.threads_put),
        ("aioboto3 defaults get", bench.aioboto3_get),
        ("aioboto3 defaults put", bench.aioboto3_put),
    ]


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--server", choices=("nginx", "seaweed"), default="nginx")
    options.add_argument("--lag-rounds", type=int, default=3)
    flags = options.parse_args()
    if shutil.which("curl") is None or (flags.server == "nginx" and shutil.which("nginx") is None):
        print("skipped: it needs curl and, for --server nginx, nginx (apt install curl nginx-light)")
        return
    figures: list[Figure] = []
    extra: dict[str, object] = {}
    with ExitStack() as stack:
        url, pid = stack.enter_context(serving(flags.server))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        runner = stack.enter_context(asyncio.Runner())
        bench = Bench(url, folder, runner)
        runner.run(bench.connect())
        for verb in ("put", "get"):
            shares = Shares(pid)
            found = measure(bench.cases(verb, shares), base="curl", rounds=flags.rounds, goals={"kvtier": GOALS[verb]})
            figures += [replace(figure, name=f"{verb} {figure.name}") for figure in found]
            ratio = {figure.name: figure.ratio for figure in found}
            extra[f"{verb}: times aioboto3's defaults"] = ratio["kvtier"] / ratio["aioboto3 defaults"]
            # What the server leaves to anybody: a socket per thread that sends what is there, or drops what comes.
            best = max(ratio["plain threads"], ratio["curl"])
            extra[f"{verb}: times aioboto3's defaults, the fastest of plain threads and curl"] = (
                best / ratio["aioboto3 defaults"]
            )
            extra[f"{verb}: kvtier / plain threads"] = ratio["kvtier"] / ratio["plain threads"]
            extra[f"{verb}: server's share of the processors"] = {
                name: statistics.median(values) for name, values in shares.of.items()
            }
        bench.check()
        extra["loop lag in ms"] = lag_of(bench, runner, flags.lag_rounds)
        runner.run(bench.close())
    show(figures)
    for name, value in extra.items():
        print(f"{name}: {value}")
    if not flags.no_save:
        save(f"s3_{flags.server}", figures, flags=vars(flags), extra=extra)


if __name__ == "__main__":
    main()
