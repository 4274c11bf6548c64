"""The table of ahead-of-time compilations in docs/benchmarks/tpu.md.

python -m benchmarks.compile.tpu_ahead --out=rows.jsonl  compiles what is not in the file yet
python -m benchmarks.compile.tpu_ahead --out=rows.jsonl --table  prints the file as a table

Needs the extra `tpu`. Each row is a process of its own, one after the other; a row takes
minutes, so the file grows by a line as soon as one is done, and a second start goes on.
"""

from benchmarks import smoke
from benchmarks.compile import ahead

_I21K = {v: f"configs/{v[0].lower()}{v[2:]}_i21k.py" for v in ("B/16", "L/16", "H/14")}
_TUNE = "configs/transfer.py:model=L/16,dataset=imagenet2012,resolution=512"
# As the plain ViT is trained: no dropout, data parallel, a bfloat16 first moment.
_PLAIN = {
    "mesh.fsdp": 1,
    "model.dropout": 0.0,
    "model.remat_policy": "full",
    "optim.mu_dtype": "bfloat16",
}


def _ours(config, topology, **keys):
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    return ["vit_jax.compile", f"--config={config}", f"--topology={topology}", *words]


def _rows():
    """Yields name and words of each row, the most wanted first."""
    for v in ("L/16", "H/14", "B/16"):
        plain = f"--variant={v}", "--topology=v5e:16x16"
        yield f"plain {v} v5e:16x16", ["benchmarks.compile.baseline_vit", *plain]
    for v in ("L/16", "H/14", "B/16"):
        for scan in (False, True):
            name = f"{v} v5e:16x16 data parallel{', scan' * scan}"
            yield name, _ours(_I21K[v], "v5e:16x16", **_PLAIN, **{"model.scan": scan})
        yield (
            f"{v} v5e:16x16 fsdp 16, scan",
            _ours(
                _I21K[v],
                "v5e:16x16",
                **_PLAIN | {"mesh.fsdp": 16},
                **{"model.scan": True},
            ),
        )
    for config in ("b16", "b32", "l16", "l32", "h14"):
        path = f"configs/{config}_i21k.py"
        yield f"{path} as shipped v5e:16x16", _ours(path, "v5e:16x16")
    places = [("v4:4x4x4", v) for v in ("B/16", "L/16", "H/14")]
    places += [("v6e:8x8", "H/14"), ("v5p:4x4x4", "H/14")]
    for place, v in places:
        for fsdp in (1, 8):
            how = f"fsdp {fsdp}" if fsdp > 1 else "data parallel"
            keys = _PLAIN | {"mesh.fsdp": fsdp, "model.scan": True}
            yield f"{v} {place} {how}, scan", _ours(_I21K[v], place, **keys)
    for fsdp in (1, 4):
        how = f"fsdp {fsdp}" if fsdp > 1 else "data parallel"
        for remat in ("none", "full"):
            keys = {"mesh.fsdp": fsdp, "model.scan": True, "model.remat_policy": remat}
            name = f"L/16 at 512 px v5e:4x4 {how}, remat {remat}, scan"
            yield name, _ours(_TUNE, "v5e:4x4", **keys)


def _table(rows):
    """Prints a Markdown table."""
    print("| program | fits | peak GiB | arguments | TFLOP | of 3 forward | GB moved |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        flops, model = row.get("flops") or 0, row.get("model_flops") or 0
        cells = (
            row["name"],
            "yes" if row.get("fits") else "no",
            f"{row.get('peak_bytes', 0) / 2**30:.2f}",
            f"{row.get('argument_bytes', 0) / 2**30:.2f}",
            f"{flops / 1e12:.2f}",
            f"{flops / model:.3f}" if model else "-",
            f"{row.get('moved_bytes', 0) / 1e9:.1f}",
        )
        print("| " + " | ".join(cells) + " |")
    print("\n| program | collective | type | async | count | MB a chip sends |")
    print("| --- | --- | --- | --- | ---: | ---: |")
    for row in rows:
        for one in row.get("collectives", ()):
            hidden = "yes" if one["overlapped"] else "no"
            cells = row["name"], one["kind"], one["dtype"], hidden
            print(f"| {' | '.join(cells)} | {one['count']} | {one['sent'] / 1e6:.0f} |")


SMOKE = """--out={folder}/rows.jsonl --only='plain B/16' --extra='--topology=v5e:2x2
--variant=Ti/16 --batch_size=8 --side=32'"""


if __name__ == "__main__":
    ahead.run(smoke.parse(ahead.parser(__doc__), SMOKE), _rows(), _table)
