"""The commands under one roof; a mistake of the user is one line and status 2, not a traceback."""

from __future__ import annotations

import os
import sys

import typer

import kvtier
from kvtier.cli import bench, demo, files, gc, ls, migrate, rm, simulate, size, stat, top, verify
from kvtier.cli.config import config
from kvtier.cli.doctor.command import doctor
from kvtier.errors import BackendError, ConfigError, KVTierError

app: typer.Typer = typer.Typer(
    name="kvtier",
    help="Keeps the KV cache of LLM prompts in a hierarchy of tiers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("simulate")(simulate.simulate)
app.command("size")(size.size)
app.add_typer(config, name="config")
app.command("ls")(ls.ls)
app.command("stat")(stat.stat)
app.command("rm")(rm.rm)
app.command("get")(files.get)
app.command("put")(files.put)
app.command("verify")(verify.verify)
app.command("gc")(gc.gc)
app.command("migrate")(migrate.migrate)
app.command("bench")(bench.bench)
app.command("top")(top.top)
app.command("demo")(demo.demo)
app.command("doctor")(doctor)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {kvtier.__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    _version: bool = typer.Option(
        False, "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Take the options that stand before any command."""


def run() -> None:
    """Run the command that the arguments name: status 1 for a fault of storage, 2 for a mistake of the caller."""
    try:
        app(prog_name="kvtier")
    except KVTierError as exc:
        print(f"kvtier: {exc}", file=sys.stderr)
        sys.exit(1 if isinstance(exc, BackendError) and not isinstance(exc, ConfigError) else 2)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as exc:
        print(f"kvtier: {exc.filename}: {exc.strerror}" if exc.filename else f"kvtier: {exc}", file=sys.stderr)
        sys.exit(2)
