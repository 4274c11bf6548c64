"""The table of GPUs in docs/benchmarks/gpu.md: the largest batch of each recipe.

python -m benchmarks.compile.gpu_ahead --out=rows.jsonl  compiles what is not in the file yet
python -m benchmarks.compile.gpu_ahead --out=rows.jsonl --table  prints the file as a table

Needs the extra `cuda`, and no GPU. Each row is a process of its own: it finds the largest
bfloat16 batch that fits, from several compilations, and takes minutes. The search for
A100s begins with the batch of the H100s, which have as much memory.
"""

import json

from benchmarks import smoke
from benchmarks.compile import ahead

_I21K = "configs/b16_i21k.py:model="
_FIRST = (
    *("configs/b16_i21k.py", f"{_I21K}L/16", f"{_I21K}H/14"),
    *(
        "configs/mae.py",
        "configs/dino.py",
        "configs/swin.py:model=B",
        "configs/clip.py",
    ),
)
_OTHERS = (
    *("configs/b16_i1k.py", f"{_I21K}B/32", f"{_I21K}L/32", "configs/jft.py"),
    *("configs/masked_patch.py", "configs/simmim.py", "configs/mixer.py"),
    *("configs/deit.py", "configs/deit3.py", "configs/transfer.py", "configs/vtab.py"),
    *("configs/bit_hyperrule.py", "configs/siglip_lit_coco.py", "configs/flowers.py"),
    *("configs/flowers_finetune.py", "configs/cifar10.py", "configs/digits.py"),
    *("configs/digits_finetune.py", "configs/digits_names.py"),
    *("configs/segmentation.py", "configs/vit5.py"),
    *("configs/dinov2.py:model=S/14", "configs/dinov3.py:model=L/16"),
)
_VARIANTS = {
    "scan": ["model.scan=True"],
    "remat full": ["model.remat_policy=full"],
    "remat dots": ["model.remat_policy=dots"],
    "fsdp 8": ["mesh.data=1", "mesh.fsdp=8"],
    "fsdp 8, remat full": ["mesh.data=1", "mesh.fsdp=8", "model.remat_policy=full"],
}


def _words(recipe, gpu, *keys):
    words = ["vit_jax.compile", f"--config={recipe}", f"--topology={gpu}"]
    if recipe.startswith(("configs/clip", "configs/siglip")):
        keys += ("data.tokenizer=bytes",)  # Nothing to download, and the same program.
    keys = ("model.dtype=bfloat16", *keys)
    return [*words, *(f"--config.{key}" for key in keys), "--largest_batch"]


def _rows(out):
    """Yields name and words of each row, the most wanted first; reads the file `out`."""
    recipes = (*_FIRST, *_OTHERS)
    for recipe in recipes:
        yield f"{recipe} h100:8", _words(recipe, "h100:8")
    for model in ("B/16", "L/16", "H/14"):
        for name, keys in _VARIANTS.items():
            yield f"{model}, {name} h100:8", _words(f"{_I21K}{model}", "h100:8", *keys)
    lines = out.read_text().splitlines() if out.exists() else ()
    found = {
        row["name"]: row["settings"]["batch_size"] for row in map(json.loads, lines)
    }
    for recipe in recipes:
        size = found.get(f"{recipe} h100:8")
        keys = [f"batch_size={size}"] if size else []
        yield f"{recipe} a100:8", _words(recipe, "a100:8", *keys)


def _table(rows):
    """Prints a Markdown table, a line for each program, of H100 and A100 in this order."""
    heads = ("images per GPU", "peak GiB", "GFLOP an image", "of 3 forward")
    heads += ("MB moved an image", "attention", "floor, ms", "bound by")
    print(f"| program | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
    programs = {}
    for row in sorted(rows, key=lambda row: row["name"].split()[-1], reverse=True):
        program, gpus = row["name"].rsplit(" ", 1)
        programs.setdefault(program, {})[gpus] = _cells(row)
    for name, by_gpus in programs.items():
        several = by_gpus.values()
        joined = (
            ", ".join(cells[:1] if len({*cells}) == 1 else cells)
            for cells in zip(*several, strict=True)
        )
        name = f"`{name.removeprefix('configs/')}`" if ".py" in name else name
        alone = f", {next(iter(by_gpus))} alone" if len(by_gpus) == 1 else ""
        print(f"| {name}{alone} | {' | '.join(joined)} |")


def _cells(row):
    """Returns the cells of a row; its numbers are of one device."""
    gpus = row["settings"]["mesh"]["data"] * row["settings"]["mesh"]["fsdp"]
    images = row["settings"]["batch_size"] // gpus
    kernels = sum(n for name, n in row["kernels"].items() if "fmha" in name)
    bounds = row["roofline"] or {"floor": 0, "bound": "unknown"}
    return (
        f"{images:,}" if row["fits"] else "0",
        f"{row['peak_bytes'] / 2**30:.1f}",
        _rounded(row["flops"] / images / 1e9),
        f"{row['flops'] / row['model_flops']:.3f}",
        _rounded(row["moved_bytes"] / images / 1e6),
        "cuDNN" if kernels else row["settings"]["attention_impl"] or "-",
        f"{bounds['floor'] * 1e3:,.0f}",
        bounds["bound"],
    )


def _rounded(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


SMOKE = "--out={folder}/rows.jsonl --only='^configs/digits.py h100'"


if __name__ == "__main__":
    flags = smoke.parse(ahead.parser(__doc__), SMOKE)
    ahead.run(flags, _rows(flags.out), _table)
