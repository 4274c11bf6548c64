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
        values = (
            *(program, int(gpus), mesh["name"], sizes["data"], sizes["fsdp"]),
            f"{mesh['peak_bytes'] / 2**30:.2f}",
            sum(one["count"] for one in mesh["collectives"]),
            f"{mesh['links'] / 1e6:.0f}",
            f"{mesh['network'] / 1e6:.0f}",
            f"{mesh['floor'] * 1e3:.2f}" if mesh["floor"] else "",
            mesh["roofline"]["bound"] if mesh["roofline"] else "",
            "yes" if mesh["fits"] and same else "",
        )
        yield dict(zip(_FIELDS, values, strict=True))


def _table(cells):
    """Prints a Markdown table, a line for each mesh."""
    heads = ("program, GPUs", "data x fsdp", "GiB", "collectives", "MB on NVLink")
    heads += ("on the network", "floor, ms")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in cells:
        chosen = "**" if row["chosen"] else ""
        words = (
            f"{row['program']} {row['gpus']:,}",
            f"{chosen}{row['data']:,} x {row['fsdp']:,}{chosen}",
            *(row["gib"], f"{row['messages']:,}", f"{int(row['mb_links']):,}"),
            f"{int(row['mb_network']):,}",
            f"{row['floor_ms']} ({row['bound']})",
        )
        print(f"| {' | '.join(words)} |")


def _plot(cells, path):
    """Draws the bytes on the network, memory and floor against the GPUs."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    drawn = {
        "mb_network": "MB per GPU and step on the network",
        "gib": "GiB per GPU",
        "floor_ms": "floor of a step, ms",
    }
    programs = list(dict.fromkeys(row["program"] for row in cells))
    figure, grid = pyplot.subplots(
        len(drawn),
        len(programs),
        figsize=(2.7 * len(programs), 2.1 * len(drawn)),
        sharex=True,
        squeeze=False,
    )
    for line, (field, label) in zip(grid, drawn.items(), strict=True):
        line[0].set_ylabel(label, fontsize=8)
        for place, program in zip(line, programs, strict=True):
            own = [row for row in cells if row["program"] == program]
            for color, kind in zip(_COLORS, _kinds(), strict=True):
                rows = [row for row in own if kind[1](row) and row[field]]
                xs = [row["gpus"] for row in rows]
                ys = [float(row[field]) for row in rows]
                place.plot(xs, ys, "o-", ms=3, lw=1, color=color, label=kind[0])
            place.set_xscale("log", base=2)
            place.set_ylim(bottom=0)
            ticks = sorted({row["gpus"] for row in own})
            place.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=7)
            place.tick_params(axis="y", labelsize=7)
            place.grid(alpha=0.3)
    for place, program in zip(grid[0], programs, strict=True):
        place.set_title(program, fontsize=9)
    for place in grid[-1]:
        place.set_xlabel("GPUs", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", ncols=3, fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=110)


def _kinds():
    """Returns labels of the lines of a panel, and which rows are on each."""
    return (
        ("copies on all GPUs (data)", lambda row: row["fsdp"] == 1),
        ("parts within a host (fsdp=8)", lambda row: row["fsdp"] == 8),
        ("parts on all GPUs (fsdp)", lambda row: row["data"] == 1),
    )


def _write(flags, rows):
    """Prints and writes what the flags ask for."""
    # In the order of the programs, however they were compiled.
    names = [name for name in _PROGRAMS for row in rows]
    order = {name: i for i, name in reversed(list(enumerate(names)))}
    cells = [cell for row in rows for cell in _cells(row)]
    cells.sort(key=lambda cell: (order[cell["program"]], cell["gpus"], cell["fsdp"]))
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
