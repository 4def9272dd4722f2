"""`kvtier doctor`: the examination as people and programs read it."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.output import print_json
from kvtier.cli.sizes import size_in
from kvtier.cli.tiers import ConfigOption, DeadlineOption, JsonOption, config_source
from kvtier.errors import ConfigError, InvalidValueError
from kvtier.planner import Prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cli.doctor.finding import Finding

WIDTH = 80
_MARKS = {"ok": "ok      ", "note": "note    ", "warning": "WARNING ", "problem": "PROBLEM "}


def doctor(
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="a known shape, see `kvtier size --help`")] = None,
    model_config: Annotated[Path | None, typer.Option(help="the model's Hugging Face config.json")] = None,
    token_bytes: Annotated[str | None, typer.Option(help="KV bytes of one token, such as 128KiB")] = None,
    tokens_per_second: Annotated[float, typer.Option(min=0.001, help="speed of the prefill")] = 10_000.0,
    prefill: Annotated[
        list[str] | None, typer.Option(help="a measured prefill, as TOKENS=SECONDS; two lengths or more")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="write what was measured here, for [planner] calibration")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="status 1 for warnings, too")] = False,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = 10.0,
) -> None:
    """Look at a config and at every tier of it: what does not work, what bites later, and what to change."""
    from kvtier.cli.doctor.examine import Patient, examine

    source = config_source(config)
    if source is not None and not source.is_file():
        raise ConfigError(f"no config file {str(source)!r}; write one with: kvtier config init")
    told = _prefill(prefill or [])
    patient = Patient(
        source=source,
        bytes_per_token=_bytes_per_token(model, model_config, token_bytes),
        prefill=told or Prefill.from_speed(tokens_per_second),
        seconds=deadline_seconds,
    )
    found = asyncio.run(examine(patient))
    if calibration is not None:
        from kvtier.config.planner import write_calibration

        write_calibration(calibration, told, patient.links)
    counts = {level: sum(finding.level == level for finding in found) for level in _MARKS}
    bad = counts["problem"] + counts["warning"] * strict
    if json:
        print_json({"healthy": not bad, **counts, "findings": [asdict(finding) for finding in found]})
    else:
        print(source if source is not None else "no config file: the default config")
        _show(found)
        print(f"{counts['problem']} problems, {counts['warning']} warnings")
    if bad:
        raise typer.Exit(1)


def _bytes_per_token(model: str | None, model_config: Path | None, given: str | None) -> float | None:
    from kvtier.sim.shapes import shape_in, shape_of
    from kvtier.sim.sizing import by_format

    if sum(each is not None for each in (model, model_config, given)) > 1:
        raise InvalidValueError("give one of --model, --model-config and --token-bytes")
    if given is not None:
        return size_in("--token-bytes", given)
    layout = shape_of(model) if model is not None else shape_in(model_config) if model_config is not None else None
    return None if layout is None else by_format(layout, context=1, sessions=1)["fp16"].bytes_per_token


def _prefill(given: Sequence[str]) -> Prefill | None:
    measured = []
    for item in given:
        tokens, _, seconds = item.partition("=")
        try:
            measured.append((int(tokens), float(seconds)))
        except ValueError:
            raise InvalidValueError(f"--prefill {item!r}: write TOKENS=SECONDS, such as 2048=0.25") from None
    return Prefill.fit(measured) if measured else None


def _show(found: Sequence[Finding]) -> None:
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, 120)
    for finding in found:
        where = f"{finding.tier}: " if finding.tier else ""
        _print(_MARKS[finding.level], f"{where}{finding.text}", width)
        if finding.fix:
            _print(" " * 8, f"-> {finding.fix}", width)


def _print(mark: str, text: str, width: int) -> None:
    print(textwrap.fill(text, width, initial_indent=mark, subsequent_indent=" " * 8, break_on_hyphens=False))
