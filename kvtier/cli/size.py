"""`kvtier size`: how much cache a model's contexts need, and how long it takes to move one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.chunk.layout import KVLayout
from kvtier.cli.output import human_bytes, print_json, print_table
from kvtier.cli.sizes import size_in
from kvtier.errors import InvalidValueError
from kvtier.sim.shapes import known_shapes, shape_in, shape_of
from kvtier.sim.sizing import BITS, LINK_SPEEDS, by_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.sim.sizing import Size


def size(
    model: Annotated[str | None, typer.Option(help=f"a known shape: {', '.join(known_shapes())}")] = None,
    config: Annotated[Path | None, typer.Option(help="a Hugging Face config.json")] = None,
    layers: Annotated[int | None, typer.Option(help="layers that keep KV")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads")] = None,
    head_dim: Annotated[int | None, typer.Option(help="dimension of a head")] = None,
    latent_dim: Annotated[int | None, typer.Option(help="MLA: dimension of the latent, rope part included")] = None,
    window: Annotated[int | None, typer.Option(help="sliding window of all layers, in tokens")] = None,
    context: Annotated[int, typer.Option(min=1, help="tokens of one session")] = 1000,
    sessions: Annotated[int, typer.Option(min=1, help="sessions kept at once")] = 1,
    format: Annotated[str, typer.Option(help=f"what is stored: {', '.join(BITS)}")] = "fp16",
    link: Annotated[list[str] | None, typer.Option(help="another link, as NAME=BYTES_PER_SECOND")] = None,
    capacity: Annotated[list[str] | None, typer.Option(help="a tier to fill, as NAME=SIZE")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON; sizes are bytes")] = False,
) -> None:
    """Tell how many bytes of KV the sessions need, by format and tier, and how long moving one takes."""
    if format not in BITS:
        raise InvalidValueError(f"--format {format!r}: write one of {', '.join(BITS)}")
    layout = _layout(model, config, (layers, kv_heads, head_dim, latent_dim, window))
    sizes = by_format(layout, context=context, sessions=sessions)
    chosen = sizes[format]
    speeds = dict(LINK_SPEEDS) | {name: size_in("--link", speed) for name, speed in _pairs("--link", link or [])}
    tiers = {name: size_in("--capacity", room) for name, room in _pairs("--capacity", capacity or [])}
    if json:
        print_json(
            {
                "context": context,
                "sessions": sessions,
                "format": format,
                "bytes_per_token": _whole(chosen.bytes_per_token),
                "bytes_per_session": _whole(chosen.bytes_per_session),
                "bytes": _whole(chosen.bytes),
                "by_format": {
                    name: {"bytes_per_token": _whole(item.bytes_per_token), "bytes": _whole(item.bytes)}
                    for name, item in sizes.items()
                },
                "seconds_by_link": {name: chosen.seconds(speed) for name, speed in speeds.items()},
                "tiers": {name: _fit(room, chosen) for name, room in tiers.items()},
            }
        )
        return
    _show(sizes, chosen, speeds, tiers, title=f"{sessions:,} x {context:,} tokens")


def _whole(size: float) -> int | float:
    return int(size) if size == int(size) else size


def _layout(model: str | None, config: Path | None, numbers: tuple[int | None, ...]) -> KVLayout:
    layers, kv_heads, head_dim, latent_dim, window = numbers
    if model is not None:
        return shape_of(model)
    if config is not None:
        return shape_in(config)
    if layers is not None and latent_dim is not None:
        return KVLayout.mla(num_layers=layers, latent_dim=latent_dim, dtype="float16")
    if layers is None or kv_heads is None or head_dim is None:
        raise InvalidValueError("give --model, --config, or --layers with --kv-heads and --head-dim or --latent-dim")
    plain = KVLayout(num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype="float16")
    if window is None:
        return plain
    from kvtier.chunk.layout import LayerGroup

    group = plain.groups[0]
    return KVLayout([LayerGroup(group.name, group.layers, group.tensors, window=window)])


def _pairs(option: str, given: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for item in given:
        name, _, value = item.partition("=")
        if not value:
            raise InvalidValueError(f"{option} {item!r}: write NAME=SIZE, such as disk=3GB")
        pairs.append((name, value))
    return pairs


def _fit(room: int, chosen: Size) -> dict[str, float]:
    return {
        "capacity_bytes": room,
        "sessions": room // max(chosen.bytes_per_session, 1),
        "tokens": room // max(chosen.bytes_per_token, 1),
        "share_of_need": room / chosen.bytes,
    }


def _show(
    sizes: Mapping[str, Size], chosen: Size, speeds: Mapping[str, float], tiers: Mapping[str, int], *, title: str
) -> None:
    rows = [
        [name, f"{item.bytes_per_token:,.0f}", human_bytes(item.bytes_per_session), human_bytes(item.bytes)]
        for name, item in sizes.items()
    ]
    print_table(title, ["format", "bytes per token", "one session", "all sessions"], rows)
    moves = [[name, human_bytes(speed) + "/s", f"{chosen.seconds(speed):.4g}"] for name, speed in speeds.items()]
    print_table("moving one session", ["link", "speed", "seconds"], moves)
    if tiers:
        fits = [
            [name, human_bytes(room), f"{_fit(room, chosen)['sessions']:,.0f}", f"{_fit(room, chosen)['tokens']:,.0f}"]
            for name, room in tiers.items()
        ]
        print_table("what tiers hold", ["tier", "capacity", "sessions", "tokens"], fits)
