"""Faults planted for real, one by one: `kvtier doctor` finds each, says whose it is and what to change."""

import contextlib
import fcntl
import os
import re
import subprocess

import pytest

from kvtier import registry
from kvtier.backends import redis as redis_backend
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.cli.doctor.examine import Patient, examine
from kvtier.concurrency.clock import SystemClock
from kvtier.config.planner import read_calibration
from kvtier.errors import BackendUnavailableError
from kvtier.testing.s3_servers import MotoServer
from kvtier.testing.servers.fixtures import program_of, short_folder
from kvtier.testing.servers.redis_servers import RedisServer

NAMESPACE = '[namespace]\nmodel = "org/name"\nrevision = "1"\n'
MEMORY = '[[tiers]]\nbackend = "pinned-cpu"\ncapacity = "64MiB"\n'
TOKEN = ("--token-bytes", "4KiB")  # a chunk of 1 MiB


def disk(path, options=""):
    return f'[[tiers]]\nbackend = "local-disk"\npath = "{path}"\ncapacity = "1GiB"\n{options}\n'


def redis(server, options='capacity = "1GiB"'):
    return f'[[tiers]]\nbackend = "redis"\nurl = "{server.url}"\n{options}\n'


@pytest.fixture
def ask(kvtier, write_config):
    """Ask the doctor about a config, for people and for programs; return what the program hears."""

    def diagnose(text, *words):
        write_config(text)
        for_people = kvtier("doctor", *words)
        for_programs = kvtier("doctor", "--json", *words)
        assert for_people.status == for_programs.status
        assert all(len(line) <= 80 or " " not in line.strip() for line in for_people.out.splitlines())
        assert "Traceback" not in for_people.text
        assert for_programs.json["healthy"] == (for_programs.status == 0)
        return for_programs

    return diagnose


def found(said, check, level="problem"):
    """Return the one finding of a kind; all that is not fine says what to do."""
    findings = [each for each in said.json["findings"] if each["check"] == check and each["level"] == level]
    assert len(findings) == 1, said.json["findings"]
    assert findings[0]["fix"] or check == "config"
    assert said.status == (1 if said.json["problem"] else 0)
    return findings[0]


@pytest.fixture
def place(tmp_path):
    """Mount small file systems, where that is allowed; else skip."""
    path = tmp_path / "mounted"
    path.mkdir()
    mounted = []

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")
        mounted.append(path)
        return path

    yield mount
    for each in mounted:
        subprocess.run(["umount", "-l", str(each)], check=True)


@pytest.fixture(scope="module")
def small_server():
    """A server with a password and a little memory, from which it evicts."""
    options = {"requirepass": "right", "maxmemory": "20mb", "maxmemory-policy": "allkeys-lru"}
    with short_folder() as folder, RedisServer(program_of("valkey"), folder, options=options) as server:
        yield server


def with_password(server, password):
    return f'url = "redis://:{password}@127.0.0.1:{server.port}"\n'


def test_nothing_wrong(ask, tmp_path):
    said = ask(NAMESPACE + MEMORY + disk(tmp_path / "kv"), *TOKEN)
    assert said.status == 0
    assert said.json["problem"] == 0
    assert {"reach", "round-trip", "free-space", "chunk-size"} <= {each["check"] for each in said.json["findings"]}
    assert not list((tmp_path / "kv" / "entries").glob("*/*/*")), "the doctor left something behind"


def test_what_was_measured_is_written_for_the_planner(ask, tmp_path):
    path = tmp_path / "calibration.json"
    measured = ("--prefill", "100=0.1", "--prefill", "1000=1.0", "--calibration", str(path))
    assert ask(NAMESPACE + MEMORY + disk(tmp_path / "kv"), *TOKEN, *measured).status == 0
    prefill, links = read_calibration(path)
    assert prefill.seconds(500) == pytest.approx(0.5)
    assert list(links) == ["local-disk"]
    assert links["local-disk"].bytes_per_second > 0


# --- the config


def test_unknown_option(ask, tmp_path):
    said = ask(NAMESPACE + disk(tmp_path / "kv", 'polcy = "lru"'))
    assert "did you mean 'policy'" in found(said, "config")["text"]


def test_every_mistake_at_once(ask, tmp_path):
    said = ask('chunk_tokens = 0\n[[tiers]]\nbackend = "floppy"\ncapacity = "1XB"')
    assert [each["text"].split(" ")[0] for each in said.json["findings"]] == [
        "chunk_tokens",
        "tiers[0].capacity",
        "tiers[0].backend",
    ]


def test_no_file(kvtier, tmp_path):
    said = kvtier("doctor", "-c", "none.toml")
    assert said.status == 2
    assert "config init" in said.err


def test_swapped_tier_order(ask, tmp_path):
    assert found(ask(NAMESPACE + disk(tmp_path / "kv") + MEMORY), "tier-order")["tier"] == "local-disk"


def test_lower_tier_smaller(ask, tmp_path):
    text = NAMESPACE + disk(tmp_path / "kv") + disk(tmp_path / "kv2", 'name = "two"').replace("1GiB", "1MiB")
    assert found(ask(NAMESPACE + MEMORY + text.split(NAMESPACE)[1]), "capacity-order", "warning")["tier"] == "two"


def test_lossy_chain(ask, tmp_path, kvtier):
    said = ask(NAMESPACE + disk(tmp_path / "kv", 'codecs = ["int8"]'))
    assert "'int8' loses precision" in found(said, "lossy-chain", "warning")["text"]
    assert kvtier("doctor", "--strict").status == 1


def test_chains_that_are_no_ladder(ask, tmp_path):
    upper = MEMORY + 'codecs = ["int8"]\n'
    assert found(ask(NAMESPACE + upper + disk(tmp_path / "kv")), "codec-ladder", "warning")["tier"] == "local-disk"


def test_arena_smaller_than_a_chunk(ask, tmp_path):
    said = ask(NAMESPACE + '[memory]\nstaging_bytes = "512KiB"\n' + MEMORY + disk(tmp_path / "kv"), *TOKEN)
    assert "staging_bytes = '512KiB'" in found(said, "arena-smaller-than-a-chunk")["text"]


def test_tier_smaller_than_a_chunk(ask, tmp_path):
    said = ask(NAMESPACE + MEMORY.replace("64MiB", "512KiB") + disk(tmp_path / "kv"), *TOKEN)
    assert found(said, "smaller-than-a-chunk")["tier"] == "pinned-cpu"


def test_checkpoints_that_share_keys(ask, tmp_path):
    assert found(ask('[namespace]\nmodel = "org/name"\n' + disk(tmp_path / "kv")), "namespace")


def test_two_tiers_in_one_place(ask, tmp_path):
    said = ask(NAMESPACE + disk(tmp_path / "kv") + disk(tmp_path / "kv", 'name = "again"'))
    assert found(said, "same-place")["tier"] == "again"


def test_nothing_survives(ask):
    assert found(ask(NAMESPACE + MEMORY), "persistence", "warning")


def test_more_memory_than_there_is(ask, tmp_path):
    assert found(ask(NAMESPACE + MEMORY.replace("64MiB", "900TiB") + disk(tmp_path / "kv")), "memory")


def test_loading_that_takes_longer_than_computing(ask, tmp_path):
    said = ask(NAMESPACE + disk(tmp_path / "kv"), *TOKEN, "--tokens-per-second", "1e12")
    assert "costs more" in found(said, "break-even", "warning")["text"]


def test_device_that_is_not_there(ask, tmp_path):
    said = ask(
        NAMESPACE + '[[tiers]]\nbackend = "cuda"\ndevice = "cuda:99"\ncapacity = "1GiB"\n' + disk(tmp_path / "kv")
    )
    assert "no cuda:99 here" in found(said, "device")["text"]


# --- disk


def test_read_only_directory(ask, place):
    path = place("size=10m,ro")
    assert str(path) in found(ask(NAMESPACE + disk(path / "kv")), "open")["text"]


def test_path_that_is_a_file(ask, tmp_path):
    (tmp_path / "kv").touch()
    assert "Not a directory" in found(ask(NAMESPACE + disk(tmp_path / "kv")), "open")["text"]


def test_full_disk(ask, place):
    path = place("size=4m")
    (path / "kv").mkdir(mode=0o700)
    with (path / "big").open("wb", buffering=0) as big, contextlib.suppress(OSError):
        while True:
            big.write(bytes(4096))
    said = ask(NAMESPACE + disk(path / "kv"))
    assert found(said, "disk-full")
    assert found(said, "round-trip")


def test_capacity_over_the_volume(ask, place):
    said = ask(NAMESPACE + disk(place("size=64m") / "kv"))
    assert "fills up first" in found(said, "free-space", "warning")["text"]
    assert found(said, "file-system", "warning"), "and it is memory"


def test_directory_that_others_can_write(ask, tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    assert "chmod 700" in found(ask(NAMESPACE + disk(tmp_path / "kv")), "permissions", "warning")["fix"]


def test_direct_io_refused(ask, tmp_path, monkeypatch):
    plain = fcntl.fcntl

    def refuse(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert "refused" in found(ask(NAMESPACE + disk(tmp_path / "kv")), "direct-io", "warning")["text"]


class WrongClock(SystemClock):
    def __init__(self, ahead):
        self.ahead = ahead

    def wall(self):
        return super().wall() + self.ahead


async def clocks(source, ahead):
    """Return by how many seconds the doctor finds the clock ahead, one item per finding."""
    findings = await examine(Patient(source=source, clock=WrongClock(ahead)))
    said = [re.search(r"clock is (\d+) s (ahead|behind)", each.text) for each in findings if each.check == "clock"]
    return [int(each[1]) * (1 if each[2] == "ahead" else -1) for each in said]


def about(seconds):
    return [pytest.approx(seconds, abs=30)]  # a busy machine takes its time between write and look


async def test_clock_that_is_wrong(tmp_path):
    (tmp_path / "kvtier.toml").write_text(NAMESPACE + disk(tmp_path / "kv"))
    assert await clocks(tmp_path / "kvtier.toml", 0) == []
    assert await clocks(tmp_path / "kvtier.toml", 120) == about(120)


@pytest.mark.redis
async def test_clock_that_differs_from_a_servers(tmp_path, small_server):
    tier = f'[[tiers]]\nbackend = "redis"\ncapacity = "10MiB"\n{with_password(small_server, "right")}'
    (tmp_path / "kvtier.toml").write_text(NAMESPACE + tier)
    assert await clocks(tmp_path / "kvtier.toml", 0) == []
    assert await clocks(tmp_path / "kvtier.toml", 120) == about(120)
    assert await clocks(tmp_path / "kvtier.toml", -3600) == about(-3600)


class SpoilingBackend(LocalDiskBackend):
    """Gives back a flipped bit."""

    async def read_many(self, reads):
        answers = await super().read_many(reads)
        for read in reads:
            read.into[0][5000 % len(read.into[0])] ^= 1
        return answers


class KeepingBackend(LocalDiskBackend):
    """Lets nobody delete."""

    async def delete_many(self, names):
        return [BackendUnavailableError("access denied") for _ in names]


@pytest.mark.parametrize(
    ("kind", "check"), [(SpoilingBackend, "verification"), (KeepingBackend, "delete")], ids=["spoils", "keeps"]
)
def test_medium_that_does_not_do_its_work(ask, tmp_path, monkeypatch, kind, check):
    name = f"doctors-{check}"
    monkeypatch.setitem(registry.backends._registered, name, kind)  # for this test only
    assert found(ask(NAMESPACE + disk(tmp_path / "kv").replace("local-disk", name)), check)["tier"] == name


# --- servers


def test_server_that_is_not_there(ask):
    said = ask(NAMESPACE + '[[tiers]]\nbackend = "redis"\nurl = "redis://127.0.0.1:1"\ncapacity = "1GiB"')
    assert "127.0.0.1:1" in found(said, "reach")["text"]


@pytest.mark.redis
def test_wrong_password(ask, small_server):
    said = ask(NAMESPACE + f'[[tiers]]\nbackend = "redis"\ncapacity = "1MiB"\n{with_password(small_server, "wrong")}')
    assert "password" in found(said, "open")["text"]
    assert "wrong" not in found(said, "open")["text"].replace("WRONGPASS", "")


@pytest.mark.redis
def test_little_memory_with_eviction(ask, small_server):
    said = ask(NAMESPACE + f'[[tiers]]\nbackend = "redis"\ncapacity = "1GiB"\n{with_password(small_server, "right")}')
    assert "evicts parts" in found(said, "maxmemory")["text"]


@pytest.mark.redis
def test_eviction_though_there_is_room(ask, small_server):
    said = ask(NAMESPACE + f'[[tiers]]\nbackend = "redis"\ncapacity = "10MiB"\n{with_password(small_server, "right")}')
    assert "noeviction" in found(said, "eviction-policy", "warning")["fix"]


@pytest.mark.redis
def test_server_too_old(ask, small_server, monkeypatch):
    monkeypatch.setattr(redis_backend, "OLDEST_SERVER", (99, 0))  # older ones are not to be had
    said = ask(NAMESPACE + f'[[tiers]]\nbackend = "redis"\ncapacity = "10MiB"\n{with_password(small_server, "right")}')
    assert "needs Redis" in found(said, "open")["text"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        yield server


def in_bucket(server, bucket):
    lines = "\n".join(f'{name} = "{value}"' for name, value in server.options(bucket).items())
    return f'[[tiers]]\nbackend = "s3"\ncapacity = "1GiB"\n{lines}\n'


def test_missing_bucket(ask, s3):
    said = ask(NAMESPACE + in_bucket(s3, "missing"))
    assert "the bucket does not exist; create it" in found(said, "open")["text"]


def test_bucket_that_keeps_everything(ask, s3):
    s3.make_bucket("versions")
    assert found(ask(NAMESPACE + in_bucket(s3, "versions")), "bucket-uploads", "note")
    client = s3.client()
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    client.close()
    assert (
        "grows without end" in found(ask(NAMESPACE + in_bucket(s3, "versions")), "bucket-versioning", "warning")["text"]
    )
