"""Entries as objects in a bucket of any S3-compatible store, which processes and machines share."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, Read, Stat, Traits, Write, Written, check_name, is_name
from kvtier.backends.batches import answer_each
from kvtier.backends.s3_control import Control
from kvtier.backends.s3_faults import PRESENT, RefusedError
from kvtier.backends.s3_journal import Journal
from kvtier.backends.s3_moves import Moves
from kvtier.backends.s3_options import Addressing, DataPath, S3Options
from kvtier.backends.s3_plain import ClientValues
from kvtier.backends.s3_values import EXPIRES, SocketValues
from kvtier.backends.views import host_view, total_bytes, writable_views
from kvtier.concurrency.key_locks import KeyLocks
from kvtier.errors import BackendError, CapacityError, ClosedError, ConfigError
from kvtier.options import LocalPath, Secret, Size  # noqa: TC001  # the config reads them from the signature

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.backends.s3_control import Listed, Upload
    from kvtier.backends.s3_values import Head, Values

ENTRIES = "entries/"
JOURNAL = "journal/"

_GOODBYE_SECONDS = 2.0
_AT_ONCE = 64  # items of one batch under way: more wait for threads anyway
_PAGE_ENTRIES = 200  # of a listing: each entry's expiry is asked for, and a page is to come within a deadline
_MOST_REMEMBERED = 100_000
_LOOK_FIRST_BYTES = 64 << 10  # a value that is not to replace another one is not sent to learn that there is one


@dataclass(frozen=True, slots=True)
class _Opened:
    """What exists between `open` and `aclose`."""

    control: Control
    values: Values
    moves: Moves
    journal: Journal
    writing: KeyLocks


class S3Backend(Backend):
    """One object per entry, under `<prefix>entries/`; also a `JournalBackend` and `JournalFollower`.

    The client library signs requests, lists and deletes; values move between sockets and the store's memory in the
    tier's threads. The server publishes an object whole or not at all. An entry's expiry is metadata of its object;
    what has expired is removed by the stores that know of it, and by `s3_gc.collect`.

    Args:
        bucket: an existing bucket.
        prefix: the folder for everything kept here, ending in "/"; "" for the whole bucket.
        endpoint: the server's URL; None for AWS.
        region: None for the environment's, else "us-east-1".
        access_key: with `secret_key`; None for the environment, a profile, or the machine's role.
        secret_key: see `access_key`.
        session_token: of temporary credentials.
        profile: of the AWS configuration files.
        addressing: "path" puts the bucket into the path, "virtual" into the host name; "auto" leaves it to the client.
        storage_class: of new objects, such as "STANDARD_IA"; None for the bucket's own.
        whole_bytes: larger values are read by ranges and written by multipart upload, several parts at once.
        part_bytes: of those parts, at least 5 MiB.
        signed_payload: have the client sign a hash of every value it writes, at the price of hashing it.
        data_path: "sockets", or "aioboto3" to move values through the client library as well.
        ca_file: certificates to trust instead of the system's, for an https endpoint.
        lazy: do not look at bucket, credentials and clock when opening.
    """

    def __init__(  # noqa: PLR0913  # one per option of the config
        self,
        *,
        bucket: str,
        prefix: str = "kvtier/",
        endpoint: str | None = None,
        region: str | None = None,
        access_key: Secret | None = None,
        secret_key: Secret | None = None,
        session_token: Secret | None = None,
        profile: str | None = None,
        addressing: Addressing = "auto",
        storage_class: str | None = None,
        whole_bytes: Size = 64 << 20,
        part_bytes: Size = 16 << 20,
        signed_payload: bool = False,
        data_path: DataPath = "sockets",
        ca_file: LocalPath | None = None,
        lazy: bool = False,
    ) -> None:
        self.options: S3Options = S3Options(
            bucket=bucket,
            prefix=prefix,
            endpoint=endpoint,
            region=region,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            profile=profile,
            addressing=addressing,
            storage_class=storage_class,
            whole_bytes=whole_bytes,
            part_bytes=part_bytes,
            signed_payload=signed_payload,
            data_path=data_path,
            ca_file=None if ca_file is None else Path(ca_file),
            lazy=lazy,
        )
        self.options.check()
        self.traits: Traits = Traits(
            persistent=True, shared=True, ranges=True, max_value_bytes=self.options.max_value_bytes
        )
        self._opened: _Opened | None = None
        self._heads: dict[str, tuple[str, float, Head]] = {}  # what scans learned: name -> entity tag, change, head

    def __repr__(self) -> str:
        return f"S3Backend({self.options.where!r}, endpoint={self.options.endpoint!r})"

    async def open(self, context: BackendContext) -> None:
        """Connect, and unless `lazy` look at the bucket.

        Raises:
            ConfigError: no such bucket, refused credentials, a clock that differs too much, a missing client library.
            BackendError: the server is out of reach.
        """
        if self._opened is not None:
            raise ConfigError(f"{self!r} is open already; one backend belongs to one tier")
        control = Control(self.options, context)
        try:
            await control.connect()
        except BaseException:
            await control.close()
            raise
        values: Values = (
            SocketValues(control, self.options, context)
            if self.options.data_path == "sockets"
            else ClientValues(control, context)
        )
        moves = Moves(values, control, self.options)
        journal = Journal(control, self.options.prefix + JOURNAL)
        self._opened = _Opened(control, values, moves, journal, KeyLocks())

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says; one request per entry, or one per part of a large one."""
        moves = self._use().moves
        jobs = [
            partial(moves.read, self._key(read.name), writable_views(read.into), offset=read.offset, part=read.partial)
            for read in reads
        ]
        return await answer_each(lambda job: job(), jobs, limit=_AT_ONCE)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says; this store's writes and deletes of one name take turns."""
        opened = self._use()
        for write in writes:
            check_name(write.name)
        jobs = [partial(self._write, opened, write, [host_view(part) for part in write.parts]) for write in writes]
        return await answer_each(lambda job: job(), jobs, limit=_AT_ONCE)

    async def _write(self, opened: _Opened, write: Write, parts: list[memoryview]) -> Written:
        size, key = total_bytes(parts), self._key(write.name)
        if size > self.options.max_value_bytes:
            raise CapacityError(f"{size} bytes, {self.options.where} takes at most {self.options.max_value_bytes}")
        async with opened.writing.hold(write.name):
            if write.if_absent and size > _LOOK_FIRST_BYTES and (there := await opened.values.head(key)) is not None:
                return Written(there.size, stored=False)
            condition: dict[str, object] = {"IfNoneMatch": "*"} if write.if_absent else {}
            try:
                await opened.moves.write(key, parts, condition | self._parameters(write.expires))
            except RefusedError as exc:
                if not write.if_absent or exc.code not in PRESENT:
                    raise
                there = await opened.values.head(key)
                return Written(size if there is None else there.size, stored=False)
        return Written(size)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says; two requests: who is there, and away with them."""
        opened = self._use()
        keys = {name: self._key(name) for name in names}
        turns = [opened.writing.take_place(name) for name in sorted(keys)]  # in one order: no two calls cross
        try:
            for turn in turns:
                await turn.wait()
            heads = await answer_each(opened.values.head, list(keys.values()), limit=_AT_ONCE)
            answers: dict[str, bool | BackendError] = {
                name: head if isinstance(head, BackendError) else head is not None
                for name, head in zip(keys, heads, strict=True)
            }
            there = [name for name, answer in answers.items() if answer is True]
            errors = await opened.control.delete([keys[name] for name in there])
        finally:
            for turn in turns:
                turn.release()
        answers.update((name, error) for name, error in zip(there, errors, strict=True) if error is not None)
        # A name that occurs twice was there once.
        firsts = {name: index for index, name in reversed(list(enumerate(names)))}
        return [answers[name] if firsts[name] == index else False for index, name in enumerate(names)]

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says; one request per entry."""
        values = self._use().values
        heads = await answer_each(values.head, [self._key(name) for name in names], limit=_AT_ONCE)
        return [
            Stat(name, head.size, head.expires, head.changed)
            if head is not None and not isinstance(head, BackendError)
            else head
            for name, head in zip(names, heads, strict=True)
        ]

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages in the order of names. A listing knows no metadata: each entry is looked at once per change."""
        opened = self._use()
        behind = "" if after is None else check_name(after)
        more = True
        while more:
            listed, more = await opened.control.list_page(
                self.options.prefix + ENTRIES, after=behind, limit=_PAGE_ENTRIES
            )
            if not listed:
                return
            behind = listed[-1].key
            stats = await answer_each(
                partial(self._looked_at, opened), [item for item in listed if is_name(item.key)], limit=_AT_ONCE
            )
            page = []
            for stat in stats:
                if isinstance(stat, BackendError):
                    raise stat
                if stat is not None:
                    page.append(stat)
            if page:
                yield page

    async def _looked_at(self, opened: _Opened, item: Listed) -> Stat | None:
        etag, changed, head = self._heads.get(item.key, ("", 0.0, None))
        if head is None or etag != item.etag or changed != item.changed:
            head = await opened.values.head(self.options.prefix + ENTRIES + item.key)
            if head is None:
                return None
            if len(self._heads) >= _MOST_REMEMBERED:
                self._heads.clear()
            if opened.control.settled(item.changed):  # else the same second may see another change
                self._heads[item.key] = (item.etag, item.changed, head)
        return Stat(item.key, head.size, head.expires, head.changed)

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Have the server copy each object onto itself with its new expiry.

        Raises:
            BackendError: of the first entry that failed; the others were tried too.
        """
        opened = self._use()
        for name, _ in items:
            check_name(name)
        for answer in await answer_each(partial(self._set_expiry, opened), items, limit=_AT_ONCE):
            if isinstance(answer, BackendError):
                raise answer

    async def _set_expiry(self, opened: _Opened, item: tuple[str, float | None]) -> None:
        name, expires = item
        parameters: dict[str, object] = {"Metadata": {}, **self._parameters(expires)}
        async with opened.writing.hold(name):
            await opened.control.set_metadata(self._key(name), parameters)

    async def append_journal(self, records: bytes) -> None:
        """Put this backend's log anew, with `records` at its end."""
        await self._use().journal.append(records)

    async def read_journals(self) -> Sequence[bytes]:
        """Return this log and those of processes that are gone, oldest first."""
        return await self._use().journal.read()

    async def replace_journals(self, records: bytes) -> None:
        """Compact: one new log takes the place of the logs that were read."""
        await self._use().journal.replace(records)

    async def follow_journals(self) -> Mapping[str, bytes]:
        """See `JournalFollower`."""
        return await self._use().journal.follow()

    async def leftovers(self, *, upload_seconds: float) -> tuple[Sequence[Upload], Sequence[str]]:
        """Return multipart uploads that began longer ago, and the keys of journals that nobody follows any more."""
        opened = self._use()
        oldest = opened.control.now() - upload_seconds
        uploads = await opened.control.list_uploads(self.options.prefix + ENTRIES)
        return [upload for upload in uploads if upload.begun <= oldest], await opened.journal.outdated()

    async def remove_leftovers(self, uploads: Sequence[Upload], logs: Sequence[str]) -> int:
        """Abort uploads and delete journals; return how many are left."""
        control = self._use().control
        aborted = await answer_each(lambda upload: control.abort_upload(upload.key, upload.upload_id), uploads)
        return sum(isinstance(answer, BackendError) for answer in [*aborted, *await control.delete(logs)])

    async def aclose(self) -> None:
        """Say goodbye in the journal, give up unfinished uploads, close all connections."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            # A server that is away hears nothing: others take this process for killed, and `collect` finds the uploads.
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await opened.moves.settle()
                    await opened.journal.close()
        finally:
            await opened.values.close()
            await opened.control.close()

    def _use(self) -> _Opened:
        if self._opened is None:
            raise ClosedError(f"{self!r} is not open")
        return self._opened

    def _key(self, name: str) -> str:
        return f"{self.options.prefix}{ENTRIES}{check_name(name)}"

    def _parameters(self, expires: float | None) -> dict[str, object]:
        """Return what a new object is stored with."""
        parameters: dict[str, object] = {}
        if expires is not None:
            parameters["Metadata"] = {EXPIRES: f"{expires:.3f}"}
        if self.options.storage_class is not None:
            parameters["StorageClass"] = self.options.storage_class
        return parameters
