"""The arithmetic of a dense Llama, Qwen2 or Qwen3: token ids to logits, attention left to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rollout.engines.torch_engine.dense_weights import DenseWeights, LayerWeights, allocate, dense_shape
from rollout.engines.torch_engine.rope import rotations
from rollout.engines.torch_engine.workspace import Workspace, as_complex

# Takes a layer's index and the workspace with that layer's heads; leaves the result in ``workspace.context``.
Attention = Callable[[int, Workspace], None]


class DenseModel:
    """Weights, rotary table and forward pass. ``min_rows``: matrix products get at least that many rows."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, min_rows: int) -> None:
        self.shape = dense_shape(config)
        self.dtype, self.device, self.min_rows = dtype, device, min_rows
        self._config = config
        self._rotations = rotations(config, self.shape.head_dim, 0).to(device)
        self._eps = torch.tensor(self.shape.eps, dtype=dtype, device=device)
        self._weights: DenseWeights | None = None

    @property
    def weights(self) -> DenseWeights:
        assert self._weights is not None, "weights were released"
        return self._weights

    def allocate(self) -> None:
        self._weights = allocate(self.shape, self.dtype, self.device)

    def release(self) -> None:
        self._weights = None

    def reach(self, positions: int) -> None:
        """Make the rotary table serve that many positions at least, the config's maximum being far more than is used.

        Called before a forward pass, which does not look at the positions it is given.
        """
        if positions > len(self._rotations):
            self._rotations = rotations(self._config, self.shape.head_dim, positions).to(self.device)

    def workspace(self, count: int) -> Workspace:
        return Workspace(self.shape, count, max(count, self.min_rows), self.dtype, self.device)

    def forward(
        self,
        work: Workspace,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [wanted, vocab] after the tokens at ``wanted`` (int64 indices; None: after all of them).

        ``tokens`` and ``positions`` are int64 [work.count].
        """
        weights = self.weights
        last = len(weights.layers) - 1
        turn = self._rotations.index_select(0, positions)[:, None, None]
        states = self._pad(weights.embed.index_select(0, tokens))
        normed, gate_up = work.normed, work.gate_up
        gate, up, context = work.gate, work.up, work.context
        for index, layer in enumerate(weights.layers):
            self._project(layer, states, work, turn)
            attention(index, work)
            if wanted is not None and index == last:  # nobody attends to what comes after
                context, states = (self._pad(rows.index_select(0, wanted)) for rows in (context, states))
                normed, gate_up = normed[: len(states)], gate_up[: len(states)]
                gate, up = gate[: len(states)], up[: len(states)]
            states.addmm_(context, layer.out_t)
            if layer.out_bias is not None:
                states.add_(layer.out_bias)
            torch.mm(self._norm(states, layer.post_norm, normed), layer.gate_up_t, out=gate_up)
            states.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down_t)
        logits = F.linear(self._norm(states, weights.norm, normed), weights.head)
        return logits[: work.count if wanted is None else len(wanted)]

    def _project(self, layer: LayerWeights, states: torch.Tensor, work: Workspace, turn: torch.Tensor) -> None:
        """Fill ``work.heads``: queries and keys normed (Qwen3) and turned, values as they are."""
        normed = self._norm(states, layer.input_norm, work.normed)
        if layer.qkv_bias is None:
            torch.mm(normed, layer.qkv_t, out=work.qkv)
        else:
            torch.addmm(layer.qkv_bias, normed, layer.qkv_t, out=work.qkv)
        rotary = work.rotary
        if layer.qk_norm is not None:
            rotary = self._norm(rotary, layer.qk_norm, work.rotary_normed)
        if self.dtype == torch.float32:
            source = work.rotary_complex if layer.qk_norm is None else work.rotary_normed_complex
            torch.mul(source, turn, out=work.rotary_complex)
        else:
            work.rotary.copy_(torch.view_as_real(as_complex(rotary.float()) * turn).flatten(-2))

    def _norm(self, states: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), times ``weight``, into ``out``.

        1 / sqrt(|x|^2 / n + eps) from the vector norm: on a CPU in 60 % of the time of ``F.rms_norm``.
        """
        size = states.shape[-1]
        if self.dtype != torch.float32:
            return out.copy_(F.rms_norm(states, (size,), None, self.shape.eps)).mul_(weight)
        norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / size).rsqrt_()
        return torch.mul(states, scale, out=out).mul_(weight)

    def _pad(self, states: torch.Tensor) -> torch.Tensor:
        missing = self.min_rows - states.shape[0]
        return F.pad(states, (0, 0, 0, missing)) if missing > 0 else states
