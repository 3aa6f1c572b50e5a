"""The paper's Transformer and its update in PyTorch, with its fused attention, compiler and optimizer: a peer.

The same model as plain_flax.py. Needs torch and nothing else, so that it can run in an environment of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, sizes: dict[str, Any], *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = sizes['heads'], causal
        width = sizes['d_model']
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, sizes: dict[str, Any], *, decoder: bool) -> None:
        super().__init__()
        width = sizes['d_model']
        self.attention = Attention(sizes, causal=decoder)
        self.cross = Attention(sizes, causal=False) if decoder else None
        self.feed_forward = nn.Sequential(nn.Linear(width, sizes['d_ff']), nn.ReLU(), nn.Linear(sizes['d_ff'], width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(3 if decoder else 2))
        self.drop = nn.Dropout(sizes['dropout'])

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        norms = iter(self.norms)
        x = next(norms)(x + self.drop(self.attention(x, x)))
        if self.cross is not None:
            x = next(norms)(x + self.drop(self.cross(x, memory)))
        return next(norms)(x + self.drop(self.feed_forward(x)))


class Transformer(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.width = sizes['d_model']
        self.table = nn.Embedding(sizes['vocab'], self.width)
        nn.init.normal_(self.table.weight, std=self.width**-0.5)
        self.encoder = nn.ModuleList(Layer(sizes, decoder=False) for _ in range(sizes['layers']))
        self.decoder = nn.ModuleList(Layer(sizes, decoder=True) for _ in range(sizes['layers']))
        self.drop = nn.Dropout(sizes['dropout'])
        angles = torch.arange(sizes['length'])[:, None] / 10_000.0 ** (torch.arange(0, self.width, 2) / self.width)
        self.register_buffer('sinusoids', torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.table(ids) * self.width**0.5 + self.sinusoids)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The smoothed loss."""
        memory = self.embed(inputs)
        for layer in self.encoder:
            memory = layer(memory, None)
        x = self.embed(functional.pad(targets[:, :-1], (1, 0), value=1))
        for layer in self.decoder:
            x = layer(x, memory)
        logits = functional.linear(x, self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def make_update(sizes: dict[str, Any], device: str, *, compiled: bool) -> tuple[Callable[..., torch.Tensor], int]:
    """`update(inputs, targets) -> loss`, and the number of parameters."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision('high')
    model = Transformer(sizes).to(device).train()
    adam = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    forward = torch.compile(model) if compiled else model

    def update(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(inputs, targets)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        return loss.detach()

    return update, sum(parameter.numel() for parameter in model.parameters())
