"""Text report of an analysis: costs with their sources, and what makes it fit."""

from collections.abc import Iterable, Iterator
from operator import itemgetter

from vit_jax.tools.planning.analysis import ASSUMPTIONS, Analysis

_COMPILER = "the compiler's own word"
_SHAPES = "from shapes, without padding"


def text(found: Analysis, heading: str) -> str:
    """Returns the report of one program.

    Args:
      found: analysis.
      heading: first line.
    """
    parts = [heading, _setting(found.settings), "", *_memory(found)]
    if found.fits:
        parts += ["", *_work(found), "", *_collectives(found), "", *_time(found)]
    return "\n".join(parts)


def verdict(found: Analysis) -> str:
    """Returns a line on whether the program fits, and the margin."""
    if found.fits:
        if not found.limit_bytes:
            return "it compiles; what memory a chip has is not known"
        spare = found.limit_bytes - found.peak_bytes
        return f"fits: {_gib(spare)} GiB of {_gib(found.limit_bytes)} to spare"
    if not found.peak_bytes:
        return f"does not compile: {found.error}"
    over = found.peak_bytes - (found.limit_bytes or 0)
    return (
        f"does not fit: it wants {_gib(found.peak_bytes)} GiB of a chip's "
        f"{_gib(found.limit_bytes)}, {_gib(over)} too much"
    )


def remedies(found: Iterable[tuple[str, Analysis]]) -> Iterator[str]:
    """Yields a line per change with which the program fits, or one that none does.

    Args:
      found: flags that make a change, and what was compiled with it.
    """
    any_fits, refused = False, []
    for flags, row in found:
        if row.fits:
            any_fits = True
            yield f"  fits with {flags}: {_gib(row.peak_bytes)} GiB"
        else:
            refused.append((row.peak_bytes, flags))
    if not any_fits:
        yield f"no change alone fits; {least(refused)}"


def least(sizes: Iterable[tuple[int, str]]) -> str:
    """Returns which of the programs that do not fit wants least memory, and what to do.

    Args:
      sizes: bytes of each, 0 if it does not compile, and the flags that make it.
    """
    size, flags = min(filter(itemgetter(0), sizes), default=(0, ""))
    wanted = f"the least is {_gib(size)} GiB, with {flags}; " if size else ""
    return f"{wanted}take a larger slice or a smaller batch"


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


def _memory(found):
    yield "Memory of a chip, GiB"
    yield line("parameters", _gib(found.params_bytes), _SHAPES)
    yield line("optimiser's moments", _gib(found.moments_bytes), _SHAPES)
    yield line("average", _gib(found.average_bytes), _SHAPES)
    yield line("batch", _gib(found.batch_bytes), _SHAPES)
    if found.fits:
        yield line("all of these", _gib(found.argument_bytes), _COMPILER)
        yield line(
            "activations, gradients",
            _gib(found.temporary_bytes),
            "the peak less all of these",
        )
    if found.peak_bytes:
        yield line(
            "peak" if found.fits else "wanted", _gib(found.peak_bytes), _COMPILER
        )
    if found.limit_bytes:
        yield line("limit", _gib(found.limit_bytes), _COMPILER)
    yield verdict(found)


def _work(found):
    yield "Work of a chip in a step"
    ratio = found.flops / found.model_flops
    yield line("TFLOP of products", f"{found.flops / 1e12:.3f}", found.counted)
    yield line(
        "3 x the forward pass",
        f"{found.model_flops / 1e12:.3f}",
        f"the model's; counted are {ratio:.3f} times as many",
    )
    yield line(
        "GB read and written",
        f"{found.moved_bytes / 1e9:.2f}",
        "counted in the compiled program, caches of the core not",
    )
    if found.unread_loops:
        yield (
            f"  {found.unread_loops} loops count once, here and below: their rounds "
            "cannot be read"
        )


def _collectives(found):
    yield "Collectives of a step (what the compiler put in; loops times their rounds)"
    if not found.collectives:
        yield "  none"
        return
    row = "  {:<26} {:<5} {:<6} {:>6} {:>11} {:>13}"
    yield row.format("kind", "type", "async", "count", "MB of each", "MB a chip sends")
    for one in found.collectives:
        yield row.format(
            one["kind"] + (", slices" if one["slices"] else ""),
            one["dtype"],
            "yes" if one["overlapped"] else "no",
            one["count"],
            f"{one['bytes'] / one['count'] / 1e6:.2f}",
            f"{one['sent'] / 1e6:.1f}",
        )


def _time(found):
    bounds = found.roofline
    yield "Floor of a step's time, ms (no prediction: no step is as fast)"
    if bounds is None:
        yield "  not known, as the chip is not"
        return
    yield line("products", _ms(bounds.compute), "")
    yield line("memory", _ms(bounds.memory), "")
    yield line("links, async", _ms(bounds.overlapped), "")
    yield line("links, others", _ms(bounds.exposed), "")
    images = found.settings["batch_size"] / bounds.floor
    yield line(
        "floor",
        _ms(bounds.floor),
        f"bound by {bounds.bound}; at most {images:,.0f} images/s",
    )
    yield "  assumed: " + ";\n           ".join(ASSUMPTIONS)


def line(name: str, value: str, note: str) -> str:
    """Returns a number of a report: its name, the number, whose word it is."""
    return f"  {name:<24} {value:>9}  {note}".rstrip()


def _gib(size):
    return f"{(size or 0) / 2**30:.2f}"


def _ms(seconds):
    return f"{seconds * 1e3:.2f}"
