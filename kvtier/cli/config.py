"""`kvtier config`: what a config means with all its defaults, its schema, and a first one to start from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from kvtier.cli.output import print_json
from kvtier.cli.tiers import DEFAULT_FILE, ConfigOption, JsonOption, config_source, read_config
from kvtier.errors import ConfigError

config: typer.Typer = typer.Typer(
    help="Show the config a store would run with, write a first one, or print its JSON schema."
)

TEMPLATE = """\
# A kvtier store. Check it with:  kvtier doctor
# Every option with its value:     kvtier config show

chunk_tokens = 256            # tokens in one stored chunk
# deadline_seconds = 5.0      # by then every call has ended
# lossless = false            # true: no codec that loses precision is accepted

# Whose KV this is. Tiers that outlive the process need `revision` or `weights`:
# two checkpoints of one model must never share keys. A branch such as "main" is no
# revision: other weights may stand there tomorrow. Take the commit.
[namespace]
model = "{model}"
{revision}

# The tiers, the fastest first.
[[tiers]]
backend = "pinned-cpu"        # host memory
capacity = "4GiB"
policy = "lru"                # or: adaptive, arc, fifo, gdsf, lfu, s3-fifo, ttl

[[tiers]]
backend = "local-disk"
path = "{path}"
capacity = "50GiB"
# fsync = false               # true: what is stored survives power loss, too
# codecs = ["zstd"]           # lossless; "int8" and "int4" are smaller, and lossy

# [[tiers]]                   # shared with other machines
# backend = "redis"
# url = "redis://user:password@host:6379/0"
# capacity = "100GiB"
# required = false            # the store opens without it, and finds it later

# [[tiers]]
# backend = "s3"
# bucket = "kv"
# endpoint = "https://s3.example.com"
# capacity = "1TiB"
# required = false
"""


@config.callback(invoke_without_command=True)
def _shown(context: typer.Context, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show the config a store would run with, write a first one, or print its JSON schema."""
    if context.invoked_subcommand is None:
        show(config, json)


@config.command("show")
def show(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Print every option with its value, defaults included; secrets are masked."""
    source = config_source(config)
    effective = read_config(config).effective()
    if json:
        print_json(effective)
        return
    print(f"# {source if source is not None else 'no config file: the default'}")
    print(tomli_w.dumps(effective), end="")


@config.command("schema")
def schema() -> None:
    """Print the JSON schema of a config file, for editors; it knows every plug-in that is installed."""
    from pydantic.json_schema import PydanticJsonSchemaWarning

    from kvtier.config.schema import json_schema

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)  # defaults that may hold secrets are left out
        print_json(json_schema())


@config.command("init")
def init(
    file: Annotated[Path, typer.Argument(help="where to write it; - for the screen")] = Path(DEFAULT_FILE),
    path: Annotated[str, typer.Option(help="the directory of the disk tier")] = "~/.cache/kvtier",
    model: Annotated[str, typer.Option(help="the model whose KV this is")] = "org/name",
    revision: Annotated[str | None, typer.Option(help="the commit of its weights")] = None,
    force: Annotated[bool, typer.Option("--force", help="write over a file that is there")] = False,
) -> None:
    """Write a config with comments: memory above disk, and how to add the rest."""
    for option, value in (("path", path), ("model", model), ("revision", revision or "")):
        if '"' in value or "\\" in value:
            raise ConfigError(f"--{option} {value!r} holds a quote or a backslash; write it into the file yourself")
    line = '# revision = "..."' if revision is None else f'revision = "{revision}"'
    text = TEMPLATE.format(path=path, model=model, revision=line)
    if str(file) == "-":
        print(text, end="")
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{str(file)!r} is there already; give --force to write over it, or another name") from None
    first = "name your model and its revision in it, then" if revision is None else "now"
    print(f"wrote {file}; {first} run: kvtier doctor --config {file}")
