"""Random small training programs: is a step that ran out of memory and was done again in parts the same step?

    python benchmarks/rescue_random.py --count 500 --seed 0   # the verdict; status 1 if a step became another one
    python benchmarks/rescue_random.py --show 17              # the program of one seed, and how it ends
    python benchmarks/rescue_random.py --truth --count 500    # no rescue: all programs run, and run the same twice

A seed gives the source of a LightningModule, composed from the grammar below. About half of the programs also mix
samples in a way that no sum over parts can repeat. Each trains four steps: once without a failure, and once with an
out-of-memory error in one step if the batch has more than `most` samples. Weights, buffers, optimizer state, plain
attributes, logged values and outputs are then compared, in float64 to 1e-9 and for every fourth program in float32 to
1e-5. A program that draws numbers for each sample (dropout) may end with other draws. It is then compared again with
draws of no effect.
"""

from __future__ import annotations

import argparse
import linecache
import logging
import random
import re
import sys
import textwrap
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from torch.utils.data import DataLoader

# [table -> target] name: lines of __init__ => lines of the step | ...     {D} width, {T} time, {k} a number of its own
# Lines end at "; ". The last line is assigned to the target unless it is a statement; "+ ..." adds to the loss.
# Names: x inputs, y classes, t regression targets, w weights; for tokens also m the mask, and yt the classes of tokens;
# h hidden values, z one vector for each sample, out logits, e what a mixer makes of z.
GRAMMAR = r"""
[first -> h] features: self.first = nn.Linear(6, {D}); self.out = nn.Linear({D}, 4) => self.first(x) | tokens:
  self.first = nn.Embedding(11, {D}); self.out = nn.Linear({D}, 4) => self.first(x) | images: self.first = nn.Conv2d(3,
  {D}, 3, padding=1); self.out = nn.Linear({D}, 4) => self.first(x)
[features -> h] linear: self.l{k} = {linear} => F.gelu(self.l{k}(h)) | residual: self.l{k} =
  nn.Sequential(nn.LayerNorm({D}), {linear}, nn.Tanh()) => h + self.l{k}(h) | group norm: F.group_norm(h, 2) | gate:
  self.l{k} = {linear} => h * self.l{k}(h).sigmoid() | glu: self.l{k} = nn.Linear({D}, 2 * {D}) => F.glu(self.l{k}(h),
  dim=-1) | einsum: self.l{k} = nn.Parameter(torch.randn({D}, {D}) / 3) => torch.einsum('nd,de->ne', h,
  self.l{k}).relu() | heads: self.l{k} = nn.Parameter(torch.randn(2, {D} // 2, {D} // 2)) =>
  torch.einsum('nhd,hde->nhe', h.view(len(h), 2, -1), self.l{k}).reshape(len(h), -1) | transposed: self.l{k} =
  nn.Parameter(torch.randn({D}, {D}) / 3) => (self.l{k} @ h.T).T.tanh() | bins: self.l{k} = nn.Embedding(2, {D}) => h +
  self.l{k}((h[:, 0] > 0).long()) | frozen batch norm: self.register_buffer('m{k}', torch.rand({D}));
  self.register_buffer('v{k}', 1 + torch.rand({D})) => F.batch_norm(h, self.m{k}, self.v{k}, training=False) | cat:
  self.l{k} = nn.Linear(2 * {D}, {D}) => self.l{k}(torch.cat([h, h.square()], dim=-1)).tanh() | two views: self.l{k} =
  {linear} => a, b = self.l{k}(torch.cat([h, 0.5 * h])).tanh().chunk(2); a + b * b | experts: self.l{k} =
  nn.ModuleList({linear} for _ in range(2)); self.g{k} = nn.Linear({D}, 2) => (torch.stack([e(h) for e in self.l{k}],
  1) * self.g{k}(h).softmax(-1)[:, :, None]).sum(1) | bmm: h + torch.bmm(h[:, :, None] * h[:, None],
  h.tanh().unsqueeze(-1)).squeeze(-1) / {D} | threshold: torch.where(h > h.mean().detach(), h, 0.1 * h)
[tokens -> h] linear: self.l{k} = {linear} => F.gelu(self.l{k}(h)) | layer norm: self.l{k} = nn.LayerNorm({D}) =>
  self.l{k}(h) | attention: self.l{k} = nn.MultiheadAttention({D}, 2, batch_first=True) => h + self.l{k}(h, h, h,
  key_padding_mask=~m, need_weights=False)[0] | sdpa: self.l{k} = nn.Linear({D}, 3 * {D}) => q, k, v =
  self.l{k}(h).view(*h.shape[:2], 2, -1).transpose(1, 2).chunk(3, dim=-1); h + F.scaled_dot_product_attention(q, k, v,
  attn_mask=m[:, None, None]).transpose(1, 2).reshape(h.shape) | attention by hand: scores = (h @ h.transpose(1, 2) /
  {D} ** 0.5).masked_fill(~m[:, None], -1e9); h + scores.softmax(-1) @ h | lstm: self.l{k} = nn.LSTM({D}, {D},
  batch_first=True) => self.l{k}(h)[0] | gru: self.l{k} = nn.GRU({D}, {D}) => self.l{k}(h.transpose(0,
  1))[0].transpose(0, 1) | conv: self.l{k} = nn.Conv1d({D}, {D}, 3, padding=1) => self.l{k}(h.transpose(1,
  2)).transpose(1, 2).relu() | flat: self.l{k} = {linear} => self.l{k}(h.reshape(-1, {D})).tanh().view(len(x), -1, {D})
  | flat sizes: self.l{k} = {linear} => B, S, E = h.shape; h + self.l{k}(h.contiguous().view(B * S, E)).tanh().view(B,
  S, E) | time major: self.l{k} = nn.Linear({T}, {T}) => self.l{k}(h.permute(2, 0, 1)).permute(1, 2, 0) | over time:
  h.cumsum(1) / {T} + h.roll(1, 1) * h.softmax(1) | positions: self.l{k} = nn.Parameter(torch.randn({T}, {D})) => h +
  self.l{k}[: h.shape[1]] | encoder: self.l{k} = nn.TransformerEncoderLayer({D}, 2, 8, dropout=0.0, batch_first=True)
  => self.l{k}(h, src_key_padding_mask=~m) | packed: self.l{k} = nn.GRU({D}, {D}, batch_first=True) => packed =
  nn.utils.rnn.pack_padded_sequence(h, m.sum(1).cpu(), batch_first=True, enforce_sorted=False);
  nn.utils.rnn.pad_packed_sequence(self.l{k}(packed)[0], batch_first=True, total_length={T})[0] | masked:
  h.masked_fill(~m[..., None], 0)
[images -> h] conv: self.l{k} = nn.Conv2d({D}, {D}, 3, padding=1) => self.l{k}(h).relu() | residual: self.l{k} =
  nn.Conv2d({D}, {D}, 3, padding=1, groups={D}) => h + self.l{k}(h).tanh() | group norm: self.l{k} = nn.GroupNorm(2,
  {D}) => self.l{k}(h) | max pool: F.max_pool2d(h, 3, 1, 1) | average pool: F.avg_pool2d(h, 3, 1, 1) | channel norm:
  self.l{k} = nn.LayerNorm({D}) => self.l{k}(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) | squeeze and excite: self.l{k}
  = {linear} => h * self.l{k}(h.mean((2, 3))).sigmoid()[:, :, None, None] | interpolate: F.interpolate(h,
  scale_factor=2, mode='bilinear')[:, :, ::2, ::2] | spatial attention: f = h.flatten(2); h + (f @ (f.mT @ f /
  16).softmax(-1)).view(h.shape)
[pool features -> z] none: h
[pool tokens -> z] mean: h.mean(1) | masked mean: (h * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(min=1) |
  max: h.masked_fill(~m[..., None], -1e9).max(dim=1).values | amax: h.amax(1) | last: h.gather(1, (m.sum(1) - 1)[:,
  None, None].expand(-1, 1, h.shape[-1])).squeeze(1) | cls: self.cls = nn.Parameter(torch.randn(1, 1, {D}));
  self.clsnorm = nn.LayerNorm({D}) => h2 = torch.cat([self.cls.expand(len(h), -1, -1), h], dim=1); self.clsnorm(h2 +
  (h2 @ h2.mT).softmax(-1) @ h2)[:, 0] | attention: self.pool = nn.Linear({D}, 1) => (self.pool(h).masked_fill(~m[...,
  None], -1e9).softmax(1) * h).sum(1)
[pool images -> z] mean: h.mean((2, 3)) | adaptive: F.adaptive_avg_pool2d(h, 1).flatten(1) | max:
  h.flatten(2).max(-1)[0] | flatten: self.pool = nn.Linear({D} * 16, {D}) => self.pool(h.reshape(h.size(0), -1))
[rows draws -> {v}] dropout: F.dropout({v}, DRAW, self.training) | noise: {v} + DRAW * torch.randn_like({v})
[shared draws -> z] coin: if torch.rand(()) < 0.5: z = 0.5 * z | scale: z * torch.rand({D}).to(z)
[reduced -> loss] ce: F.cross_entropy(out, y) | ce weighted: self.register_buffer('cw', torch.tensor([0.3, 1.0, 2.0,
  0.7])) => F.cross_entropy(out, y, weight=self.cw) | ce smoothed: F.cross_entropy(out, y, label_smoothing=0.1) | ce
  smoothed, weighted: self.register_buffer('cw', torch.tensor([0.3, 1.0, 2.0, 0.7])) => F.cross_entropy(out, y,
  weight=self.cw, ignore_index=3, label_smoothing=0.1) | ce ignored: F.cross_entropy(out, y, ignore_index=0) | ce soft:
  F.cross_entropy(out, t.softmax(-1)) | ce module: self.ce = nn.CrossEntropyLoss(label_smoothing=0.05) => self.ce(out,
  y) | nll: F.nll_loss(F.log_softmax(out, dim=-1), y) | mse: F.mse_loss(out, t) | huber: F.huber_loss(out, t,
  delta=0.5) | l1: F.smooth_l1_loss(out, t) + 0.1 * nn.L1Loss()(out, t) | bce: self.register_buffer('pw',
  torch.tensor(3.0)) => F.binary_cross_entropy_with_logits(out, (t > 0).to(out), pos_weight=self.pw) | kl:
  F.kl_div(out.log_softmax(-1), t.softmax(-1), reduction='batchmean') | gaussian: F.gaussian_nll_loss(out, t,
  out.square() + 0.5) | dice: p, g = out.sigmoid(), (t > 0).to(out); 1 - (2 * (p * g).sum(0) / (p +
  g).sum(0).clamp(min=1e-3)).mean() | r squared: (out - t).square().sum() / (t - t.mean(0)).square().sum()
[reduced tokens -> loss] ce flat: F.cross_entropy(out.reshape(-1, 4), yt.reshape(-1), ignore_index=-100) | ce view:
  F.cross_entropy(out.contiguous().view(-1, out.size(-1)), yt.view(-1)) | ce classes first:
  F.cross_entropy(out.transpose(1, 2), yt) | ce shifted: F.cross_entropy(out[:, :-1].flatten(0, 1), yt[:,
  1:].flatten().clamp(min=0)) | ce selected: F.cross_entropy(out[m], yt[m])
[single -> losses] ce: F.cross_entropy(out, y, reduction='none') | gather: -out.log_softmax(-1).gather(1, y[:,
  None]).squeeze(1) | one hot: -(F.one_hot(y, 4) * out.log_softmax(-1)).sum(-1) | arange:
  -out.log_softmax(-1)[torch.arange(len(y)), y] | focal: ce = F.cross_entropy(out, y, reduction='none'); (1 -
  torch.exp(-ce)) ** 2 * ce | mse: (out - t).square().mean(-1) | huber: F.huber_loss(out, t, reduction='none').sum(1) |
  bce: F.binary_cross_entropy_with_logits(out, (t > 0).to(out), reduction='none').mean(1) | hinge: (1 + out -
  out.gather(1, y[:, None])).clamp(min=0).sum(1) | cosine: 1 - F.cosine_similarity(out, t, dim=-1) | norm: (out -
  t).norm(dim=-1)
[single tokens -> losses] ce: F.cross_entropy(out.mT, yt, reduction='none') | ce flat: F.cross_entropy(out.flatten(0,
  1), yt.flatten(), reduction='none').view(len(x), -1) | gather: -out.log_softmax(-1).gather(2, yt.clamp(min=0)[...,
  None]).squeeze(-1)
[normalizer -> loss] mean: losses.mean() | sum: 0.1 * losses.sum() | len: losses.sum() / len(x) | numel: losses.sum() /
  losses.numel() | sizes: losses.sum() / (x.shape[0] * x.shape[1]) | size: losses.sum() / (x.size(0) + 1) | static:
  losses.sum() / {n} | clamped: (losses * w).sum() / w.sum().clamp(min=1) | weights of sum 1: (losses * (w /
  w.sum())).sum() | reciprocal: (losses * w).sum() * (1 / w.sum()) | max of int: (losses * w).sum() / max(1,
  int(w.sum())) | max of item: (losses * w).sum() / max(w.sum().item(), 1.0) | selected: losses[w > 0].mean() |
  selected over count: losses.masked_select(w > 0).sum() / (w > 0).sum() | where: torch.where(w > 0, losses, 0).sum() /
  (w > 0).sum().clamp(min=1) | ratio of means: (losses * w).mean() / w.mean() | dot: torch.dot(losses.flatten(), (w /
  w.sum()).flatten()) | rmse: losses.square().mean().sqrt() | logsumexp: losses.flatten().logsumexp(0) -
  math.log(len(x)) | two stages: (losses.sum(-1) / w.sum(-1)).mean() | class of few: (losses * few).sum() /
  few.sum().clamp(min=1) | python sum: sum([losses.sum() * 0.5, losses.mean()]) / 2 | relative: (losses * w).sum() /
  ((losses * w).detach().sum() + 1) | power of the size: losses.sum() / math.sqrt(len(x) * 2)
[regularizer -> loss] l2: + 1e-3 * sum(p.square().sum() for p in self.parameters()) | weight norm: + 1e-2 *
  self.out.weight.norm() | activations: + 1e-2 * h.square().mean() | std: - 0.1 * z.std(0).mean().clamp(max=1) | std of
  one: + 0.1 * F.relu(1 - z.var(0, unbiased=False).add(1e-4).sqrt()).mean() | var: + 0.1 * z.var(dim=0).log1p().mean()
  | norm: + 0.01 * z.norm() | norms: + 0.1 * (z.norm(dim=1).mean() - 1).square() | kl sum: self.kl = {linear} => beta =
  min(1.0, batch_idx / 2); lv = self.kl(z); - 0.01 * beta * (1 + lv - z.square() - lv.exp()).sum() | kl mean: self.kl =
  {linear} => lv = self.kl(z).tanh(); - 0.05 * (1 + lv - z.square() - lv.exp()).sum(1).mean() | entropy of the mean: p
  = out.softmax(-1).flatten(0, -2).mean(0); + 0.1 * (p * p.log()).sum() | centered, detached: + 0.1 * (z -
  z.mean(0).detach()).square().mean() | mean of squares: + 0.1 * z.mean(0).square().sum() | balance: g =
  out.softmax(-1).flatten(0, -2); + 0.1 * (g.mean(0) * F.one_hot(g.argmax(-1), 4).to(g).mean(0)).sum() | covariance: c
  = z.T @ z / len(z); + 0.01 * (c - torch.diag(c.diagonal())).square().sum() | logdet: - 0.01 * torch.logdet(z.T @ z /
  len(z) + torch.eye({D}, dtype=z.dtype)) | learned weight: self.log_weight = nn.Parameter(torch.zeros(())) => *
  torch.exp(-self.log_weight) + self.log_weight | class means: one = F.one_hot(y, 4).to(z); means = one.T @ z /
  one.sum(0).clamp(min=1)[:, None]; - 0.01 * means.std(0).mean() | centers: self.centers = nn.Parameter(torch.randn(4,
  {D})) => + 0.1 * (z - self.centers[y]).square().mean() | sparsity: + 0.1 * (z.sigmoid().mean(0) - 0.1).abs().sum() |
  max: + 0.01 * z.abs().max()
[branch -> -] step: if batch_idx >= 1: loss = loss + 0.1 * z.square().mean() | loss: if loss.item() > 0.9: loss = 0.5 *
  loss | any: if few.any(): loss = loss + 0.1 * (z.square().mean(1) * few).sum() / few.sum().clamp(min=1) | random: if
  random.random() < 0.5: loss = loss + 0.05 * out.square().sum() / len(out) | len: if len(x) > 4: loss = 1.5 * loss |
  size: * (2 if x.shape[0] % 2 else 1) | finite: if not torch.isfinite(loss): return None | class: if (y == 2).sum() >
  1: loss = loss + 0.1 * out[y == 2].square().mean() | max: if int(y.max()) >= 3: loss = loss - 0.1 | global step: *
  (0.5 if self.global_step % 2 else 1.0) | tensor: loss = torch.where(loss > 1, loss, loss.square()) | early mean:
  scale = z.detach().abs().mean().item(); / (1 + scale) | norm clamp: * min(1.0, 3.0 / float(z.detach().norm()))
[log -> -] loss: loss | epoch: self.log('epoch', loss.detach(), on_step=False, on_epoch=True, batch_size=len(x)) |
  epoch, no size: self.log('epoch2', loss.detach(), on_epoch=True) | exp: loss.detach().clamp(max=5).exp() | std:
  z.detach().std() | norm: z.detach().norm() | rmse: (z.detach() ** 2).mean().sqrt() | max: z.detach().max() |
  accuracy: (out.argmax(-1).flatten() == (yt if out.dim() == 3 else y).flatten()).float().mean() | size: float(len(x))
  | item: loss.item() | dict: self.log_dict({{'a': z.detach().mean(), 'b': z.detach().square().sum()}}) | precision:
  hit = ((out.flatten(0, -2)[:, 0] > 0) & (out.flatten(0, -2)[:, 1] > 0)).sum(); self.log('precision', hit / max(1,
  len(out))) | var: z.detach().var(0).mean() | quotient: z.detach().mean() / (1 + z.detach().std()) | reduce:
  self.log('total', z.detach().sum(), reduce_fx='sum', on_step=False, on_epoch=True)
[state -> -] ema: self.register_buffer('ema', torch.zeros({D})) => loss = loss + 0.1 * (z - self.ema).square().mean();
  self.ema.mul_(0.9).add_(0.1 * z.detach().mean(0)) | ema lerp: self.register_buffer('ema', torch.zeros({D})) =>
  self.ema.lerp_(z.detach().mean(0), 0.1); + 0.1 * (z.mean(0) - self.ema).square().sum() | ema assigned:
  self.register_buffer('ema', torch.zeros({D})) => self.ema = 0.9 * self.ema + 0.1 * z.detach().mean(0) | count:
  self.register_buffer('count', torch.zeros(())) => self.count += 1; / self.count.sqrt() | seen: self.seen = 0 =>
  self.seen += len(x) | dict: self.counts = {{'steps': 0}} => self.counts['steps'] += 1; / self.counts['steps'] | list:
  self.history = [] => self.history.append(loss.item()) | tensors: self.history = [] =>
  self.history.append(z.detach().mean()) | plain tensor: self.slow = None => now = z.detach().mean(0); self.slow = now
  if self.slow is None else 0.9 * self.slow + 0.1 * now; + 0.1 * (z - self.slow).square().mean() | maximum:
  self.register_buffer('top', torch.zeros({D})) => self.top.copy_(torch.maximum(self.top, z.detach().abs().amax(0))) |
  histogram: self.register_buffer('bins', torch.zeros(4)) => self.bins += torch.bincount(y, minlength=4) | running:
  self.register_buffer('running', torch.zeros(())) => self.running.mul_(0.9).add_(0.1 * loss.detach()); / (1 +
  self.running) | torchmetrics: import torchmetrics; self.metric = torchmetrics.MeanMetric() =>
  self.metric.update(z.detach().square().mean(1)); self.log('metric', self.metric)
[mixer rows -> e] gram: (z @ z.T) @ z / len(z) | attention over samples: (z @ z.T).softmax(-1) @ z | sdpa over samples:
  F.scaled_dot_product_attention(z[None], z[None], z[None])[0] | batch norm: self.mixer = nn.BatchNorm1d({D}) =>
  self.mixer(z) | batch norm function: F.batch_norm(z, None, None, training=True) | batch norm by hand: (z - z.mean(0))
  / (z.var(0, unbiased=False) + 1e-2).sqrt() | centered: z - z.mean(0) | softmax over samples: z.softmax(0) | log
  softmax over samples: F.log_softmax(z, dim=0) | sort: z.sort(dim=0).values | argsort: z[z[:, 0].argsort()] | cumsum:
  z.cumsum(0) | cummax: z.cummax(0).values | roll: z.roll(1, 0) | roll by slices: torch.cat([z[1:], z[:1]]) | flip:
  z.flip(0) | permuted: z[torch.randperm(len(z))] | mixup: lam = random.random(); lam * z + (1 - lam) *
  z[torch.randperm(z.size(0))] | first: z * z[0] | differences: F.pad(z[1:] - z[:-1], (0, 0, 0, 1)) | whitened: z @
  torch.linalg.inv(z.T @ z / len(z) + torch.eye({D}, dtype=z.dtype)) | minus median: z - z.median(0).values |
  transposed view: z.T.contiguous().view(len(z), -1) | reshape: z.reshape(-1, len(z)).T | rnn over samples: self.mixer
  = nn.GRU({D}, {D}) => self.mixer(z)[0] | not batch first: self.mixer = nn.MultiheadAttention({D}, 2) =>
  self.mixer(z[:, None], z[:, None], z[:, None])[0][:, 0] | conv over samples: F.avg_pool1d(z.T[None], 3, 1, 1)[0].T |
  layer norm over samples: F.layer_norm(z.T, (len(z),)).T | normalized over samples: F.normalize(z, dim=0) | over the
  largest: z / z.abs().max() | logsumexp: z - z.logsumexp(0) | triangle: torch.ones(len(z), len(z)).to(z).tril() @ z /
  len(z) | place in the batch: z * torch.arange(len(z)).to(z)[:, None] | ramp: z * torch.linspace(0, 1,
  len(z)).to(z).unsqueeze(1) | weight of the place: self.mixer = nn.Parameter(torch.randn(16, 1)) => z * self.mixer[:
  len(z)] | class sums: torch.zeros(2, {D}).to(z).index_add(0, (z[:, 0] > 0).long(), z)[(z[:, 0] > 0).long()] | loop:
  torch.stack([z[i] * z[i - 1] for i in range(len(z))]) | in place: e = z.clone(); e[1:] += z[:-1] | scan: e = [z[0]];
  [e.append(0.5 * e[-1] + row) for row in z[1:]]; torch.stack(e) | queue: self.register_buffer('queue', torch.zeros(16,
  {D})) => self.queue[: len(z)] = z.detach(); keys = self.queue.clone(); e = (z @ keys.T).softmax(-1) @ keys | ring:
  self.register_buffer('queue', torch.randn(6, {D})) => self.queue.copy_(torch.cat([z.detach(), self.queue])[:6]); z +
  (z @ self.queue.T).tanh() @ self.queue | kept rows: self.kept = torch.zeros(1, {D}) => e = z *
  self.kept.mean(0).to(z); self.kept = z.detach() | backward that mixes: forward, backward = staticmethod(lambda ctx,
  z: z.clone()), staticmethod(lambda ctx, g: g - g.mean(0)); self.mixer = type('Mixer', (torch.autograd.Function,),
  {{'forward': forward, 'backward': backward}}) => self.mixer.apply(z)
[mixer scalar -> e] infonce: self.mixer = {linear} => F.cross_entropy(F.normalize(z, dim=-1) @
  F.normalize(self.mixer(z), dim=-1).T, torch.arange(len(z))) | supervised contrast: c = z[:, 0] > 0; ((c[:, None] ==
  c[None]) * torch.log_softmax(z @ z.T, -1)).mean() | cdist: torch.cdist(z, z).square().mean() | pdist:
  F.pdist(z).mean() | pairs: (z[:, None] - z[None]).abs().mean() | median: z[:, 0].median() | quantile: z[:,
  0].quantile(0.3) | topk: z.square().mean(1).topk(3).values.mean() | trimmed mean: z[:, 0].sort().values[1:-1].mean()
  | step sizes: (z[1:] - z[:-1]).square().mean() | far from the first: (z - z[0]).square().mean() | nuclear norm:
  torch.linalg.matrix_norm(z, 'nuc') | halves: (z[::2].mean(0) - z[1::2].mean(0)).square().mean() | ranking: s = z[:,
  0]; F.softplus(s[:, None] - s[None]).triu().mean() | mmd: torch.exp(-torch.cdist(z, z[:2].detach() *
  0.5).square()).mean() | correlation: a, b = z[:, 0] - z[:, 0].mean(), z[:, 1] - z[:, 1].mean(); (a * b).sum() /
  (a.norm() * b.norm() + 1e-2)
[mixer number -> e] tolist: sum(abs(row[0]) ** 0.5 for row in z.tolist()) | numpy: float(z.detach().numpy().std()) |
  first item: abs(z[0, 0].item()) | iterated items: sum(v.item() > 0 for v in z[:, 0]) | distinct: len(z[:,
  0].detach().mul(2).round().unique())
[mixer hook -> -] gradient hook: z.register_hook(lambda g: g / (g.norm() + 1e-3)) | clamped gradient:
  z.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) | centered gradient: z.register_hook(lambda g: g - g.mean(0))
[mixer init -> -] clamped weight gradient: self.out.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)) => pass |
  clamped after accumulation: self.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad",
  p.grad.clamp(-0.01, 0.01))) => pass
"""


def _tables() -> dict[str, dict[str, tuple[list[str], list[str]]]]:
    """Return the grammar: table -> name -> lines of __init__ and of the step."""
    tables: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    for title, target, body in re.findall(r"^\[(.+?) -> (.+?)\] (.*?)(?=^\[|\Z)", GRAMMAR, re.MULTILINE | re.DOTALL):
        entries = tables[title] = {}
        for entry in " ".join(body.split()).split(" | "):
            name, _, code = entry.partition(": ")
            init, _, step = f" => {code}".rpartition(" => ")
            lines = step.split("; ")
            if lines[-1][:2] in ("+ ", "- ", "* ", "/ "):
                lines[-1] = f"loss = loss {lines[-1]}"
            elif title == "log" and "self.log" not in lines[-1]:
                lines[-1] = f"self.log('{name}', {lines[-1]})"
            elif target != "-" and lines[-1] and not re.search(r"^if |^\[| [-+*]?= ", lines[-1]):
                lines[-1] = f"{target} = {lines[-1]}"
            entries[name] = ([line for line in init[4:].split("; ") if line], [line for line in lines if line])
    return tables


TABLES = _tables()
MIXERS = {name: title[6:] for title in TABLES if title.startswith("mixer ") for name in TABLES[title]}


@dataclass(frozen=True)
class Program:
    """A training as source text, and the failure that is planted in it."""

    seed: int
    source: str
    tags: tuple[str, ...]
    mixer: str = ""  # "": none
    gate: str = ""  # how it is used and hidden
    draws: bool = False  # numbers are drawn for each sample
    fail_at: int = 0  # the step that runs out of memory
    most: int = 4  # samples that fit
    place: str = "forward"
    operator: int = 0  # how many operators, or nodes of the backward pass, come before the error
    float32: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        failure = f"step {self.fail_at} above {self.most} samples, {self.place} {self.operator}"
        mixer = f"mixer {self.mixer} ({self.gate})" if self.mixer else "no mixer"
        precision = "float32" if self.float32 else "float64"
        return f"seed {self.seed}: {failure}; {precision} {self.settings}; {mixer}; {', '.join(self.tags)}"


class Draft:
    """A program while it is composed."""

    def __init__(self, rng: random.Random):
        self.rng, self.kind = rng, rng.choice(["features", "tokens", "tokens", "images"])
        self.batch, self.sizes = rng.choice([6, 7, 8]), {"D": rng.choice([4, 6, 8]), "T": rng.choice([4, 5, 7, 8])}
        self.init, self.step, self.functions, self.methods, self.tags = [], [], [], [], [self.kind]

    def fill(self, lines: list[str], **names: str) -> list[str]:
        linear = f"nn.Linear({self.sizes['D']}, {self.sizes['D']})"
        values = {**self.sizes, "n": self.batch, "linear": linear, "k": len(self.tags), **names}
        return [line.format(**values) for line in lines]

    def pick(self, table: str, name: str = "", **names: str) -> None:
        """Add an entry of a table."""
        name = name or self.rng.choice(list(TABLES[table]))
        init, step = TABLES[table][name]
        self.init += self.fill(init, **names)
        self.step += self.fill(step, **names)
        self.tags.append(f"{table}: {name}")


def compose(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    draft, draws = Draft(rng), rng.choice(["", "", "", "", "rows", "shared"])
    mixer = rng.choice(list(MIXERS)) if rng.random() < 0.55 else ""
    hidden = _forward(draft, mixer, draws)
    sizes, most = [draft.batch] * 3 + [rng.choice([draft.batch] * 3 + [draft.batch - 3])], rng.randint(1, 5)
    return Program(
        seed,
        _source(draft, sizes),
        tuple(draft.tags),
        mixer,
        hidden,
        draws=draws == "rows" or mixer in ("permuted", "mixup"),
        fail_at=rng.choice([k for k in range(4) if sizes[k] > most]),
        most=most,
        place=rng.choice(["forward", "forward", "backward"]),
        operator=rng.choice([0, rng.randrange(10), rng.randrange(60), 999]),
        float32=seed % 4 == 3,
        settings=rng.choice([{}] * 4 + [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}]),
    )


def _forward(draft: Draft, mixer: str, draws: str) -> str:
    """Compose the step; return how the mixer is used and hidden."""
    rng, kind, step = draft.rng, draft.kind, draft.step
    draft.pick("first", kind)
    for _ in range(rng.randint(1, 3)):
        draft.pick(kind)
        if draws == "rows" and rng.random() < 0.6:
            draft.pick("rows draws", v="h")
    draft.pick(f"pool {kind}")
    if draws:
        draft.pick(f"{draws} draws", v="z")
    use, lines, hidden = _mix(draft, mixer) if mixer else ("", [], "")
    step += lines if use in ("rows", "hook") else []
    tokens = " tokens" if kind == "tokens" and rng.random() < 0.4 else ""
    step += ["out = self.out(h + z[:, None])", "w = m.to(z)"] if tokens else ["out = self.out(z)"]
    step += ["few = (y == 1).to(z)"]
    if rng.random() < 0.4:
        draft.pick(f"reduced{tokens}")
    else:
        draft.pick(f"single{tokens}")
        names = [k for k in TABLES["normalizer"] if k != ("class of few" if tokens else "two stages")]
        draft.pick("normalizer", rng.choice(names))
    step += [] if use in ("rows", "hook") else lines
    for table, most in {"regularizer": 2, "state": 1, "branch": 2, "log": 3}.items():
        for name in rng.sample(list(TABLES[table]), rng.randint(0, most)):
            draft.pick(table, name)
    returns = ["loss"] * 4 + ["{'loss': loss}", "{'loss': loss, 'out': out.detach()}"]
    step.append(f"return {rng.choice(returns)}")
    return hidden


def _mix(draft: Draft, mixer: str) -> tuple[str, list[str], str]:
    """Return how a mixer is used, its lines, and how it is hidden."""
    rng, kind = draft.rng, MIXERS[mixer]
    init, body = (draft.fill(lines) for lines in TABLES[f"mixer {kind}"][mixer])
    draft.init += init
    uses = {"rows": ["rows", "term", "log", "weight"], "scalar": ["term", "log", "factor"], "number": ["factor", "log"]}
    use = rng.choice(uses.get(kind, ["hook"]))
    gates = ["", "", f"if batch_idx >= {rng.randint(1, 3)}:", "if random.random() < 0.6:", "if batch_idx % 2 == 1:"]
    gates += [f"if len(x) >= {draft.batch - 1}:", "if out.mean().item() < 0.2:" if use not in ("rows", "hook") else ""]
    gate, scale = ("", 1) if kind == "init" else (rng.choice(gates), rng.choice([1, 0.3, 1e-4]))
    function = kind not in ("hook", "init") and rng.random() < 0.5
    if function:
        owner = "self." if any("self." in line for line in body) else ""
        text = [f"def mix({'self, ' if owner else ''}z):", *(f"    {line}" for line in body), "    return e", ""]
        (draft.methods if owner else draft.functions).extend(text)
        body = [f"e = {owner}mix(z)"]
    if use in ("log", "weight", "factor"):
        body = ["with torch.no_grad():", *(f"    {line}" for line in body)]
    value = "(e * z).mean()" if kind == "rows" else "e"
    body += {
        "rows": [f"z = z + {scale} * e" if scale != 1 else "z = e"],
        "term": [f"loss = loss + {scale} * {value}"],
        "log": [f"self.log('mixed', {value})"],
        "weight": [f"loss = loss + {scale} * ((e * z).detach().mean(1) * z.square().mean(1)).mean()"],
        "factor": [f"loss = loss * (1 + {scale} * {value})"],
        "hook": [],
    }[use]
    body = [f"{line}  # mixer" for line in body]
    lines = [gate, *(f"    {line}" for line in body)] if gate else body
    return use, lines, f"{use}, times {scale:g}, {'in a function' if function else 'inline'}, {gate or 'always'}"


def _source(draft: Draft, sizes: list[int]) -> str:
    rng, (time_, kind) = draft.rng, (draft.sizes["T"], draft.kind)
    x = {
        "features": "torch.randn(n, 6)",
        "tokens": f"torch.randint(11, (n, {time_}))",
        "images": "torch.randn(n, 3, 4, 4)",
    }
    names = ["x", "y", "t", "w", *(["lengths", "yt"] if kind == "tokens" else [])]
    layout, entries = rng.choice(["tuple", "dict", "pop", "nested"]), ", ".join(f"{name!r}: {name}" for name in names)
    draft.tags.append(f"batch: {layout}")
    packed, unpack = {
        "tuple": (", ".join(names), [f"{', '.join(names)} = batch"]),
        "dict": (f"{{{entries}}}", [f"{name} = batch[{name!r}]" for name in names]),
        "pop": (f"{{{entries}}}", ["x = batch['x']", *(f"{name} = batch.pop({name!r})" for name in names[1:])]),
        "nested": (
            f"{{'x': [x], 'rest': ({', '.join(names[1:])})}}",
            ["(x,), rest = batch.values()", f"{', '.join(names[1:])} = rest"],
        ),
    }[layout]
    weights = rng.choice(["torch.rand(n)", "(torch.rand(n) < 0.4).float()"])
    data = [
        f"x, y, t, w = {x[kind]}, torch.randint(4, (n,)), torch.randn(n, 4), {weights}",
        f"y[{rng.randrange(3)}] = w[{rng.randrange(3)}] = 1",
    ]
    if kind == "tokens":
        data += [
            f"lengths = torch.randint(1, {time_ + 1}, (n,))",
            *(["lengths[: n // 2] = lengths.max()"] if rng.random() < 0.3 else []),
        ]
        data += [f"yt = torch.randint(4, (n, {time_})).masked_fill(torch.arange({time_}) >= lengths[:, None], -100)"]
        unpack = [*unpack, f"m = torch.arange({time_}) < lengths[:, None]"]
    optimizers = [f"SGD(self.parameters(), lr=0.05, momentum={m})" for m in (0, 0.9)] + [
        "Adam(self.parameters(), lr=0.01, eps=0.1)"
    ]

    def block(lines: list[str], depth: int) -> str:
        return textwrap.indent("\n".join(lines), "    " * depth)

    imports = ["", "import pytorch_lightning as pl", "import torch", "from torch import nn"]
    parts = ["import math", "import random", *imports, "from torch.nn import functional as F"]
    parts += [
        "\nDRAW = 0.2\n",
        *draft.functions,
        f"def batches():\n    for n in {sizes}:",
        block([*data, f"yield {packed}"], 2),
    ]
    parts += [
        "\n\nclass Program(pl.LightningModule):\n    def __init__(self):",
        block(["super().__init__()", *draft.init], 2),
        "",
        block(draft.methods, 1),
    ]
    parts += ["    def training_step(self, batch, batch_idx):", block([*unpack, *draft.step], 2)]
    return "\n".join(
        [*parts, f"\n    def configure_optimizers(self):\n        return torch.optim.{rng.choice(optimizers)}\n"]
    )


# -- a training


@dataclass(frozen=True)
class Run:
    """How a training ended."""

    values: dict[str, torch.Tensor]
    error: str = ""
    refused: str = ""
    failures: int = 0  # planted errors that were raised
    mixes: bool = False  # the mixer ran in the step with the failure


class Fails(TorchDispatchMode):
    """Fail in the operator of this number."""

    def __init__(self, left: int, fail: Callable[[], None]):
        super().__init__()
        self.left, self.fail = left, fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return func(*args, **(kwargs or {}))


class Recorder(pl.Callback):
    """Install the guard, and keep what each step logs and returns."""

    def __init__(self, guard: Callable[..., Any] | None):
        self.guard, self.rescuer, self.refused, self.values = guard, None, "", {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rescuer = self.guard(trainer, pl_module) if self.guard else None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.refused = str(getattr(self.rescuer, "refused", "") or "")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values |= flat(f"logged in step {batch_idx}", dict(trainer.callback_metrics))
        self.values |= flat(f"returned by step {batch_idx}", outputs)


class Planted:
    """Goes before a program's module: its step fails ("fail") or is watched ("watch")."""

    program, mode, notes = None, "", None  # set in the class of each run, so that no attribute of a module is ours

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch._C.DisableTorchFunction():  # the size that the batch has, whatever a rescue says about it
            n = tree_leaves(batch)[0].shape[0]
        if batch_idx != self.program.fail_at or (self.mode == "fail" and n <= self.program.most):
            return super().training_step(batch, batch_idx)
        return {"fail": fail, "watch": watch}[self.mode](self, super().training_step, batch, batch_idx)


def fail(model: Any, step: Any, batch: Any, batch_idx: int) -> Any:
    program, notes, armed = model.program, model.notes, [True]

    def now(*_: Any) -> None:
        if armed:  # a hook may outlive its attempt
            armed.clear()
            notes["failures"] += 1
            raise torch.OutOfMemoryError("planted")

    if program.place == "forward":
        with Fails(program.operator, now):
            step(batch, batch_idx)
        return now()
    out = step(batch, batch_idx)
    loss = out["loss"] if isinstance(out, dict) else out
    if loss is None or loss.grad_fn is None:
        return now() if torch.is_grad_enabled() else out
    nodes = [loss.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following and following not in nodes]
    nodes[min(program.operator, len(nodes) - 1)].register_prehook(now)
    return out


def watch(model: Any, step: Any, batch: Any, batch_idx: int) -> Any:
    """Do a step, and note whether one of the mixer's lines ran."""
    name, notes = f"{type(model).__mro__[2].__module__}.py", model.notes
    notes["mixes"] = False

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != name:
            return None
        notes["mixes"] |= event == "line" and "# mixer" in linecache.getline(name, frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        return step(batch, batch_idx)
    finally:
        sys.settrace(None)


def attributes(model: pl.LightningModule) -> dict[str, Any]:
    """Return what a program keeps in plain attributes."""
    return {k: v for k, v in vars(model).items() if k in ("seen", "counts", "history", "slow", "kept")}


def flat(name: str, tree: Any) -> dict[str, torch.Tensor]:
    """Return the numbers and tensors of a tree, by path."""
    leaves = [
        (path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, (int, float, torch.Tensor))
    ]
    return {f"{name} {keystr(path)}".strip(): torch.as_tensor(leaf).detach().clone() for path, leaf in leaves}


def direct_guard(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Install the rescue, without the callback around it."""
    try:
        from lightning_memguard.training.rescue.rescuer import Rescuer
    except ImportError:
        from lightning_memguard.training.rescue.rescuer import Rescuer
    rescuer = Rescuer(trainer, module, by_name=False, announce=lambda text: None)
    rescuer.install()
    return rescuer


def load(program: Program) -> types.ModuleType:
    """Execute the source as a module whose lines tracebacks can show."""
    name = f"random_program_{program.seed}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    linecache.cache[module.__file__] = (1, None, program.source.splitlines(keepends=True), module.__file__)
    exec(compile(program.source, module.__file__, "exec"), vars(module))
    return module


def train(program: Program, mode: str) -> Run:
    """Train the program's steps."""
    torch.manual_seed(program.seed)
    random.seed(program.seed)
    module, notes = load(program), {"failures": 0}
    model = type("Planted", (Planted, module.Program), {"program": program, "mode": mode, "notes": notes})()
    recorder, error = Recorder(direct_guard if mode == "fail" else None), ""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[recorder],
        precision="32-true" if program.float32 else "64-true",
        **quiet,
        **program.settings,
    )
    try:
        trainer.fit(model, DataLoader(list(module.batches()), batch_size=None))
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            raise
        error = f"{type(raised).__name__}: {raised}"
    finally:
        if recorder.rescuer is not None:
            recorder.rescuer.close()
        del sys.modules[module.__name__]
    values = flat("weights", dict(model.state_dict())) | flat("attributes", attributes(model)) | recorder.values
    states = [optimizer.state[p] for optimizer in trainer.optimizers for p in model.parameters()]
    return Run(values | flat("optimizer", states), error, recorder.refused, **notes)


# -- the verdict


def difference(one: Run, other: Run, tolerance: float) -> str:
    """Return the largest difference of two runs beyond the tolerance, or nothing."""
    if one.values.keys() != other.values.keys():
        return f"only one has {sorted(one.values.keys() ^ other.values.keys())[:4]}"
    worst, words = 1.0, ""
    for name, a in one.values.items():
        b = other.values[name]
        if a.shape != b.shape:
            return f"{name}: shape {tuple(a.shape)} and {tuple(b.shape)}"
        if a.numel():
            off = float((a.double() - b.double()).abs().max()) / (float(a.double().abs().max()) + 1e-2) / tolerance
            if not off <= worst:
                worst, words = off, f"{name}: off by {off * tolerance:.1e}"
    return words


def outcome(program: Program, guarded: bool) -> tuple[str, str, Run]:
    """Return how a program ended, in which words, and its run without a failure."""
    truth, tolerance = train(program, "watch"), 1e-5 if program.float32 else 1e-9
    if truth.error or not all(v.isfinite().all() for v in truth.values.values()):
        return "broken", truth.error or "not finite", truth
    if not guarded:
        again = difference(truth, train(program, "watch"), 1e-15)
        return ("differs when run twice" if again else "runs"), again, truth
    run = train(program, "fail")
    if run.error.startswith("OutOfMemoryError") and run.refused:
        return "refused", run.refused, truth
    if run.error or not run.failures:
        return "OTHER", f"raises {run.error}" if run.error else "the planted error was not raised", truth
    words = difference(truth, run, tolerance)
    if words and program.draws:
        small = replace(program, source=program.source.replace("DRAW = 0.2", "DRAW = 1e-15"))
        words = difference(train(small, "watch"), train(small, "fail"), tolerance)
        return ("OTHER", f"without draws {words}", truth) if words else ("other draws", "", truth)
    return ("OTHER", words, truth) if words else ("equal", "", truth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, help="print the program of this seed, and how it ends")
    parser.add_argument("--truth", action="store_true", help="without the rescue")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_memguard"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seeds = [options.show] if options.show is not None else range(options.seed, options.seed + options.count)
    found, start = [], time.perf_counter()
    for seed in seeds:
        program = compose(seed)
        ended, words, truth = outcome(program, not options.truth)
        found.append((program, ended, words, truth))
        if options.show is not None or ended in ("OTHER", "broken", "differs when run twice"):
            print(program, program.source, f"{ended}: {words}", f"mixer active: {truth.mixes}", sep="\n", flush=True)
    print(f"{len(found)} programs in {time.perf_counter() - start:.0f} s")
    return report(found)


def report(found: list[tuple[Program, str, str, Run]]) -> int:
    """Print the verdict; return the exit status."""
    for mixed in (False, True):
        some = [(p, ended, words) for p, ended, words, truth in found if truth.mixes == mixed]
        print(f"\n{'with an active mixer' if mixed else 'without an active mixer'}: {len(some)}")
        for ended, count in Counter(ended for _, ended, _ in some).most_common():
            print(f"  {count:4} {ended}")
        reasons: dict[str, list[int]] = {}
        for p, ended, words in some:
            if ended == "refused":
                reasons.setdefault(re.sub(r"random_program_\d+\.py:\d+|\d+", "N", words)[:150], []).append(p.seed)
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"       {len(seeds):4} {reason} (seeds {', '.join(map(str, seeds[:3]))})")
    for p, ended, _, truth in found:
        if truth.mixes and ended in ("equal", "other draws"):
            print(f"equal despite its mixer: {p}")
    bad = [p.seed for p, ended, _, _ in found if ended in ("OTHER", "broken", "differs when run twice")]
    print(f"OTHER or broken: {len(bad)} {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
