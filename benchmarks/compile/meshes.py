"""The table and the figure of docs/scaling.md: meshes for 8 to 1,024 GPUs.

python -m benchmarks.compile.meshes --out=rows.jsonl  compiles what is not in the file yet
python -m benchmarks.compile.meshes --out=rows.jsonl --table --csv=FILE --plot=FILE

Needs the extra `cuda`, and no GPU. Each row is a process of its own, which compiles the
three meshes of `compile --mesh=auto` and takes minutes. The images per GPU stay, so that
the batch grows with the GPUs. --table prints the rows; --csv and --plot write them.
"""

import csv
import pathlib

from benchmarks import smoke
from benchmarks.compile import ahead

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
        (*_FULL, "data.tokenizer=bytes"),  # Nothing to download; the same program.
    ),
}
_HOSTS = (1, 8, 32, 128)  # Of 8 GPUs.
_FIELDS = ("program", "gpus", "mesh", "data", "fsdp", "gib", "messages")
_FIELDS += ("mb_links", "mb_network", "floor_ms", "bound", "chosen")
# Lines of a panel, and the meshes on each.
_KINDS = {
    "copies on all GPUs (data)": lambda row: row["fsdp"] == 1,
    "parts within a host (fsdp=8)": lambda row: row["fsdp"] == 8,
    "parts on all GPUs (fsdp)": lambda row: row["data"] == 1,
}
_COLORS = ("#2a6f97", "#c8553d", "#588157")


def _rows():
    """Yields name and words of each row, the fewest GPUs first."""
    for hosts in _HOSTS:
        for name, (recipe, images, keys) in _PROGRAMS.items():
            place = f"h100:{hosts}x8" if hosts > 1 else "h100:8"
            keys = ("model.dtype=bfloat16", f"batch_size={images * hosts * 8}", *keys)
            words = ["vit_jax.compile", f"--config={recipe}", f"--topology={place}"]
            words += ["--mesh=auto", *(f"--config.{key}" for key in keys)]
            yield f"{name} {8 * hosts}", words


def _cells(row):
    """Returns a dict of _FIELDS for each mesh of a row."""
    program, gpus = row["name"].rsplit(" ", 1)
    for mesh in row["meshes"]:
        sizes = mesh["settings"]["mesh"]
        same = all(row["settings"]["mesh"][axis] == n for axis, n in sizes.items())
        place = program, int(gpus), mesh["name"], *mesh["keys"].values()
        values = [""] * (len(_FIELDS) - len(place))
        if mesh["fits"]:
            values = (
                f"{mesh['peak_bytes'] / 2**30:.2f}",
                sum(one["count"] for one in mesh["collectives"]),
                f"{mesh['links'] / 1e6:.0f}",
                f"{mesh['network'] / 1e6:.0f}",
                f"{mesh['roofline']['floor'] * 1e3:.2f}",
                mesh["roofline"]["bound"],
                "yes" if same else "",
            )
        yield dict(zip(_FIELDS, (*place, *values), strict=True))


def _table(cells):
    """Prints a Markdown table, a line for each mesh."""
    heads = ("program, GPUs", "data x fsdp", "GiB", "collectives", "MB on NVLink")
    heads += ("on the network", "floor, ms")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in cells:
        chosen = "**" if row["chosen"] else ""
        numbers = "-----"
        if row["gib"]:
            counts = (row[key] for key in ("messages", "mb_links", "mb_network"))
            numbers = (
                row["gib"],
                *(f"{int(count):,}" for count in counts),
                f"{row['floor_ms']} ({row['bound']})",
            )
        words = (
            f"{row['program']} {row['gpus']:,}",
            f"{chosen}{row['data']:,} x {row['fsdp']:,}{chosen}",
            *numbers,
        )
        print(f"| {' | '.join(words)} |")


def _plot(cells, path):
    """Draws network, memory and floor of programs with several numbers of GPUs."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    drawn = {
        "mb_network": "MB sent on the network",
        "gib": "GiB of memory",
        "floor_ms": "floor of a step, ms",
    }
    by_program = {}
    for row in cells:
        by_program.setdefault(row["program"], []).append(row)
    several = {
        name: rows
        for name, rows in by_program.items()
        if len({row["gpus"] for row in rows}) > 1
    }
    figure, grid = pyplot.subplots(
        len(several),
        len(drawn),
        figsize=(3 * len(drawn), 2.6 * len(several) + 0.4),
        squeeze=False,
    )
    for line, (program, own) in zip(grid, several.items(), strict=True):
        ticks = sorted({row["gpus"] for row in own})
        for place, (field, label) in zip(line, drawn.items(), strict=True):
            for color, (kind, is_kind) in zip(_COLORS, _KINDS.items(), strict=True):
                rows = [row for row in own if is_kind(row) and row[field]]
                xs = [row["gpus"] for row in rows]
                ys = [float(row[field]) for row in rows]
                place.plot(xs, ys, "o-", color=color, label=kind, alpha=0.8)
            place.set_xscale("log", base=2)
            place.set_xticks(ticks, [f"{n:,}" for n in ticks])
            place.minorticks_off()
            place.set_ylim(0, place.get_ylim()[1] * 1.1)
            place.set_title(f"{program}: {label}", fontsize=9)
            place.set_xlabel("GPUs", fontsize=8)
            place.tick_params(labelsize=8)
            place.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.1 / len(several), 1, 1))
    figure.savefig(path, dpi=110)


def _write(flags, rows):
    """Prints and writes what the flags ask for."""
    cells = [cell for row in rows for cell in _cells(row)]
    programs = list(_PROGRAMS)
    cells.sort(key=lambda cell: (programs.index(cell["program"]), cell["gpus"]))
    _table(cells)
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
