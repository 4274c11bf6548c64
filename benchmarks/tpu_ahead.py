"""The table of ahead-of-time compilations in docs/benchmarks.md.

python -m benchmarks.tpu_ahead --out=rows.jsonl      compiles what is not in the file yet
python -m benchmarks.tpu_ahead --out=rows.jsonl --table      prints the file as a table

Needs the extra `tpu`. Each row is a process of its own, one after the other; a row takes
minutes, so the file grows by a line as soon as one is done, and a second start goes on.
"""

import argparse
import json
import pathlib
import re
import resource
import shlex
import subprocess
import sys
import time

from benchmarks import smoke

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
        yield f"plain {v} v5e:16x16", ["benchmarks.baseline_vit", *plain]
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


def _run(words, prefix):
    """Runs one compilation; returns what it printed and what it took."""
    began, before = time.perf_counter(), _children()
    json_flag = ["--json"] if words[0] == "vit_jax.compile" else []
    done = subprocess.run(
        [*shlex.split(prefix), sys.executable, "-m", *words, *json_flag],
        capture_output=True,
        text=True,
        check=False,
    )
    row = {"words": words, "seconds": round(time.perf_counter() - began)}
    usage = _children()
    row["code"] = done.returncode
    row["cpu_seconds"] = round(usage.ru_utime - before.ru_utime)
    row["rss_gib"] = round(usage.ru_maxrss / 2**20, 2)  # The most of all so far.
    try:
        return row | json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return row | {"error": done.stderr[-500:]}


def _children():
    return resource.getrusage(resource.RUSAGE_CHILDREN)


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


def main() -> None:
    """Compiles or prints, as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--extra", default="", help="words for each command")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--prefix", default="", help="of each command, as a lock")
    parser.add_argument("--list", action="store_true")
    flags = smoke.parse(parser, SMOKE)
    lines = flags.out.read_text().splitlines() if flags.out.exists() else []
    rows = [json.loads(line) for line in lines]
    if flags.table:
        _table(rows)
        return
    done = {row["name"] for row in rows}
    for name, words in _rows():
        if name in done or not re.search(flags.only, name):
            continue
        words += shlex.split(flags.extra)
        print(name, " ".join(words), flush=True)
        if flags.list:
            continue
        row = {"name": name} | _run(words, flags.prefix)
        if row["code"] not in (0, 3):  # Killed, say: no result, to be tried again.
            print(f"  ended with {row['code']}: {row.get('error')}", flush=True)
            continue
        with flags.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        peak = row.get("peak_bytes", 0) / 2**30
        print(f"  {row['seconds']} s, {peak:.2f} GiB, {row.get('error')}", flush=True)


if __name__ == "__main__":
    main()
