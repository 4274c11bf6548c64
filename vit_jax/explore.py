"""Shows where a model looks: python -m vit_jax.explore --model=CHECKPOINT [--images=FOLDER]

CHECKPOINT is a run or weights, as for vit_jax.predict. The command prints the address
of a page for a browser on this computer; the token at the end of the address is needed.
Drop an image there to see its top classes; click a patch to see where it looks, in
every layer and head. --compare=CHECKPOINT puts a second model beside the first;
--labels, --resolution and the preprocessing flags apply to the first. Ctrl-C ends it.
--html=FILE --image=IMAGE writes the page of one image as a single file of at most 5 MB,
which can be shared and needs no server, and exits. Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import os

from vit_jax.command_line import cli, files
from vit_jax.command_line.printing import print_error, print_line, printable
from vit_jax.errors import UserError

PORT = 8000


def main(flags: argparse.Namespace) -> None:
    """Serves or writes the page given by the flags."""
    cli.refuse_overrides(flags, "exploring")
    if bool(flags.html) != bool(flags.image):
        raise UserError(
            "--html=FILE is the page of one --image=IMAGE: give both, or neither"
        )
    if os.path.isdir(flags.html):
        raise UserError(f"--html={flags.html} is a folder: name a file in it")
    for name in ("html", "image"):
        files.check(f"--{name}", getattr(flags, name))
    # Imported after the flags are checked, so that their errors come at once.
    from vit_jax.data.config import MAX_MEGAPIXELS
    from vit_jax.distributed import compilation
    from vit_jax.tools.explorer.images import Folder

    limit = flags.max_megapixels or MAX_MEGAPIXELS
    folder = Folder(flags.images, limit) if flags.images else None
    if uncached := compilation.enable_cache():
        print_error(uncached)
    data = read(flags.image, limit) if flags.html else b""
    checkpoints = [flags.model, flags.compare] if flags.compare else [flags.model]
    models = [open_model(flags, checkpoint) for checkpoint in checkpoints]
    if flags.html:
        write(flags, models, data)
    else:
        serve(flags, models, folder, limit)


def read(path: str, max_megapixels: float) -> bytes:
    """Returns the content of the image given by --image."""
    from vit_jax.tools.explorer import images

    try:
        with open(path, "rb") as file:
            data = file.read(images.MAX_BYTES + 1)
        images.check(data, os.path.basename(path), max_megapixels)
    except OSError as error:
        raise UserError(
            f"--image={path} cannot be read ({error.strerror or error}): give an image "
            "file"
        ) from error
    except images.Refused as error:
        raise UserError(f"--image: {error.sentence}") from error
    return data


def write(flags: argparse.Namespace, models: list, data: bytes) -> None:
    """Writes the page of one image as one file."""
    from vit_jax.tools.explorer import images, saved

    name = os.path.basename(flags.image)
    try:
        outputs = [model.run(data, name) for model in models]
    except images.Refused as error:
        raise UserError(f"--image: {error.sentence}") from error
    size, steps, pool = saved.write(flags.html, models, outputs, name)
    print_line(
        f"{flags.html}: {size / 1e6:.2f} MB, attention in {steps + 1} steps of each "
        "row's largest" + (f", means of {pool}x{pool} patches" if pool > 1 else "")
    )


def serve(
    flags: argparse.Namespace, models: list, folder, max_megapixels: float
) -> None:
    """Serves the page until Ctrl-C."""
    from vit_jax.tools.explorer.server import Server, is_loopback
    from vit_jax.tools.explorer.session import Session

    session = Session(models, folder, max_megapixels=max_megapixels)
    with Server(session, flags.host, flags.port) as server:
        if not is_loopback(flags.host):
            print_error(
                f"--host={flags.host}: anyone who can reach this computer and has the "
                "address below can use the page and see the images of --images; "
                "nothing is encrypted"
            )
        for model in models:  # Compile now, so that the first image is not slow.
            model.warm_up()
        names = " and ".join(model.name for model in models)
        # Not print_line, which masks tokens: the user needs this one.
        print(f"{server.address} shows {printable(names)}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_error("ended")


def open_model(flags: argparse.Namespace, checkpoint: str):
    """Opens a checkpoint; flags override its preprocessing and class names."""
    from vit_jax.tools.explorer.session import ExploredModel

    pretrained, preprocess, classes = cli.open_weights(
        flags, checkpoint, with_task=True
    )
    if flags.tokenizer:
        pretrained = dataclasses.replace(pretrained, tokenizer=flags.tokenizer)
    return ExploredModel(
        pretrained,
        preprocess=preprocess.upright(),
        class_names=classes,
        shown_bands=flags.show_bands,
    )


def _bands(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) not in (1, 3) or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one or three numbers from 0 on, such as 3,2,1"
        )
    return tuple(map(int, words))


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--images", default="", help="folder of images to choose from")
    add(
        "--show_bands",
        type=_bands,
        default=(),
        metavar="3,2,1",
        help="one or three bands of the model's input to show, counted from 0: 3,2,1",
    )
    add("--compare", default="", metavar="CHECKPOINT", help="a second model")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; default: this computer",
    )
    add("--port", type=_port, default=PORT, help=f"port; 0: any free; default: {PORT}")
    add(
        "--html",
        default="",
        metavar="FILE",
        help="write the page of --image, then exit",
    )
    add("--image", default="", help="image shown by the page of --html")
    add("--labels", default="", help="file of class names, one per line")
    add("--tokenizer", default="", help="tokenizer of a text tower; default: stored")
    cli.add_patch_flags(parser)
    cli.add_max_megapixels_flag(parser)
    cli.add_weights_flags(parser)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    cli.run(main, parser())
