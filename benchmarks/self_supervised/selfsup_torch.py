"""MAE and DINO written plainly in PyTorch, what benchmarks/self_supervised/selfsup.py compares with.

The algorithms of facebookresearch/mae and facebookresearch/dino under the names of their
parameters, so that our readers read them: their masks, losses, clipping and updates, but
attention is PyTorch's fused one, and DINO takes the logarithms of a crop's softmax once,
not once for each crop that it is compared with. No stochastic depth, since both sides
must draw the same numbers. Letters: B images, N patches, D width, P side of a patch, K
outputs, V crops.
"""

import contextlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vit_jax.models import variants
from vit_jax.models.positions.sincos2d import sincos2d

SPREAD = 0.02  # Of the numbers that are added to each parameter, so that none is 0.


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)
        x = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return self.proj(x.transpose(1, 2).reshape(B, N, D))


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, num_heads, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, patch, width):
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)


class Encoder(nn.Module):
    """A ViT without a classifier; its features are those of the class token."""

    def __init__(self, variant, side):
        super().__init__()
        size, self.patch = (
            variants.parse(variant).size,
            variants.parse(variant).patch_size,
        )
        self.side = side // self.patch
        self.patch_embed = PatchEmbed(self.patch, size.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size.width))
        rows = 1 + self.side**2
        self.pos_embed = nn.Parameter(torch.zeros(1, rows, size.width))
        self.blocks = nn.ModuleList(
            Block(size.width, size.num_heads, size.mlp_dim) for _ in range(size.depth)
        )
        self.norm = nn.LayerNorm(size.width, eps=1e-6)

    def positions(self, side):
        """Returns the positions for so many patches down and across."""
        if side == self.side:
            return self.pos_embed
        table = self.pos_embed[:, 1:].unflatten(1, (self.side, self.side))
        # DINO's own scale, which keeps floor() from losing a patch.
        table = F.interpolate(
            table.permute(0, 3, 1, 2),
            scale_factor=((side + 0.1) / self.side,) * 2,
            mode="bicubic",
        )
        return torch.cat([self.pos_embed[:, :1], table.flatten(2).mT], dim=1)

    def forward(self, images):
        positions = self.positions(images.shape[-1] // self.patch)
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Mae(Encoder):
    """The masked autoencoder; returns loss and predictions (B, N, 3PP)."""

    def __init__(self, variant, side, *, mask_ratio, width, depth, num_heads):
        super().__init__(variant, side)
        self.visible = int(self.side**2 * (1 - mask_ratio))
        of_encoder = self.norm.normalized_shape[0]
        self._fix("pos_embed", of_encoder)
        self._fix("decoder_pos_embed", width)
        self.decoder_embed = nn.Linear(of_encoder, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_blocks = nn.ModuleList(
            Block(width, num_heads, 4 * width) for _ in range(depth)
        )
        self.decoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_pred = nn.Linear(width, 3 * self.patch**2)

    def _fix(self, name, width):
        """Has the fixed positions of that name, with zeros for the class token."""
        table = np.asarray(sincos2d((self.side, self.side), width, "sincos2d_mae"))
        self._parameters.pop(name, None)
        table = torch.from_numpy(np.pad(table, ((1, 0), (0, 0))))
        self.register_buffer(name, table[None])

    def forward(self, images, noise):
        order = noise.argsort(dim=1)
        restore, visible = order.argsort(dim=1), order[:, : self.visible]
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        x = x.gather(1, visible[..., None].expand(-1, -1, x.shape[-1]))
        token = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)

        x = self.decoder_embed(self.norm(x))
        B, N = noise.shape
        hidden = self.mask_token.to(x.dtype).expand(B, N - self.visible, -1)
        patches = torch.cat([x[:, 1:], hidden], dim=1)
        patches = patches.gather(1, restore[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat([x[:, :1], patches], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        predicted = self.decoder_pred(self.decoder_norm(x))[:, 1:].float()

        sides = (B, 3, self.side, self.patch, self.side, self.patch)
        targets = images.reshape(sides).permute(0, 2, 4, 3, 5, 1).reshape(B, N, -1)
        mean, variance = targets.mean(-1, True), targets.var(-1, keepdim=True)
        targets = (targets - mean) / (variance + 1e-6) ** 0.5
        mask = (restore >= self.visible).float()
        errors = (predicted - targets).square().mean(-1)
        return (errors * mask).sum() / mask.sum(), predicted


class Head(nn.Module):
    """DINO's head; the lengths of its last layer's weights are 1."""

    def __init__(self, width, hidden, bottleneck, outputs):
        super().__init__()
        self.mlp = nn.Sequential(
            *(nn.Linear(width, hidden), nn.GELU()),
            *(nn.Linear(hidden, hidden), nn.GELU()),
            nn.Linear(hidden, bottleneck),
        )
        last = nn.Linear(bottleneck, outputs, bias=False)
        self.last_layer = nn.utils.parametrizations.weight_norm(last)
        gain = self.last_layer.parametrizations.weight.original0
        gain.data.fill_(1)
        gain.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class Network(nn.Module):
    """Backbone and head; returns the answers to crops, (V x B, K) crop by crop."""

    def __init__(self, variant, side, **head):
        super().__init__()
        self.backbone = Encoder(variant, side)
        self.head = Head(self.backbone.norm.normalized_shape[0], **head)

    def forward(self, *crops):
        return self.head(torch.cat([self.backbone(x) for x in crops])).float()


class Dino(nn.Module):
    """Student and teacher; returns loss, the student's answers and the new centre."""

    def __init__(self, variant, side, **head):
        super().__init__()
        self.student = Network(variant, side, **head)
        self.teacher = Network(variant, side, **head)
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, head["outputs"]))

    def ask_teacher(self, large):
        with torch.no_grad():
            return self.teacher(large)

    def forward(self, large, small):
        teacher, answers = self.ask_teacher(large), self.student(large, small)
        B = len(teacher) // 2
        targets = F.softmax((teacher - self.center) / 0.04, dim=-1).split(B)
        logs = F.log_softmax(answers / 0.1, dim=-1).split(B)
        losses = [
            -(target * log).sum(-1).mean()
            for i, target in enumerate(targets)
            for j, log in enumerate(logs)
            if i != j
        ]
        center = 0.9 * self.center + 0.1 * teacher.mean(0, keepdim=True)
        return sum(losses) / len(losses), answers, center


class Training:
    """Trains one of these; AdamW, bfloat16 by autocast, torch.compile on a GPU.

    Args:
      module: Mae or Dino.
      inputs: what it is called with, on the CPU.
      rate, weight_decay, b2: of AdamW; what has one axis does not decay.
    """

    def __init__(self, module, inputs, *, dtype, rate, weight_decay, b2):
        torch.set_float32_matmul_precision("high")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.module = module.to(self.device)
        self.inputs = [x.to(self.device) for x in inputs]
        free = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in free if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in free if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, b2), fused=True)
        on_gpu = self.device == "cuda"
        self._run = torch.compile(self.module) if on_gpu else self.module
        self._cast = contextlib.nullcontext
        if dtype == "bfloat16":
            self._cast = lambda: torch.autocast(self.device, torch.bfloat16)

    def _outputs(self):
        with self._cast():
            return self._run(*self.inputs)

    def gradient(self):
        """Computes loss and gradients."""
        self.optimizer.zero_grad()
        self._outputs()[0].backward()
        self._wait()

    def step(self):
        """Trains; returns the loss."""
        self.optimizer.zero_grad()
        loss, *rest = self._outputs()
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.update(*rest)
        self._wait()
        return loss.item()

    def clip(self):
        """Clips gradients."""

    def update(self, *rest):
        """Updates what is no parameter, from what the module returned behind the loss."""

    def _wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self):
        """Returns the most memory that the device held, in bytes; None if unknown."""
        if self.device == "cpu":
            return None
        return torch.cuda.max_memory_allocated()


class TrainingMae(Training):
    def forward(self):
        """Returns predictions (B, N, 3PP)."""
        with torch.inference_mode():
            return self._outputs()[1].cpu().numpy()

    def weights(self):
        """Returns a copy of the state dict."""
        return _arrays(self.module)

    def same_masks(self, noise):
        """Masks in each step by noise (B, N)."""
        self.inputs[1] = torch.tensor(noise, device=self.device)


class TrainingDino(Training):
    momentum = 0.996

    def __init__(self, module, inputs, clip_norm, **options):
        super().__init__(module, inputs, **options)
        self.clip_norm = clip_norm

    def weights(self):
        """Returns a copy of the student's state dict; the teacher's is the same."""
        return _arrays(self.module.student)

    def forward(self):
        """Returns the student's answers (B, V, K)."""
        with torch.inference_mode(), self._cast():
            answers = self.module.student(*self.inputs).cpu().numpy()
        images = len(self.inputs[0]) // 2
        return answers.reshape(-1, images, answers.shape[-1]).swapaxes(0, 1)

    def teacher(self):
        """Returns the teacher's answers."""
        with self._cast():
            return self.module.ask_teacher(self.inputs[0]).cpu().numpy()

    def clip(self):
        for parameter in self.module.student.parameters():
            if parameter.grad is not None:
                norm = parameter.grad.norm()
                parameter.grad.mul_((self.clip_norm / (norm + 1e-6)).clamp(max=1))

    @torch.no_grad()
    def update(self, answers, center):
        self.module.center.copy_(center)
        pairs = zip(
            self.module.teacher.parameters(),
            self.module.student.parameters(),
            strict=True,
        )
        for old, new in pairs:
            old.mul_(self.momentum).add_(new, alpha=1 - self.momentum)


def mae(variant, images, *, decoder, mask_ratio, dtype, optim):
    """Returns a TrainingMae on images (B, Y, X, C), uint8."""
    torch.manual_seed(0)
    module = Mae(variant, images.shape[1], mask_ratio=mask_ratio, **decoder)
    noise = torch.rand(len(images), module.side**2)
    inputs = [_normalized(images), noise]
    return TrainingMae(_spread(module), inputs, dtype=dtype, **optim)


def dino(variant, crops, *, head, clip_norm, dtype, optim):
    """Returns a TrainingDino on crops of two sizes, each (B, V, Y, X, C), uint8."""
    torch.manual_seed(0)
    module = Dino(variant, crops[0].shape[2], **head)
    _spread(module.student)
    module.teacher.load_state_dict(module.student.state_dict())
    inputs = [_normalized(x.swapaxes(0, 1).reshape(-1, *x.shape[2:])) for x in crops]
    return TrainingDino(module, inputs, clip_norm, dtype=dtype, **optim)


def _normalized(images):
    images = images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    return torch.from_numpy(images).contiguous()


@torch.no_grad()
def _spread(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
    return module


def _arrays(module):
    return {k: v.cpu().numpy().copy() for k, v in module.state_dict().items()}
