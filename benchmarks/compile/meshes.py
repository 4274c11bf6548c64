"""The table and the figure of docs/scaling.md: meshes for 8 to 4,096 GPUs or TPU chips.

python -m benchmarks.compile.meshes --out=rows.jsonl  compiles what is not in the file yet
python -m benchmarks.compile.meshes --out=rows.jsonl --table --csv=FILE --plot=FILE

Needs the extras `cuda` and `tpu`, and no GPU or TPU. Each row is a process of its own,
which compiles the three meshes of `compile --mesh=auto` and takes minutes. The images
per device stay, so that the batch grows with the devices. --table prints the rows whose
names --only matches; --csv and --plot write all of them.
"""

import csv
import dataclasses
import pathlib
import re

from benchmarks import smoke
from benchmarks.compile import ahead
from vit_jax.tools.planning import costs, mesh_choice
from vit_jax.tools.planning.analysis import Analysis, Roofline

_I21K = "configs/b16_i21k.py:model="
_FULL = ("model.remat_policy=full",)
# Names to recipes, images per GPU, and further keys.
_PROGRAMS = {
    "B/16": (f"{_I21K}B/16", 128, _FULL),
    "L/16": (f"{_I21K}L/16", 128, _FULL),
    "H/14": (f"{_I21K}H/14", 128, _FULL),
    "MAE L/16": ("configs/mae.py:model=L/16", 128, _FULL),
    "DINOv2 L/14": ("configs/dinov2.py:model=L/14", 16, _FULL),
    "CLIP L/14": (
        "configs/clip.py:model=L/14",
        128,
        # The bytes need no download, and give the same program.
        (*_FULL, "model.scan=True", "data.tokenizer=bytes"),
    ),
}
# Kinds of devices to topologies and numbers of slices, by the number of devices.
_PLACES = {
    "h100": {
        8: ("h100:8", 1),
        64: ("h100:8x8", 1),
        256: ("h100:32x8", 1),
        1024: ("h100:128x8", 1),
    },
    "v5e": {
        8: ("v5e:2x4", 1),
        64: ("v5e:8x8", 1),
        256: ("v5e:16x16", 1),
        1024: ("v5e:16x16", 4),
        4096: ("v5e:16x16", 16),
    },
}
_FIELDS = ("program", "kind", "devices", "mesh", "data", "fsdp", "gib", "messages")
_FIELDS += ("mb_links", "mb_network", "mb_loss", "floor_ms", "bound", "chosen")
_COLORS = ("#2a6f97", "#c8553d", "#588157", "#8e5aa8", "#c99a2e", "#4d4d4d")
_MARKERS = "os^Dv*"
_LINES = {"h100": "-", "v5e": ":"}


def _rows():
    """Yields name and words of each row, the fewest devices first."""
    counts = sorted({count for places in _PLACES.values() for count in places})
    for count in counts:
        for kind, places in _PLACES.items():
            for name, (recipe, images, keys) in _PROGRAMS.items():
                if count not in places:
                    continue
                place, slices = places[count]
                keys = ("model.dtype=bfloat16", f"batch_size={images * count}", *keys)
                words = ["vit_jax.compile", f"--config={recipe}", "--mesh=auto"]
                words += [f"--topology={place}", f"--slices={slices}"]
                words += [f"--config.{key}" for key in keys]
                yield f"{name} {kind} {count}", words


def _candidate(mesh):
    """Reads a candidate that `mesh_choice.to_json` wrote."""
    values = {field.name: mesh[field.name] for field in dataclasses.fields(Analysis)}
    if times := mesh["roofline"]:
        names = (field.name for field in dataclasses.fields(Roofline))
        values["roofline"] = Roofline(*(times[name] for name in names))
    return mesh_choice.Candidate(mesh["name"], mesh["keys"], Analysis(**values))


def _cells(row):
    """Yields a dict of _FIELDS for each mesh of a row."""
    program, kind, count = row["name"].rsplit(" ", 2)
    candidates = [_candidate(mesh) for mesh in row["meshes"]]
    chosen = mesh_choice.choose(candidates)
    for one in candidates:
        result, sent = one.result, one.result.collectives
        place = program, kind, int(count), one.name, *one.keys.values()
        values = [""] * (len(_FIELDS) - len(place))
        if result.fits:
            links, network = mesh_choice.traffic(result)
            of_loss = (part for part in sent if part["purpose"] in costs.SCOPES)
            values = (
                f"{result.peak_bytes / 2**30:.2f}",
                sum(part["count"] for part in sent),
                f"{links / 1e6:.0f}",
                f"{network / 1e6:.0f}",
                f"{sum(part['sent'] for part in of_loss) / 1e6:.0f}",
                f"{result.roofline.floor * 1e3:.2f}",
                result.roofline.bound,
                "yes" if one is chosen else "",
            )
        yield dict(zip(_FIELDS, (*place, *values), strict=True))


def _table(cells):
    """Prints a Markdown table, a line for each mesh."""
    heads = ("program, devices", "data x fsdp", "GiB", "collectives", "MB on links")
    heads += ("on the network", "for the loss", "floor, ms")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in cells:
        chosen = "**" if row["chosen"] else ""
        numbers = "-" * 6
        if row["gib"]:
            names = ("messages", "mb_links", "mb_network", "mb_loss")
            numbers = (
                row["gib"],
                *(f"{int(row[name]):,}" for name in names),
                f"{row['floor_ms']} ({row['bound']})",
            )
        words = (
            f"{row['program']}, {row['devices']:,} {row['kind']}",
            f"{chosen}{row['data']:,} x {row['fsdp']:,}{chosen}",
            *numbers,
        )
        print(f"| {' | '.join(words)} |")


def _plot(cells, path):
    """Draws bytes and memory per device over the devices, with copies on all of them."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    drawn = {
        "MB sent per device and step": lambda row: row["mb_links"] + row["mb_network"],
        "GiB of memory per device": lambda row: row["gib"],
    }
    by_line = {}
    for row in cells:
        if row["fsdp"] == 1 and row["gib"]:
            numbers = {
                key: float(row[key]) for key in ("mb_links", "mb_network", "gib")
            }
            line = by_line.setdefault((row["program"], row["kind"]), [])
            line.append((row["devices"], numbers))
    figure, panels = pyplot.subplots(2, 1, figsize=(5, 6.6), sharex=True)
    for panel, (label, value) in zip(panels, drawn.items(), strict=True):
        for (program, kind), rows in by_line.items():
            place = list(_PROGRAMS).index(program)
            panel.plot(
                [count for count, _ in rows],
                [value(numbers) for _, numbers in rows],
                _LINES[kind],
                marker=_MARKERS[place],
                color=_COLORS[place],
                label=f"{program}, {kind}",
                alpha=0.85,
            )
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        panel.set_ylabel(label, fontsize=11)
        panel.tick_params(labelsize=11)
        panel.grid(alpha=0.3)
    ticks = sorted({count for rows in by_line.values() for count, _ in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{count:,}" for count in ticks])
    panel.minorticks_off()
    panel.set_xlabel("devices: GPUs (h100) or TPU chips (v5e)", fontsize=11)
    lines = -(-len(by_line) // 2)
    figure.legend(*panel.get_legend_handles_labels(), loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.035 * lines + 0.01, 1, 1))
    figure.savefig(path, dpi=150)


def _write(flags, rows):
    """Prints and writes what the flags ask for."""
    cells = [cell for row in rows for cell in _cells(row)]
    programs, kinds = list(_PROGRAMS), list(_PLACES)

    def order(cell):
        places = kinds.index(cell["kind"]), programs.index(cell["program"])
        return *places, cell["devices"]

    cells.sort(key=order)
    named = "{program} {kind} {devices}"
    _table([cell for cell in cells if re.search(flags.only, named.format(**cell))])
    if flags.csv:
        with flags.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(cells)
    if flags.plot:
        _plot(cells, flags.plot)


SMOKE = "--out={folder}/rows.jsonl --list"


if __name__ == "__main__":
    parser = ahead.parser(__doc__)
    parser.add_argument("--csv", type=pathlib.Path, help="file of numbers to write")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG to write")
    flags = smoke.parse(parser, SMOKE)
    ahead.run(flags, _rows(), lambda rows: _write(flags, rows))
