"""`jaxinfer models`: what can be run, how large it is, and presets to fetch. Lists without JAX; sizes of one model need it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.cli import ArgumentParser
from jaxinfer.config.families import FAMILIES, FamilyFacts
from jaxinfer.config.published import KVSize, Sizes, published, published_config, published_sizes
from jaxinfer.errors import CheckpointError
from jaxinfer.weights import presets

_GAP = "  "


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = ArgumentParser(
        prog="jaxinfer models",
        description="List families, presets and published models, show the sizes of one, or fetch a preset.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    actions = parser.add_subparsers(dest="action", metavar="show MODEL | pull PRESET")
    show = actions.add_parser("show", help="sizes of one model")
    show.add_argument(
        "model", metavar="MODEL", help="a published model, a preset, or a checkpoint's directory"
    )
    show.add_argument("--json", action="store_true", default=None, dest="show_json", help="print JSON")
    pull = actions.add_parser("pull", help="fetch a preset into the cache, check it and print its path")
    files = [p.name for p in presets.list_presets() if p.kind == "file"]
    pull.add_argument("preset", choices=files, metavar="PRESET", help=f"one of: {', '.join(files)}")
    args = parser.parse(argv)

    if args.action == "pull":
        print(presets.pull(args.preset))
    elif args.action == "show":
        kind, sizes = _sizes_of(args.model)
        if args.json or args.show_json:
            print(json.dumps({"name": args.model, "model_type": kind, **_sizes_as_json(sizes)}, indent=2))
        else:
            print("\n".join(_shown(args.model, kind, sizes)))
    elif args.json:
        print(json.dumps(_listing_as_json(), indent=2))
    else:
        print("\n".join(_listing()))
    return 0


def _sizes_of(model: str) -> tuple[str, Sizes]:
    """The model_type and the sizes of a published model, a preset with random weights, or a directory."""
    if model in published():
        return published_config(model)["model_type"], published_sizes()[model]
    built = [p.name for p in presets.list_presets() if p.kind == "random"]
    path = Path(model).expanduser()
    if model not in built and not path.is_dir():
        known = ", ".join([*published(), *built])
        raise CheckpointError(f"no model {model!r}: name a directory with a config.json, or one of: {known}")
    # Only now: these import JAX.
    from jaxinfer.models.registry import family_for
    from jaxinfer.models.sizes import sizes_of, sizes_of_config
    from jaxinfer.weights.open import open_checkpoint
    from jaxinfer.weights.safetensors import read_json

    if path.is_dir():
        config = read_json(path / "config.json")
        return str(config.get("model_type")), sizes_of_config(config)
    checkpoint = open_checkpoint(model)
    family = family_for(checkpoint.config)
    return checkpoint.config["model_type"], sizes_of(family, checkpoint.model_config())


def _shown(name: str, kind: str, sizes: Sizes) -> list[str]:
    count = sizes.parameters + sizes.vision
    rows = [
        ("parameters", f"{count:,} ({_short(count)})"),
        ("  of each token", f"{sizes.active:,} ({_short(sizes.active)})"),
        *([("  of the vision tower", f"{sizes.vision:,} ({_short(sizes.vision)})")] if sizes.vision else []),
        ("bytes as stored", _bytes(sizes.stored_bytes)),
        ("  in bfloat16", _bytes(sizes.bytes_in("bfloat16"))),
        ("  in float32", _bytes(sizes.bytes_in("float32"))),
        *(
            (f"KV of {_layers(kv)}", f"{kv.bytes_per_token:,} bytes a token in bfloat16{_kept(kv)}")
            for kv in sizes.kv
        ),
    ]
    width = max(len(label) for label, _ in rows)
    return [f"{name} ({kind})", *(f"{label:{width}}{_GAP}{value}" for label, value in rows)]


def _layers(kv: KVSize) -> str:
    return f"{kv.layers} {kv.look} layer{'s' if kv.layers > 1 else ''}"


def _kept(kv: KVSize) -> str:
    """How long a token's keys and values stay."""
    return f", of at most {kv.span:,} tokens" if kv.span else ""


def _listing() -> Iterable[str]:
    yield "FAMILIES"
    head = ("MODELS", "MODEL_TYPE", "ATTENTION", "FEED-FORWARD", "IMAGES", "TP", "EP", "CHECKPOINTS")
    yield from _table([head, *(_family_row(family) for family in FAMILIES)])
    yield "\nPRESETS (--model NAME)"
    head = ("NAME", "SIZE", "LICENSE", "STATE", "DESCRIPTION")
    yield from _table([head, *map(_preset_row, presets.list_presets())])
    yield "\nPUBLISHED MODELS (sizes; KV in bfloat16; more: jaxinfer models show NAME)"
    head = ("NAME", "PARAMETERS", "ACTIVE", "VISION", "AS STORED", "BFLOAT16", "FLOAT32", "KV A TOKEN")
    yield from _table([head, *(_published_row(*item) for item in published_sizes().items())])


def _family_row(family: FamilyFacts) -> tuple[str, ...]:
    checkpoints, *others = family.cells
    names = ", ".join(name for name, _ in family.models)
    return names, ", ".join(family.model_types), *others, checkpoints


def _preset_row(preset: presets.Preset) -> tuple[str, ...]:
    if preset.kind == "random":
        return preset.name, "-", "-", "built-in", preset.description
    state = "cached" if presets.locate(preset.name) else "not fetched"
    return preset.name, f"{preset.bytes / 1e6:.1f} MB", preset.license, state, preset.description


def _published_row(name: str, sizes: Sizes) -> tuple[str, ...]:
    return (
        name,
        _short(sizes.parameters + sizes.vision),
        _short(sizes.active),
        _short(sizes.vision) if sizes.vision else "-",
        _bytes(sizes.stored_bytes),
        _bytes(sizes.bytes_in("bfloat16")),
        _bytes(sizes.bytes_in("float32")),
        " + ".join(f"{kv.bytes_per_token / 1024:.1f} KiB{_kept(kv)}" for kv in sizes.kv),
    )


def _table(rows: list[tuple[str, ...]]) -> Iterable[str]:
    """Rows with their columns aligned; the last one is left as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        yield _GAP.join(cells).rstrip()


def _short(count: int) -> str:
    """Three digits, as models are named: 135M, 8.03B, 1.03T."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count / 1000:.3g}K"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1000:.1f} kB"


def _sizes_as_json(sizes: Sizes) -> dict[str, Any]:
    return {
        **sizes.as_json(),
        "bfloat16_bytes": sizes.bytes_in("bfloat16"),
        "float32_bytes": sizes.bytes_in("float32"),
    }


def _listing_as_json() -> dict[str, Any]:
    return {
        "families": [
            {
                "models": [name for name, _ in family.models],
                "model_types": family.model_types,
                "attention": family.attention,
                "feed_forward": family.feed_forward,
                "images": family.images,
                "tp": family.tp,
                "ep": family.ep,
                "checkpoints": family.checkpoints,
            }
            for family in FAMILIES
        ],
        "presets": [_preset_as_json(p) for p in presets.list_presets()],
        "published": [
            {
                "name": name,
                "model_type": published_config(name)["model_type"],
                **_sizes_as_json(sizes),
            }
            for name, sizes in published_sizes().items()
        ],
    }


def _preset_as_json(preset: presets.Preset) -> dict[str, object]:
    path = presets.locate(preset.name) if preset.kind == "file" else None
    return {
        "name": preset.name,
        "description": preset.description,
        "kind": preset.kind,
        "license": preset.license or None,
        "bytes": preset.bytes or None,
        "sha256": preset.sha256 or None,
        "package": f"{preset.package}=={preset.version}" if preset.package else None,
        "cached": path is not None,
        "path": None if path is None else str(path),
    }
