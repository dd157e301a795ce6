"""One attention in many spellings: rotations, norms, and near misses. Everything a test varies is a function of q."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from exactness import reasons_of
from torch import Tensor, nn

B, S, H, D = 2, 12, 4, 16
HALF = D // 2

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
Normalise = Callable[[Tensor, Tensor], Tensor]


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def halves(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return q * c + torch.cat((-q[..., HALF:], q[..., :HALF]), -1) * s


def chunked(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = q.chunk(2, -1)
    return torch.cat((a * c[..., :HALF] - b * s[..., :HALF], b * c[..., HALF:] + a * s[..., HALF:]), -1)


def unbound(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = q.reshape(*q.shape[:-1], 2, HALF).unbind(-2)
    return q * c + torch.cat((-b, a), dim=-1) * s


def rolled(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    sign = torch.cat((-torch.ones(HALF), torch.ones(HALF)))
    return q * c + q.roll(HALF, -1) * sign * s


def stacked(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = q.view(*q.shape[:-1], 2, HALF).unbind(-2)
    c, s = c[..., :HALF], s[..., :HALF]
    return torch.stack((a * c - b * s, a * s + b * c), -2).flatten(-2)


def complex_product(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    pairs = q.float().unflatten(-1, (2, HALF)).transpose(-1, -2).contiguous()
    z = torch.view_as_complex(pairs) * torch.complex(c[..., :HALF], s[..., :HALF])
    return torch.view_as_real(z).transpose(-1, -2).flatten(-2)


def matrix(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    c, s = c[..., :HALF], s[..., :HALF]
    m = torch.stack((c, -s, s, c), -1).view(*c.shape[:-1], HALF, 2, 2)
    x = q.unflatten(-1, (2, HALF)).transpose(-1, -2).unsqueeze(-2)
    return (m * x).sum(-1).transpose(-1, -2).flatten(-2)


def written(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    out = torch.empty_like(q)
    out[..., :HALF] = q[..., :HALF] * c[..., :HALF] - q[..., HALF:] * s[..., :HALF]
    out[..., HALF:] = q[..., HALF:] * c[..., :HALF] + q[..., :HALF] * s[..., :HALF]
    return out


def copied(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    out = q.new_zeros(q.shape)
    out[..., :HALF].copy_(q[..., :HALF] * c[..., :HALF] - q[..., HALF:] * s[..., :HALF])
    tail = out[..., HALF:]
    tail.add_(q[..., HALF:] * c[..., :HALF])
    tail.add_(q[..., :HALF] * s[..., :HALF])
    return out


def addcmul(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return torch.addcmul(q * c, torch.cat((q[..., HALF:].neg(), q[..., :HALF]), -1), s)


def subtracted(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = torch.split(q, [HALF, HALF], dim=-1)
    x = torch.empty_like(q)
    x.copy_(q * c)
    x[..., :HALF] -= b * s[..., :HALF]
    x[..., HALF:] += a * s[..., HALF:]
    return x


def added_in_place(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """LTX-2"""
    x, c, s = q.unflatten(-1, (2, HALF)), c[..., None, :HALF], s[..., None, :HALF]
    out = x * c
    first, second = out[..., :1, :], out[..., 1:, :]
    first.addcmul_(-s, x[..., 1:, :])
    second.addcmul_(s, x[..., :1, :])
    return out.flatten(-2)


def flipped(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    sign = torch.tensor([-1.0, 1.0]).view(2, 1)
    return q * c + (q.unflatten(-1, (2, HALF)).flip(-2) * sign).flatten(-2) * s


def opposite(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return q * c + torch.cat((q[..., HALF:], -q[..., :HALF]), -1) * s


ROTATIONS = (
    halves,
    chunked,
    unbound,
    rolled,
    stacked,
    complex_product,
    matrix,
    written,
    copied,
    addcmul,
    subtracted,
    added_in_place,
    flipped,
)

NORMS: dict[str, Normalise] = {
    "rsqrt": rms,
    "div_sqrt": lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
    "pow": lambda x, w: x * torch.pow(x.square().mean(-1, keepdim=True) + 1e-6, -0.5) * w,
    "functional": lambda x, w: F.rms_norm(x, (D,), w, 1e-6),
    "sum": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / D + 1e-6) * w,
    "one_plus": lambda x, w: F.rms_norm(x, (D,), None, 1e-6) * (1 + w),
    "no_eps": lambda x, w: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / D**0.5) * w,
    "transposed": lambda x, w: rms(x.transpose(1, 2), w).transpose(1, 2),
    "tiny_eps": lambda x, w: rms(x, w, 1e-12),
    "eps_tensor": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.tensor(1e-12)) * w,
    "eps_full": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + x.new_full((1,), 1e-6)) * w,
    "layer": lambda x, w: F.layer_norm(x, (D,), w, None, 1e-6),
    "layer_by_hand": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6) * w
    ),
}


class Attention(nn.Module):
    """q, k, v projections, a norm and a rotation (in either order) of q and k, SDPA."""

    def __init__(
        self,
        rotate: Rotate = halves,
        norm: Normalise | None = rms,
        norm_last: bool = False,
        before: Callable[[Tensor], Tensor] | None = None,
        between: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
        given_tables: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, H * D, bias=False) for _ in range(3))
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(D) + 0.5) for _ in range(2))
        self.rotate, self.norm, self.norm_last, self.given_tables = rotate, norm, norm_last, given_tables
        self.before, self.between, self.after = (f or (lambda x: x) for f in (before, between, after))

    def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = self.before(x)
        if self.norm is not None and not self.norm_last:
            x = self.between(self.norm(x, w))
        x = self.rotate(x, c, s)
        if self.norm is not None and self.norm_last:
            x = self.norm(self.between(x), w)
        return self.after(x).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, inv_freq: Tensor) -> Tensor:
        if not self.given_tables:
            freqs = torch.arange(S).float()[:, None] * inv_freq[None, :]
            emb = torch.cat((freqs, freqs), -1)
            cos, sin = emb.cos(), emb.sin()
        cos, sin = cos[None, :, None], sin[None, :, None]
        q, k, v = (p(x).view(B, S, H, D) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.one(q, self.q_weight, cos, sin), self.one(k, self.k_weight, cos, sin)
        return F.scaled_dot_product_attention(q, k, v.transpose(1, 2))


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, S, 32), torch.randn(S, D), torch.randn(S, D), torch.rand(HALF)


def tables() -> tuple[Tensor, Tensor]:
    """cos and sin `[1, S, 1, D]` for tensors `[B, S, H, D]`, to be given to a model."""
    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    return angle.cos(), angle.sin()


def refused(reason: str, **spelling: Any) -> None:
    """Fail unless an attention of this spelling is refused, for that reason alone."""
    found = reasons_of(Attention(**spelling), *inputs())
    assert found
    assert all(reason in r for r in found), found
