"""Every architecture of timm is read as timm computes it, or refused by what it has.

Needs the extra `parity`.
"""

import inspect
import json
import re

import jax
import numpy as np
import pytest
from import_timm import import_timm, skip_values_on_meta, torch

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export
from vit_jax.weights.formats import files, registry, timm_networks

pytestmark = pytest.mark.parity
their_timm = import_timm()
create_resnet = their_timm.models.resnetv2._create_resnetv2_bit
save_config_for_hf = their_timm.models._hub.save_config_for_hf

SMALL = {"img_size": 64, "embed_dim": 64, "num_heads": 2, "depth": 2}
GATED = {"img_size": 56, "embed_dim": 48}
# Architecture, what is changed, and the refusal; none where the logits are equal.
NETWORKS = {
    "plain": ("vit_base_patch16_224", {}, None),
    "no biases of queries": ("vit_base_patch16_224_miil", {}, None),
    "gap, class token": ("eva_large_patch14_196", {"img_size": 56}, None),
    "map": ("vit_base_patch16_siglip_224", {}, None),
    "LayerScale": ("vit_base_patch14_dinov2", {"img_size": 56}, None),
    "no position of the class token": ("deit3_small_patch16_224", {}, None),
    "dist token": ("deit_tiny_distilled_patch16_224", {}, None),
    "no biases": ("vit_tiny_patch16_224", {"proj_bias": False}, None),
    "registers, map, no class token": (
        "vit_tiny_patch16_224",
        {"global_pool": "map", "class_token": False, "reg_tokens": 1},
        "pool_include_prefix=False",
    ),
    "dist token, registers": (
        "deit_tiny_distilled_patch16_224",
        {"reg_tokens": 1},
        "distillation token together with registers",
    ),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}, None),
    "fc_norm of a token": ("vit_tiny_patch16_224", {"fc_norm": True}, None),
    "every token": ("vit_tiny_patch16_224", {"global_pool": ""}, None),
    "not square": ("flexivit_small", {"img_size": (32, 64)}, None),
    "no classes": ("test_vit", {"num_classes": 0}, None),
    "root alone": ("vit_tiny_r_s16_p8_224", {}, None),
    "R26": ("vit_small_r26_s32_224", {}, None),
    "rope": ("vit_small_patch16_rope_224", {"img_size": (64, 32)}, None),
    "rope, another grid": ("eva02_tiny_patch14_224", {"img_size": 84}, None),
    "rope, GELU": (
        "eva02_tiny_patch14_224",
        {"img_size": 56, "swiglu_mlp": False},
        None,
    ),
    "rope, norms": (
        "eva02_tiny_patch14_224",
        {"img_size": 56, "qk_norm": True, "scale_mlp": True, "scale_attn_inner": True},
        None,
    ),
    "rope of text": (
        "eva02_tiny_patch14_224",
        {"img_size": 56, "rope_type": "mrope"},
        "rope_type='mrope' in config.json is not one of cat, dinov3, mixed",
    ),
    "shared biases": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
        None,
    ),
    "registers, map": (
        "vit_so150m_patch16_reg4_map_256",
        {},
        "register tokens of such a network are not supported",
    ),
    "register": ("test_vit2", {}, None),
    "pre-norm by an argument": ("vit_tiny_patch16_224", {"pre_norm": True}, None),
    "SwiGLU": ("vit_giant_patch14_dinov2", GATED, None),
    "SwiGLU, registers": ("vit_giant_patch14_reg4_dinov2", GATED, None),
    "parallel": (
        "vit_small_patch16_18x2_224",
        {},
        r"parallel branches \(attns, ffns\) are not supported",
    ),
    "RMSNorm": ("test_vit4", {}, r"a norm without bias \(RMSNorm\) is not supported"),
    "no final norm": ("vit_tiny_patch16_224", {"final_norm": False}, None),
    "another stem": (
        "vit_small_resnet26d_224",
        {},
        r"BatchNorm \(running_mean\) is not supported",
    ),
    "q_norm": ("vit_tiny_patch16_224", {"qk_norm": True}, None),
    "oblong patches": (
        "vit_tiny_patch16_224",
        {"patch_size": (16, 8)},
        r"patch \(16, 8\) is not square",
    ),
}


@pytest.fixture(autouse=True)
def _no_values_on_meta(monkeypatch):
    skip_values_on_meta(monkeypatch)


def create(architecture, **changes):
    make, changes = their_timm.create_model, {"num_classes": 7} | changes
    if "layers" in changes:  # timm's functions of these names state their own.
        make, changes = create_resnet, {"width_factor": 1} | changes
    network = make(architecture, **changes)
    torch.manual_seed(3)
    for name, value in network.named_parameters():
        # As trained, so that no branch and no token vanishes beside the others.
        if re.search(r"gamma|token|latent|pos_embed|bias|head\.weight", name):
            torch.nn.init.normal_(value, std=0.5)
    return network.eval()


_REFUSALS = (
    "not supported|not known to be equal|none of the known formats|not one of"
    "|not of a model of this project|is not square|is missing|does not fit the model"
    "|not a multiple of the patch|no model of this project has"
)


def check(network, folder, refusal, fit=True):
    """Checks that a network is read as timm computes it, or refused.

    Args:
      network: of timm.
      folder: empty; it is written there.
      refusal: pattern of the message; None if it must be read.
      fit: whether the arrays are also fitted to a model, which is traced for it.
    """
    their_timm.models.save_for_hf(network, folder, safe_serialization=True)
    if refusal:
        with pytest.raises(UserError, match=refusal) as error:
            weights.open_pretrained(folder)
        assert not re.search("damaged|KeyError|init.allow_mismatch", str(error.value))
        return
    found = weights.open_pretrained(folder)
    model, structure = models.create(**found.options), structure_of(network)
    read = {k: v for k, v in model.options.items() if k != "posemb_resize"}
    read["layer_scale_init"] = bool(read.get("layer_scale_init"))
    if structure in CHECKED:  # What timm computes; the name may say otherwise.
        assert read == CHECKED[structure]
        return
    params = weights.load(folder, model).params if fit else found.params
    rng = np.random.default_rng(1)
    height, width, channels = model.image_shape
    rows, columns = found.preprocess.cut  # Which timm's first layer drops itself.
    whole = (2, height + rows, width + columns, channels)
    images = rng.normal(size=whole).astype(np.float32)
    if type(network).__name__ == "ResNetV2":  # Takes any size, and its own is large.
        images, height, width = images[:, :64, :96], 64, 96
    with torch.no_grad():
        theirs = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    outputs = jax.jit(model.apply)(params, images[:, :height, :width])
    ours = outputs["logits" if found.options["num_classes"] else "pre_logits"]
    size = np.abs(theirs).max()
    assert size > 0.1
    # What the note on stems says of kernels that are not of unit scale.
    limit = 1e-4 if found.options.get("stage_depths", ()) == () else 2e-4
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit * size)
    CHECKED[structure] = read


CHECKED = {}  # Options of networks whose logits were compared, by their structure.


def structure_of(network):
    """Returns the modules of a network of timm with their flags, and shapes of arrays."""
    plain = int | float | str | tuple | None

    def values_of(part):
        return sorted((k, v) for k, v in vars(part).items() if isinstance(v, plain))

    parts = network.named_modules()
    modules = ((name, type(part), str(values_of(part))) for name, part in parts)
    arrays = network.state_dict().items()
    return *modules, *((name, tuple(value.shape)) for name, value in arrays)


@pytest.mark.parametrize("case", NETWORKS)
def test_logits_are_equal_or_what_differs_is_named(tmp_path, case):
    architecture, changes, refusal = NETWORKS[case]
    check(create(architecture, **SMALL | changes), tmp_path, refusal)


ENCODER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 1}
SWIN = {"img_size": 64, "embed_dim": 12, "num_heads": (1, 2), "depths": (2, 2)}
SWIN["window_size"] = 4
# Class of each kind of network with what makes it small.
CLASSES = {
    "vit_tiny_patch16_224": ("vision_transformer.VisionTransformer", ENCODER),
    "eva02_tiny_patch14_224": ("eva.Eva", ENCODER),
    "beit_base_patch16_224": ("beit.Beit", ENCODER),
    "swin_tiny_patch4_window7_224": ("swin_transformer.SwinTransformer", SWIN),
    "swinv2_tiny_window8_256": ("swin_transformer_v2.SwinTransformerV2", SWIN),
    "mixer_s32_224": ("mlp_mixer.MlpMixer", {"img_size": 64, "mlp_ratio": (0.05, 0.3)}),
    "resnetv2_50x1_bit": ("resnetv2.ResNetV2", {"layers": (1, 1, 1, 1)}),
}
# Values of each argument that is accounted for; each gives equal logits or a refusal.
VALUES = {
    "img_size": [48, (32, 64)],
    "patch_size": [4, (8, 4)],
    "in_chans": [1],
    "num_classes": [0],
    "global_pool": ["", "avg", "token", "map", "max", "avgmax", "prr", "catavgmax"],
    "embed_dim": [24],
    "depth": [2],
    "depths": [(2,), (1, 2)],
    "layers": [(1, 2, 1, 1)],
    "channels": [(64, 128, 256, 512)],
    "width_factor": [2],
    "stem_chs": [32],
    "num_heads": [4],
    "mlp_ratio": [2.3, (0.5, 2.0)],
    "qkv_bias": [False],
    "qkv_fused": [False],
    "qk_norm": [True],
    "scale_attn_norm": [True],
    "scale_mlp_norm": [True],
    "scale_mlp": [True, False],
    "scale_attn_inner": [True],
    "swiglu_mlp": [True, False],
    "swiglu_align_to": [8],
    "proj_bias": [False],
    "init_values": [0.1],
    "class_token": [False],
    "pos_embed": ["none"],
    "no_embed_class": [True],
    "reg_tokens": [2],
    "num_reg_tokens": [2],
    "pre_norm": [True],
    "final_norm": [False],
    "fc_norm": [True],
    "use_fc_norm": [True, False],
    "pool_include_prefix": [True],
    "dynamic_img_size": [True],
    "dynamic_img_pad": [True],
    "strict_img_size": [False],
    "weight_init": ["skip"],
    "fix_init": [True],
    "zero_init_last": [True],
    "nlhb": [True],
    "act_layer": ["gelu_tanh", "quick_gelu", "silu"],
    "attn_type": ["eva", "rope"],
    "use_abs_pos_emb": [True, False],
    "use_rel_pos_bias": [False],
    "use_shared_rel_pos_bias": [True],
    "use_rot_pos_emb": [False],
    "use_post_norm": [True],
    "rope_type": ["dinov3", "mixed"],
    "rope_temperature": [50.0],
    "rope_rotate_half": [True],
    "rope_grid_indexing": ["xy"],
    "rope_shift_coords": [0.1],
    "rope_jitter_coords": [1.1],
    "rope_rescale_coords": [1.2],
    "ref_feat_shape": [(7, 7), (7, 5)],
    "head_init_scale": [0.1],
    "window_size": [3, (4, 2), [(4, 4), (2, 2)], [(4, 4), (4, 4)]],
    "pretrained_window_sizes": [(4, 4), (3, 0)],
    "norm_layer": ["layernorm"],
}


def arguments(architecture):
    """Yields the arguments of a network's class, and whether each is accounted for."""
    module, name = CLASSES[architecture][0].split(".")
    network = getattr(getattr(their_timm.models, module), name)
    rows = timm_networks.ARCHITECTURES.items()
    known = next(known for names, known in rows if re.fullmatch(names, architecture))
    for argument in inspect.signature(network).parameters.values():
        yield argument, bool(re.fullmatch(known, argument.name))


@pytest.mark.parametrize("architecture", CLASSES)
def test_an_argument_of_timms_class_is_accounted_for_or_refused(architecture):
    for argument, known in arguments(architecture):
        name = argument.name
        if known:
            assert name in VALUES or name.endswith("_rate"), name
            continue
        for value in ("other", 2, [1], False, "", 0):
            if not value and not argument.default:
                continue
            args = {"architecture": architecture, "model_args": {name: value}}
            with pytest.raises(UserError, match=f"{name}="):
                timm_networks.check_config(args)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CLASSES)
def test_each_value_of_an_argument_is_equal_or_refused(tmp_path, architecture):
    small, compared = CLASSES[architecture][1], len(CHECKED)
    for argument, known in arguments(architecture):
        for i, value in enumerate(VALUES.get(argument.name, ()) if known else ()):
            try:
                network = create(architecture, **small | {argument.name: value})
            except (AssertionError, RuntimeError, TypeError, ValueError):
                # timm has no such network.
                continue
            folder = tmp_path / f"{argument.name}{i}"
            folder.mkdir()
            try:
                # Fitting is what refuses some of the ResNets.
                check(network, folder, None, fit="resnet" in architecture)
            except UserError as error:
                assert re.search(_REFUSALS, str(error)), (argument.name, value)
    assert len(CHECKED) > compared + 3


STAGES = {"embed_dim": 12, "depths": (1, 2, 2, 2), "num_heads": (1, 2, 3, 4)}
SMALL_WINDOWS = {"img_size": (48, 64), "window_size": 3}
GROWN = {"img_size": 64, "window_size": 4, "pretrained_window_sizes": (6, 6, 3, 3)}
MIXER = {"mlp_ratio": (0.05, 0.3), "in_chans": 2}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("swin_tiny_patch4_window7_224", STAGES | {"img_size": 64, "window_size": 4}),
        ("swin_small_patch4_window7_224", STAGES | SMALL_WINDOWS),
        ("swinv2_tiny_window8_256", STAGES | {"img_size": 64, "window_size": 4}),
        ("swinv2_base_window12to16_192to256", STAGES | GROWN),
        ("mixer_s32_224", MIXER | {"img_size": (64, 64)}),
        ("mixer_s32_224", MIXER | {"img_size": (32, 96)}),
    ],
)
def test_timm_reads_and_writes_the_same_network(tmp_path, name, args):
    theirs = tmp_path / "theirs"
    network = create(name, **args)
    their_timm.models.save_for_hf(
        network, theirs, safe_serialization=True, model_args=args
    )
    found = weights.open_pretrained(theirs)
    if args.keys() >= MIXER.keys():
        units = [found.options[f"{kind}_mlp_dim"] for kind in ("tokens", "channels")]
        assert units == [25, 153]  # Truncated, as 153 of 153.6.
    _, notes = export.export(found, "timm", tmp_path / "ours")
    assert not any(note.startswith("activation") for note in notes)
    again = their_timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=True)
    model = models.create(**found.options)
    images = np.random.default_rng(1).normal(size=(2, *model.image_shape))
    images = images.astype(np.float32)
    ours = jax.jit(model.apply)(found.params, images)["logits"]
    with torch.no_grad():
        moved = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        for logits in (network(moved).numpy(), again.eval()(moved).numpy()):
            limit = 1e-4 * np.abs(logits).max()
            np.testing.assert_allclose(ours, logits, rtol=0, atol=limit)
    if args.keys() >= MIXER.keys():
        found.options["activation"] = "gelu_tanh"
        _, notes = export.export(found, "timm", tmp_path / "tanh")
        told = "activation: gelu_tanh replaced by gelu"
        assert any(note.startswith(told) for note in notes)


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"]
)
def test_swin_at_another_size_is_what_timm_creates_for_that_size(tmp_path, name):
    network = create(name, **SWIN | {"img_size": 32, "strict_img_size": False})
    their_timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    found = weights.open_pretrained(tmp_path)
    assert any("img_size=SIZE" in note for note in found.notes)
    model = models.create(**found.options | {"image_size": (64, 64)})
    params = weights.load(tmp_path, model).params
    images = np.random.default_rng(1).normal(size=(2, 64, 64, 3)).astype(np.float32)
    network = their_timm.create_model(
        f"local-dir:{tmp_path}", pretrained=True, img_size=64
    ).eval()
    with torch.no_grad():
        theirs = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    ours = jax.jit(model.apply)(params, images)["logits"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


EVERY = "vit|deit|eva|beit|swin|mixer"
# What timm has further: other attention, norms, stems or position embeddings.
OTHERS = (
    r".*_(radio_v\d|sapiens2|xp_\d+|18x2_224|map_256|mci_224)|.*_resnet\d+d_.*"
    r"|vit_(dlittle|dpwee|dwee|pwee|pe|relpos|srelpos)_.*|vitamin_.*|swin_s3_.*"
    r"|swinv2_cr_.*|cait_.*|test_vit(4|_relpos)|resnetv2_((?!_bit).)*"
)
# timm has no smaller Mixer-L, and BiT ResNets are large; others have the same code.
REGISTERED = [
    name
    for name in their_timm.list_models()
    if re.match(f"{EVERY}|flexivit|test_vit|cait|resnetv2", name)
    and not re.search("mixer_l|resnetv2_.*bit", name)
]


def small(name):
    """Returns arguments that make a network of timm small."""
    if name.startswith("mixer"):
        return {"img_size": 64, "mlp_ratio": (0.05, 0.3)}
    if name.startswith("swin"):
        window = int((re.search(r"window(\d+)", name) or [0, 8])[1])
        size = {"img_size": 8 * window, "embed_dim": 24, "num_heads": (1, 2, 4, 8)}
        return size | {"depths": (2, 1, 1, 1)}
    if "_resnet" in name or "_r26_" in name or "_r50_" in name or "_r_s" in name:
        return {"img_size": 64, "embed_dim": 64, "num_heads": 2, "depth": 1}
    side = 56 if "patch14" in name else 64
    width = 48 if "giant_patch14" in name else 64  # Gated MLPs have an even width.
    return {"img_size": side, "embed_dim": width, "num_heads": 2, "depth": 2}


@pytest.mark.slow
@pytest.mark.parametrize("start", sorted({name[:12] for name in REGISTERED}))
def test_every_network_of_the_registry_is_equal_or_refused(tmp_path, start):
    for name in (name for name in REGISTERED if name.startswith(start)):
        if re.fullmatch(OTHERS, name):
            with pytest.raises(UserError, match=_REFUSALS):
                read_shapes(name, tmp_path)
            continue
        network, folder = create(name, **small(name)), tmp_path / name
        folder.mkdir()
        check(network, folder, None, fit=False)


def read_shapes(name, folder, **changes):
    """Reads a network of timm with zeros as its parameters; returns both."""
    network = their_timm.create_model(name, device="meta", **changes)
    save_config_for_hf(network, folder / "config.json")
    flat = {
        key: np.broadcast_to(np.float32(0), value.shape)
        for key, value in network.state_dict().items()
    }
    config = json.loads((folder / "config.json").read_text())
    sidecars = {"config.json": config | {"model_args": changes}}
    reader, tensors = registry.find_reader(files.Tensors(flat, {}, sidecars, name))
    return network, reader.read(tensors, 0)


@pytest.mark.slow
def test_sizes_are_those_of_the_name():
    seen = 0
    for name in their_timm.list_models():
        facts = timm_networks.find(name)
        known = any(re.fullmatch(names, name) for names in timm_networks.ARCHITECTURES)
        if not known or facts.width is None:
            assert not known or re.match("swin|mixer|resnetv2", name), name
            continue
        arrays = their_timm.create_model(name, device="meta").state_dict()
        kernel = arrays.get("patch_embed.proj.weight", arrays.get("embeds.proj.weight"))
        depth = {k.split(".")[1] for k in arrays if k.startswith("blocks.")}
        assert (facts.width, facts.depth) == (len(kernel), len(depth)), name
        assert facts.patch in (None, kernel.shape[-1]) or kernel.ndim == 2, name
        registers = arrays.get("reg_token", np.zeros((1, 0))).shape[1]
        assert facts.registers == registers or name.startswith("naflex"), name
        seen += 1
    assert seen > 200


@pytest.mark.slow
def test_heads_and_pools_are_those_of_the_name(tmp_path):
    """Of the published sizes, whose config.json has no number of heads."""
    read = 0
    for name in (
        name for name in REGISTERED if not re.match("swin|mixer|resnetv2|vitamin", name)
    ):
        # Its heads are a list with a number per block.
        changes = {} if "sapiens2" in name else {"depth": 1}
        try:
            network, found = read_shapes(name, tmp_path, **changes)
        except UserError as error:
            assert re.search(_REFUSALS, str(error)), name
            continue
        options, read = models.create(**found.options).options, read + 1
        pools = {"token": "token", "gap": "avg", "map": "map", "none": ""}
        assert options["num_heads"] == network.blocks[0].attn.num_heads, name
        assert pools[options["pool"]] == network.global_pool, name
    assert read > 200


@pytest.mark.slow
def test_a_bare_file_is_its_own_network_or_asks_for_the_name():
    read, asked = [], []
    every = f"{EVERY}|flexivit|test_vit|resnetv2_.*bit"
    names = [name for name in their_timm.list_models() if re.match(every, name)]
    for name in [*names[::4], "deit_tiny_patch16_224", "vit_base_patch16_224"]:
        network = their_timm.create_model(name, device="meta")
        tag = network.pretrained_cfg.get("tag")
        flat = {
            key: np.broadcast_to(np.float32(0), value.shape)
            for key, value in network.state_dict().items()
            if value.is_floating_point()
        }
        # Of one block, so that the largest need little memory.
        few = {k: v for k, v in flat.items() if not re.match(r"blocks\.[1-9]", k)}
        config = {"architecture": f"{name}.{tag}" if tag else name}
        config["global_pool"] = getattr(network, "global_pool", None)
        images = {"input_size": network.pretrained_cfg["input_size"]}
        config = {k: v for k, v in config.items() if v is not None}
        whole = config | {"pretrained_cfg": images | {"tag": tag}}
        args = {"depth": 1} if timm_networks.find(name).width else {}
        whole["model_args"] = args
        named = {"architecture": config["architecture"], "model_args": args}
        bare, stated = options(flat), options(few, whole)
        if isinstance(stated, str):  # No network of ours.
            assert isinstance(bare, str), name
            assert isinstance(options(few, named), str), name
            continue
        by_name = options(few, named)
        if by_name != stated:
            assert name.startswith("resnetv2") and "--resolution=" in by_name, name
        if isinstance(bare, str):
            assert re.search("--(architecture|resolution)=", bare), name
            asked.append(name)
            continue
        assert bare == options(flat, whole | {"model_args": {}}), name
        read.append(name)
    assert (len(read), len(asked)) == (26, 35)
    assert {"deit_tiny_patch16_224", "vit_base_patch16_224"} <= set(read)


def options(flat, config=None):
    """Returns all options of the network of arrays, or the refusal."""
    sidecars = {"config.json": config} if config else {}
    try:
        reader, tensors = registry.find_reader(files.Tensors(flat, {}, sidecars, "f"))
        found = models.create(**reader.read(tensors, 0).options).options
    except UserError as error:
        return str(error)
    # What LayerScale began with has no effect on a file's values.
    return {k: v for k, v in found.items() if k != "layer_scale_init"}
