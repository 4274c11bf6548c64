"""Training steps of DINOv2 against the same steps in PyTorch, as facebookresearch/dinov2 takes them."""

import math
import pathlib

import jax
import numpy as np
import optax
import pytest
import test_dino
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from test_dino import part as below

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.tasks import block_masks, dinov2
from vit_jax.training import optim, schedules
from vit_jax.weights.formats import timm
from vit_jax.weights.formats.files import Tensors

pytestmark = pytest.mark.parity

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
BACKBONE = GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors"
B, STEPS, DEPTH, DECAY, RATE = 4, 3, 2, 0.9, 1e-3
SIZES = {"hidden_dim": 20, "bottleneck_dim": 10}
TASK = dinov2.Dinov2Config(
    num_outputs=30,
    patch_num_outputs=26,
    free_gain=True,
    koleo_group=2,
    mask_group=B,
    teacher_temperature_start=0.04,
    teacher_temperature=0.07,
    teacher_temperature_steps=STEPS,
    teacher_momentum=0.8,
    **SIZES,
)
OPTIM = {
    "name": "adamw",
    "learning_rate": RATE,
    "schedule": schedules.SCHEDULES["constant"](),
    "weight_decay": 0.04,
    "weight_decay_end": 0.4,
    "weight_decay_mask": (
        r"/kernel$",
        r"(cls|pos_embedding|register_tokens|mask_token|last_layer|gain)$",
    ),
    "layer_decay": DECAY,
    "learning_rate_factors": (
        "network/embedding/ -> 0.2",
        f"mask_token$ -> {DECAY ** (DEPTH + 1)}",
    ),
    "grad_clip_norm_per_part": 0.5,
    "freeze": (r"head/(last_layer|gain)$",),
    "freeze_steps": 1,
}
RUN = RunLength(STEPS, 10.0)


def head_weights(rng, outputs):
    shapes = {0: (20, 24), 2: (20, 20), 4: (10, 20)}
    flat = {}
    for i, shape in shapes.items():
        flat[f"mlp.{i}.weight"] = rng.normal(size=shape) * 0.3
        flat[f"mlp.{i}.bias"] = rng.normal(size=shape[0]) * 0.1
    flat["last_layer.weight_v"] = rng.normal(size=(outputs, 10))
    flat["last_layer.weight_g"] = 1 + 0.1 * rng.normal(size=(outputs, 1))
    return {name: value.astype(np.float32) for name, value in flat.items()}


def first_weights():
    """Returns a student or teacher under the names of facebookresearch/dinov2."""
    rng = np.random.default_rng(1)
    flat = {f"backbone.{k}": v for k, v in load_file(BACKBONE).items()}
    for name, outputs in (("dino_head", 30), ("ibot_head", 26)):
        flat |= {f"{name}.{k}": v for k, v in head_weights(rng, outputs).items()}
    return flat


def head_of(flat):
    gain = {"gain": flat["last_layer.weight_g"][:, 0]}
    return test_dino.head_of(flat) | gain


def params_of(flat):
    """Returns the parameters of this project from theirs."""
    backbone = below(flat, "backbone.")
    token = backbone.pop("mask_token")
    names = {"register_tokens": "reg_token"}
    backbone = {names.get(k, k): v for k, v in backbone.items()}
    found = {
        "network": timm.read(Tensors(backbone, {}, {}, "student"), num_heads=3).params,
        "mask_token": token[None],
        "head": head_of(below(flat, "dino_head.")),
        "patch_head": head_of(below(flat, "ibot_head.")),
    }
    return found


# The same in PyTorch.


def encode(torch, w, images, mask=None):
    """Returns the normalised class tokens and patches of images (C, 3, Y, X)."""
    F = torch.nn.functional
    norm = lambda x, name: F.layer_norm(
        x, (24,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6
    )
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])
    project = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    x = F.conv2d(images, *project, stride=4)
    C, grid = len(x), x.shape[-2:]
    x = x.flatten(2).transpose(1, 2)
    if mask is not None:
        x = torch.where(mask[..., None], w["mask_token"][None], x)
    x = torch.cat([w["cls_token"].expand(C, -1, -1), x], 1)
    positions = w["pos_embed"]
    if x.shape[1] != positions.shape[1]:
        table = positions[:, 1:].reshape(1, 8, 8, 24).permute(0, 3, 1, 2)
        table = F.interpolate(table, size=grid, mode="bicubic", antialias=True)
        table = table.flatten(2).transpose(1, 2)
        positions = torch.cat([positions[:, :1], table], 1)
    x = x + positions
    registers = w["register_tokens"].expand(C, -1, -1)
    x = torch.cat([x[:, :1], registers, x[:, 1:]], 1)
    for i in range(DEPTH):
        name = f"blocks.{i}"
        qkv = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, v = qkv.reshape(C, -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{name}.attn.proj") * w[f"{name}.ls1.gamma"]
        y = F.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        x = x + linear(y, f"{name}.mlp.fc2") * w[f"{name}.ls2.gamma"]
    x = norm(x, "norm")
    return x[:, 0], x[:, 5:]


def project(torch, w, x):
    F = torch.nn.functional
    for i in (0, 2, 4):
        x = F.gelu(x) if i else x
        x = F.linear(x, w[f"mlp.{i}.weight"], w[f"mlp.{i}.bias"])
    v = w["last_layer.weight_v"]
    return (
        F.normalize(x, dim=-1)
        @ (w["last_layer.weight_g"] * v / v.norm(dim=1, keepdim=True)).T
    )


def sinkhorn(torch, outputs, temperature):
    q = torch.exp(outputs.double() / temperature).T
    q = q / q.sum()
    K, M = q.shape
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / K
        q = q / q.sum(0, keepdim=True) / M
    return (q * M).T.float()


def koleo(torch, x):
    x = torch.nn.functional.normalize(x, eps=1e-8, dim=-1)
    similar = x @ x.T - 2 * torch.eye(len(x))
    nearest = x[similar.argmax(1)]
    distance = torch.nn.PairwiseDistance(2, eps=1e-8)(x, nearest)
    return -torch.log(distance + 1e-8).mean()


def their_loss(torch, student, teacher, large, small, mask, temperature):
    """Returns the loss; crops (crops, B, 3, Y, X), and masks of the large ones."""
    part = lambda weights, name: below(weights, f"{name}.")
    flat = large.flatten(0, 1)
    with torch.no_grad():
        cls, patches = encode(torch, part(teacher, "backbone"), flat)
        outputs = project(torch, part(teacher, "dino_head"), cls)
        targets = sinkhorn(torch, outputs, temperature).reshape(2, B, -1)
        hidden = project(torch, part(teacher, "ibot_head"), patches[mask])
        patch_targets = sinkhorn(torch, hidden, temperature)
    cls, patches = encode(torch, part(student, "backbone"), flat, mask)
    of_small, _ = encode(torch, part(student, "backbone"), small.flatten(0, 1))
    outputs = project(torch, part(student, "dino_head"), torch.cat([cls, of_small]))
    logs = torch.log_softmax(outputs / 0.1, -1).reshape(-1, B, outputs.shape[-1])
    pairs = [(g, v) for g in range(2) for v in range(len(logs)) if g != v]
    dino = sum(-(targets[g] * logs[v]).sum(-1).mean() for g, v in pairs) / len(pairs)
    hidden = project(torch, part(student, "ibot_head"), patches[mask])
    each = -(patch_targets * torch.log_softmax(hidden / 0.1, -1)).sum(-1)
    weight = 1 / mask.sum(1, keepdim=True).clamp(min=1)
    patch = (each * weight.expand_as(mask)[mask]).sum() / len(mask)
    groups = cls.reshape(2 * B // 2, 2, -1)
    spread = sum(koleo(torch, group) for group in groups) / (B // 2)
    return dino + patch + 0.1 * spread


def layer_of(name):
    if "blocks." in name:
        return int(name.split(".")[2]) + 1
    names = ("pos_embed", "patch_embed", "mask_token", "cls_token", "register_tokens")
    return 0 if any(n in name for n in names) else DEPTH + 1


class AdamW:
    """PyTorch's AdamW, each parameter with its own rate and decay, as theirs before fusing.

    It is the function below `torch.optim.AdamW`, whose class imports PyTorch's compiler.
    """

    def __init__(self, torch, student):
        self._function = pytest.importorskip("torch.optim.adamw").adamw
        self._student, self._state = student, {}
        for name, value in student.items():
            zeros = [torch.zeros_like(value) for _ in range(2)]
            self._state[name] = *zeros, torch.tensor(0.0)

    def step(self, step, decay):
        for name, value in self._student.items():
            free = name.endswith(".bias") or "norm" in name or "gamma" in name
            rate = RATE * DECAY ** (DEPTH + 1 - layer_of(name))
            rate *= 0.2 if "patch_embed" in name else 1
            rate *= not (step < 1 and "last_layer" in name)
            first, second, count = self._state[name]
            self._function(
                *([value], [value.grad], [first], [second], [], [count]),
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=rate,
                weight_decay=decay * (not free),
                eps=1e-8,
                maximize=False,
            )


def test_steps_equal_theirs():
    torch = pytest.importorskip("torch")
    start = first_weights()
    tensors = {k: torch.tensor(v, requires_grad=True) for k, v in start.items()}
    teacher = {k: torch.tensor(v) for k, v in start.items()}
    adam = AdamW(torch, tensors)

    model = models.create(
        "Ti/4",
        num_classes=0,
        image_size=(32, 32),
        width=24,
        depth=DEPTH,
        num_heads=3,
        mlp_dim=96,
        activation="gelu",
        num_register_tokens=4,
        layer_scale_init=1e-5,
        posemb_resize="bicubic",
    )
    crops = "multi_crop(small_size=16, num_small=2)"
    data = DataConfig(image_size=(32, 32), num_classes=0, train_transform=crops)
    task = TASK.build(model, data, RUN)
    params = params_of(start)
    made, extra = jax.eval_shape(task.init, jax.random.key(0))
    extra = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), extra)
    extra |= {"teacher": params_of(start)}
    shapes = lambda tree: jax.tree.map(np.shape, tree)
    assert shapes(params) == shapes(made)
    config = optim.AdamConfig(**OPTIM)
    rate = optim.learning_rate(config, RATE, RUN)
    tx = optim.optimizer(config, params, rate, RUN, model.config, "network")
    state, draw = jax.jit(tx.init)(params), jax.jit(task.masked)

    @jax.jit
    def take(params, extra, state, batch, step):
        key, find = jax.random.key(step), jax.grad(task.loss, has_aux=True)
        grads, (metrics, stats) = find(params, extra, batch, key)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        extra = task.update(extra, params, stats, step + 1)
        return params, extra, state, metrics["loss"]

    rng = np.random.default_rng(0)
    for step in range(STEPS):
        large = rng.normal(size=(B, 2, 32, 32, 3)).astype(np.float32)
        small = rng.normal(size=(B, 2, 16, 16, 3)).astype(np.float32)
        draws = block_masks.num_draws(64, exact=False)
        noise = rng.uniform(size=(B, 2, draws)).astype(np.float32)
        batch = {"image": large, "small_crops": small, "mask_noise": noise}
        mask = np.asarray(draw(batch).mask)
        mask = mask.reshape(B, 2, 64).swapaxes(0, 1).reshape(2 * B, 64)

        temperature = 0.04 + 0.03 * step / (STEPS - 1)
        views = [torch.tensor(x.transpose(1, 0, 4, 2, 3)) for x in (large, small)]
        given = *views, torch.tensor(mask), temperature
        loss = their_loss(torch, tensors, teacher, *given)
        for value in tensors.values():
            value.grad = None
        loss.backward()
        for part in ("backbone.", "dino_head.", "ibot_head."):
            torch.nn.utils.clip_grad_norm_(below(tensors, part).values(), 0.5)
        decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * step / STEPS))
        with torch.no_grad():
            adam.step(step, decay)
        momentum = 1 + (0.8 - 1) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        with torch.no_grad():
            for name, value in teacher.items():
                value.mul_(momentum).add_(tensors[name], alpha=1 - momentum)

        params, extra, state, found = take(params, extra, state, batch, step)
        assert float(found) == pytest.approx(loss.item(), abs=1e-4)
        for found, theirs in ((params, tensors), (extra["teacher"], teacher)):
            flat = {k: v.detach().numpy().copy() for k, v in theirs.items()}
            expected = flatten_dict(params_of(flat), sep="/")
            for name, value in flatten_dict(found, sep="/").items():
                if (
                    "/key/bias" in name
                ):  # Its gradient is rounding, which Adam magnifies.
                    continue
                np.testing.assert_allclose(
                    value, expected[name], atol=1e-4, err_msg=f"{step} {name}"
                )
    moved = np.abs(params["mask_token"] - params_of(start)["mask_token"]).max()
    assert moved > 1e-4
