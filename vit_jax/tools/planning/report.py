"""Text report of an analysis: costs with their sources, and changes that make it fit."""

from collections.abc import Iterable, Iterator
from operator import itemgetter

from vit_jax.tools.planning.analysis import ASSUMPTIONS, Analysis

_COMPILER = "reported by the compiler"
_SHAPES = "from shapes, without padding"


def text(analysis: Analysis, heading: str, limit_source: str = _COMPILER) -> str:
    """Returns the report of one program.

    Args:
      analysis: the program.
      heading: first line.
      limit_source: source of the memory limit.
    """
    parts = [heading, _setting(analysis.settings), ""]
    parts += _memory(analysis, limit_source)
    if analysis.fits:
        parts += ["", *_work(analysis)]
        parts += ["", *_collectives(analysis)]
        parts += ["", *_time(analysis)]
    return "\n".join(parts)


def movers(analysis: Analysis) -> Iterator[str]:
    """Yields a table of the instructions that move the most bytes."""
    yield "Largest movers per step (blocks of the network are counted together)"
    row = "  {:>6} {:>6}  {:<9} {:<8} {:<38} {}"
    yield row.format("GB", "count", "pass", "kind", "of", "reads -> writes")
    for one in analysis.movers:
        yield row.format(
            f"{one.bytes / 1e9:.2f}",
            one.count,
            "backward" if one.backward else "forward",
            one.kind,
            one.place,
            f"{' '.join(one.reads)} -> {' '.join(one.writes)}",
        )


def verdict(analysis: Analysis) -> str:
    """Returns a line that says whether the program fits, and the margin."""
    if analysis.fits:
        if not analysis.limit_bytes:
            return "it compiles; the memory of a chip is unknown"
        spare = analysis.limit_bytes - analysis.peak_bytes
        return f"fits: {_gib(spare)} GiB of {_gib(analysis.limit_bytes)} to spare"
    if not analysis.peak_bytes:
        return f"does not compile: {analysis.error}"
    over = analysis.peak_bytes - (analysis.limit_bytes or 0)
    return (
        f"does not fit: needs {_gib(analysis.peak_bytes)} GiB, {_gib(over)} more than "
        f"the limit of {_gib(analysis.limit_bytes)}"
    )


def remedies(changes: Iterable[tuple[str, Analysis]]) -> Iterator[str]:
    """Yields a line for each change that makes the program fit, or says that none does.

    Args:
      changes: command-line flags of each change, and the analysis with it.
    """
    any_fits, refused = False, []
    for flags, row in changes:
        if row.fits:
            any_fits = True
            yield f"  fits with {flags}: {_gib(row.peak_bytes)} GiB"
        else:
            refused.append((row.peak_bytes, flags))
    if not any_fits:
        yield f"no single change makes it fit; {least(refused)}"


def least(sizes: Iterable[tuple[int, str]]) -> str:
    """Returns a line about the smallest of several programs that do not fit.

    Args:
      sizes: size of each program in bytes, 0 if it does not compile, and its flags.
    """
    size, flags = min(filter(itemgetter(0), sizes), default=(0, ""))
    wanted = f"the smallest needs {_gib(size)} GiB, with {flags}; " if size else ""
    return f"{wanted}use a larger slice or a smaller batch"


def _setting(settings):
    mesh = " x ".join(f"{axis} {size}" for axis, size in settings["mesh"].items())
    words = [
        f"{name} {settings[name]}"
        for name in (
            "dtype",
            "mu_dtype",
            "remat_policy",
            "attention_impl",
            "grad_accum_steps",
        )
        if settings[name]
    ]
    if settings["scan"] is not None:
        words.append("scan" if settings["scan"] else "no scan")
    return f"mesh {mesh}; {', '.join(words)}"


def _memory(analysis, limit_source):
    yield "Memory per chip, GiB"
    yield line("parameters", _gib(analysis.params_bytes), _SHAPES)
    yield line("optimiser's moments", _gib(analysis.moments_bytes), _SHAPES)
    yield line("average", _gib(analysis.average_bytes), _SHAPES)
    yield line("batch", _gib(analysis.batch_bytes), _SHAPES)
    if analysis.fits:
        temporary = _gib(analysis.temporary_bytes)
        yield line("arguments", _gib(analysis.argument_bytes), _COMPILER)
        yield line("activations, gradients", temporary, "the peak without arguments")
    if analysis.peak_bytes:
        name = "peak" if analysis.fits else "requested"
        yield line(name, _gib(analysis.peak_bytes), _COMPILER)
    if analysis.limit_bytes:
        yield line("limit", _gib(analysis.limit_bytes), limit_source)
    yield verdict(analysis)


def _work(analysis):
    yield "Work per chip and step"
    ratio = analysis.flops / analysis.model_flops
    yield line("TFLOP of products", f"{analysis.flops / 1e12:.3f}", analysis.counted)
    yield line(
        "3 x the forward pass",
        f"{analysis.model_flops / 1e12:.3f}",
        f"of the model; the program computes {ratio:.3f} times as much",
    )
    yield line(
        "GB read and written",
        f"{analysis.moved_bytes / 1e9:.2f}",
        "counted in the compiled program, without on-core memory",
    )
    if analysis.kernels:
        names = (f"{name} {times} times" for name, times in analysis.kernels.items())
        yield f"  library kernels: {', '.join(names)}"
    if analysis.unread_loops:
        yield (
            f"  {analysis.unread_loops} loops are counted once, here and below: their trip "
            "counts are unknown"
        )


def _collectives(analysis):
    yield "Collectives per step (in the compiled program; loops times their trip counts)"
    if not analysis.collectives:
        yield "  none"
        return
    heading = ("kind", "type", "async", "count", "MB each", "MB sent/chip")
    row = "  {0:<26} {1:<5} {2:<6} {3:>6} {4:>11} {5:>13}"
    if any(one["network"] for one in analysis.collectives):
        row += " {6:>9}"
    row += "  {7}"
    yield row.format(*heading, "network", "of")
    for one in analysis.collectives:
        hosts = f", {one['hosts']} hosts" if one["hosts"] > 1 else ""
        yield row.format(
            one["kind"] + (", slices" if one["slices"] else hosts),
            one["dtype"],
            "yes" if one["overlapped"] else "no",
            one["count"],
            f"{one['bytes'] / one['count'] / 1e6:.2f}",
            f"{one['sent'] / 1e6:.1f}",
            f"{one['network'] / 1e6:.1f}",  # Shown only if its heading is.
            one["purpose"],
        )
    for one in analysis.unexpected:
        yield (
            f"  warning: {one['kind']}, {one['count']} x "
            f"{one['bytes'] / one['count'] / 1e6:.2f} MB, grows with the batch, although "
            f"this mesh only copies parameters; it comes from {one['place'] or 'unknown'}"
        )


def _time(analysis):
    bounds = analysis.roofline
    yield "Lower bound on the time of a step, ms (not a prediction)"
    if bounds is None:
        yield "  unknown, because the chip is unknown"
        return
    yield line("products", _ms(bounds.compute), "")
    yield line("memory", _ms(bounds.memory), "")
    yield line("links, async", _ms(bounds.overlapped), "")
    yield line("links, others", _ms(bounds.exposed), "")
    images = analysis.settings["batch_size"] / bounds.floor
    yield line(
        "floor",
        _ms(bounds.floor),
        f"bound by {bounds.bound}; at most {images:,.0f} images/s",
    )
    yield "  assumed: " + ";\n           ".join(ASSUMPTIONS[analysis.platform])


def line(name: str, value: str, note: str) -> str:
    """Returns a line of a report: name, value and source of a number."""
    return f"  {name:<24} {value:>9}  {note}".rstrip()


def _gib(size):
    return f"{(size or 0) / 2**30:.2f}"


def _ms(seconds):
    return f"{seconds * 1e3:.2f}"
