"""The model that is trained, with the settings of a run. Its layers compute all experts densely (see train.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DOMAINS = ("code", "math", "math-other", "medical", "legal", "chat")
# As many as there may be, so that what is compiled does not depend on how documents are grouped.
GROUPS = 64
END, CLOSE = 0, 2


@dataclass(frozen=True)
class Settings:
    """A run. Every field is a flag."""

    layers: int = 8
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    width: int = 64
    """Intermediate size of an expert."""
    length: int = 512
    """Tokens in a row; a row holds several documents, which do not see each other."""
    rows: int = 64
    """Rows in a step."""
    steps: int = 2000
    minutes: float = 8.0
    """Hard limit; the learning rate comes down in time for it."""
    rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.1
    balance: float = 1e-3
    """Weight of the load-balancing loss (Switch), over the whole batch."""
    information: float = 0.01
    """Weight of the mutual information between domain and expert (Mod-Squad), which is maximised."""
    groups: str = "domain"
    """Groups of the information loss: domain, or slice (domain and language)."""
    shares: str = "0.28,0.12,0.15,0.12,0.08,0.25"
    """Share of each domain among the training tokens."""
    evaluate: int = 100
    """Steps between evaluations of held-out text."""
    held: int = 0
    """Rows of held-out text evaluated; 0 for all of them."""
    seed: int = 7


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-6).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.s = s
        self.q = nn.Parameter(torch.empty(s.heads * s.head_dim, s.hidden))
        self.k = nn.Parameter(torch.empty(s.kv_heads * s.head_dim, s.hidden))
        self.v = nn.Parameter(torch.empty(s.kv_heads * s.head_dim, s.hidden))
        self.o = nn.Parameter(torch.empty(s.hidden, s.heads * s.head_dim))
        self.router = nn.Parameter(torch.empty(s.experts, s.hidden))
        self.gate = nn.Parameter(torch.empty(s.experts * s.width, s.hidden))
        self.up = nn.Parameter(torch.empty(s.experts * s.width, s.hidden))
        self.down = nn.Parameter(torch.empty(s.hidden, s.experts * s.width))
        self.before, self.after = Norm(s.hidden), Norm(s.hidden)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def attend(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        s, (batch, length, _) = self.s, x.shape
        q = rotate(self.q_norm(F.linear(x, self.q).view(batch, length, s.heads, s.head_dim)).transpose(1, 2), turn)
        k = rotate(self.k_norm(F.linear(x, self.k).view(batch, length, s.kv_heads, s.head_dim)).transpose(1, 2), turn)
        v = F.linear(x, self.v).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        share = s.heads // s.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
        return F.linear(out.transpose(1, 2).reshape(batch, length, -1).to(x.dtype), self.o)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, [token, expert] probability, [token, expert] whether chosen."""
        s = self.s
        flat = x.reshape(-1, s.hidden)
        with torch.autocast(flat.device.type, enabled=False):
            probability = F.linear(flat.float(), self.router.float()).softmax(-1)
        top, chosen = probability.topk(s.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probability).scatter(1, chosen, top)
        inner = F.silu(F.linear(flat, self.gate)) * F.linear(flat, self.up)
        inner = inner.view(-1, s.experts, s.width) * weights.to(inner.dtype).unsqueeze(-1)
        out = F.linear(inner.view(-1, s.experts * s.width), self.down)
        return out.view_as(x), probability, (weights > 0).float()

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attend(self.before(x), mask, turn)
        out, probability, chosen = self.mix(self.after(x))
        return x + out, probability, chosen


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = turn
    left, right = x.float().chunk(2, dim=-1)
    swapped = torch.cat((-right, left), dim=-1)
    return (x.float() * cosine + swapped * sine).to(x.dtype)


class Losses(NamedTuple):
    text: Tensor  # [row, token - 1] nats
    balance: Tensor  # [layer]
    information: Tensor  # [layer] nats
    chosen: Tensor  # [layer, domain, expert] share of the domain's tokens that take the expert


class Model(nn.Module):
    def __init__(self, s: Settings, vocabulary: int) -> None:
        super().__init__()
        self.s = s
        self.embedding = nn.Parameter(torch.empty(vocabulary, s.hidden))
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draw fresh weights in place, on their device."""
        for name, weight in self.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last == "weight":
                weight.fill_(1.0)
            elif last in ("embedding", "router"):
                weight.normal_(std=0.02)
            elif last == "down":
                weight.normal_(std=(self.s.width * 2 * self.s.layers) ** -0.5)
            else:
                weight.normal_(std=(weight.shape[1] * (2 * self.s.layers if last == "o" else 1)) ** -0.5)

    def forward(self, tokens: Tensor, segment: Tensor, domain: Tensor, group: Tensor) -> Losses:
        s, length = self.s, tokens.shape[1]
        position = torch.arange(length, device=tokens.device)
        angle = position[:, None] * 10000.0 ** (-torch.arange(0, 1, 2 / s.head_dim, device=tokens.device))
        angle = torch.cat((angle, angle), dim=-1)
        turn = (angle.cos(), angle.sin())
        mask = (segment[:, :, None] == segment[:, None, :]) & (position[:, None] >= position[None, :])
        x = F.embedding(tokens, self.embedding)
        real = (segment >= 0).reshape(-1).float()
        of_domain = F.one_hot(domain.reshape(-1), len(DOMAINS)).float() * real[:, None]
        of_group = F.one_hot(group.reshape(-1), GROUPS).float() * real[:, None]
        balance, information, taken = [], [], []
        for layer in self.layers:
            x, probability, chosen = layer(x, mask[:, None], turn)
            mean = (probability * real[:, None]).sum(0) / real.sum()
            share = (chosen * real[:, None]).sum(0) / (real.sum() * s.top_k)
            balance.append(s.experts * (mean * share).sum())
            with torch.autocast(tokens.device.type, enabled=False):
                information.append(mutual_information(of_group, probability))
                taken.append((of_domain.t() @ chosen) / of_domain.sum(0).clamp(min=1)[:, None])
        logits = F.linear(self.norm(x), self.embedding)[:, :-1].float()
        text = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), reduction="none")
        return Losses(text.view(len(tokens), -1), torch.stack(balance), torch.stack(information), torch.stack(taken))


def mutual_information(of_group: Tensor, probability: Tensor) -> Tensor:
    """Between the group of a token and the expert it is sent to, groups taken as equally likely; nats."""
    counts = of_group.sum(0)
    present = (counts > 0).float()
    given = (of_group.t() @ probability) / counts.clamp(min=1)[:, None]  # [group, expert]
    weight = present / present.sum()
    overall = (weight[:, None] * given).sum(0)
    return (weight[:, None] * given * (given.clamp(min=1e-9).log() - overall.clamp(min=1e-9).log())).sum()
