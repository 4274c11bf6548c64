"""Int8 on a CPU: accuracy, time and size of a network beside float32, in ONNX Runtime and JAX.

Run:  python -m benchmarks.prediction.quantised --model=FILE --photographs=FOLDER
          [--rounds=5] [--batch_size=32] [--calibrate=32] [--timed=64]

Photographs are named by their synset, as n01440764_tench.JPEG. The ways are the program of
`convert --to=onnx` in float32; the same by ONNX Runtime's quantiser with int8 weights per
channel, whose activations are quantised for each batch ("dynamic") or with ranges from
--calibrate of the photographs ("static"); this project in float32; with matmul_dtype=bfloat16;
and with int8 weights per channel that are multiplied by their scales in the program. Each
round passes the first --timed photographs through each way in turn. Prints top-1, classes that equal those
of the first way, size, and medians of images/s with the ratio to the float32 of
the same library; brackets hold the quartiles of the ratios of single rounds. At the end, products as
AQT makes them: int8 activations per row by int8 weights, summed in int32, beside float32.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime

import vit_jax
from benchmarks import smoke
from benchmarks.prediction import token_merging
from benchmarks.step import step
from vit_jax import weights
from vit_jax.data import imagenet
from vit_jax.weights import export


def quantised_onnx(program, folder, pixels):
    """Writes int8 programs; returns their paths by way."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Pixels(quantization.CalibrationDataReader):
        def __init__(self):
            self.rest = iter(pixels)

        def get_next(self):
            image = next(self.rest, None)
            return None if image is None else {"images": image[None]}

    plain = folder / "plain.onnx"
    quant_pre_process(program, plain, skip_symbolic_shape=True)
    how = {"per_channel": True, "weight_type": quantization.QuantType.QInt8}
    quantization.quantize_dynamic(plain, folder / "dynamic.onnx", **how)
    quantization.quantize_static(
        plain,
        folder / "static.onnx",
        Pixels(),
        op_types_to_quantize=["MatMul", "Gemm"],
        activation_type=quantization.QuantType.QUInt8,
        # ONNX Runtime 1.32 cannot do this for weights per channel.
        extra_options={"QDQDisableWeightAdjustForInt32Bias": True},
        **how,
    )
    return {way: folder / f"{way}.onnx" for way in ("dynamic", "static")}


def to_int8(value):
    """Returns int8 numbers and the scale of each output channel."""
    scale = np.abs(value).max(axis=tuple(range(value.ndim - 1)), keepdims=True) / 127
    scale = np.maximum(scale, 1e-12)
    return np.round(value / scale).astype(np.int8), scale.astype(np.float32)


def from_int8(quantised):
    return jax.tree.map(
        lambda pair: (
            pair[0].astype(jnp.float32) * pair[1] if len(pair) == 2 else pair[0]
        ),
        quantised,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def product_times(rounds):
    """Prints times of products of Ti/16 and B/16, 32 images of 197 tokens."""
    for width in (192, 768):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(32 * 197, width)).astype(np.float32)
        w, scale = to_int8(rng.normal(size=(width, 4 * width)).astype(np.float32))

        @jax.jit
        def int8(x, w, scale):
            step = jnp.abs(x).max(-1, keepdims=True) / 127
            rounded = jnp.round(x / step).astype(jnp.int8)
            summed = jnp.matmul(rounded, w, preferred_element_type=jnp.int32)
            return summed * (step * scale)

        float32 = jax.jit(jnp.matmul)
        calls = {
            "float32": functools.partial(float32, x, w * scale),
            "int8": functools.partial(int8, x, w, scale),
        }
        calls = {
            name: functools.partial(lambda f: jax.block_until_ready(f()), call)
            for name, call in calls.items()
        }
        for call in calls.values():
            call()
        took = step.timed(calls, rounds)
        speed = step.ratio(took["float32"], took["int8"])
        print(f"product of {x.shape} and {w.shape}: int8 at {speed} of the speed")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="weights with ImageNet's classes")
    parser.add_argument("--photographs", default="", help="folder of images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--calibrate", type=int, default=32)
    parser.add_argument("--timed", type=int, default=64)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    flags = smoke.parse(parser, "--folder={folder} --rounds=1 --calibrate=2")
    if flags.folder:
        token_merging.write_small(flags.folder, flags)
    paths = sorted(pathlib.Path(flags.photographs).iterdir())
    synsets = imagenet.synsets()
    labels = np.array([synsets.index(path.name.split("_")[0]) for path in paths])
    with tempfile.TemporaryDirectory() as folder:
        run(flags, paths, labels, pathlib.Path(folder))
    product_times(flags.rounds)


def run(flags, paths, labels, folder):
    opened = vit_jax.load_model(flags.model, tell=lambda line: None)
    images = np.asarray(opened.preprocess(paths))
    how = opened.preprocessing
    pixels = np.stack([how.prepare(how.read(path.read_bytes())) for path in paths])
    pretrained = dataclasses.replace(
        weights.open_pretrained(flags.model), preprocess=how
    )
    export.export(pretrained, "onnx", folder / "onnx")
    programs = {"float32": folder / "onnx" / "model.onnx"}
    programs |= quantised_onnx(programs["float32"], folder, pixels[: flags.calibrate])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    calls, sizes = {}, {}
    for way, path in programs.items():
        session = onnxruntime.InferenceSession(path, options)
        network = lambda _, batch, session=session: session.run(
            ["logits"], {"images": batch}
        )[0]
        calls[f"onnx {way}"] = network, None, pixels
        sizes[f"onnx {way}"] = path.stat().st_size
    rounded = vit_jax.load_model(
        flags.model, matmul_dtype="bfloat16", tell=lambda line: None
    )
    int8 = jax.tree.map(
        lambda a: to_int8(np.asarray(a)) if a.ndim > 1 else (a,), opened.params
    )
    apply = opened.model.apply
    for way, function, params in (
        ("float32", apply, opened.params),
        ("bfloat16", rounded.model.apply, rounded.params),
        ("int8", lambda params, x: apply(from_int8(params), x), int8),
    ):
        network = jax.jit(lambda *args, function=function: function(*args)["logits"])
        calls[f"jax {way}"] = network, params, images
        sizes[f"jax {way}"] = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    outputs, timed = {}, {}
    for way, (network, params, arrays) in calls.items():
        call = functools.partial(token_merging.logits, network, params)
        outputs[way] = call(arrays, flags.batch_size)  # Compiles.
        timed[way] = functools.partial(call, arrays[: flags.timed], flags.batch_size)
    seconds = step.timed(timed, flags.rounds)
    print("way           top-1, %  same, %     MB  images/s  speed")
    best = outputs["onnx float32"].argmax(1)
    for way, took in seconds.items():
        chosen = outputs[way].argmax(1)
        top1, same = 100 * np.mean(chosen == labels), 100 * np.mean(chosen == best)
        speed = step.ratio(seconds[f"{way.split()[0]} float32"], took)
        rate = min(flags.timed, len(paths)) / np.median(took)
        print(
            f"{way:12}  {top1:8.1f}  {same:7.1f}  {sizes[way] / 1e6:5.1f}  {rate:8.1f}  {speed}"
        )


if __name__ == "__main__":
    main()
