# SPDX-License-Identifier: Apache-2.0
"""The rotary module that holds cos/sin of the whole pass once they are prepared."""

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


@RotaryEmbedding.register_oot
class HPURotaryEmbedding(RotaryEmbedding):
    def prepare_cos_sin(
        self, positions: torch.Tensor, offsets: torch.Tensor | None = None, recompute_cos_sin: bool = False
    ) -> None:
        """positions [any shape] -> buffers cos, sin [tokens, 1, rotary_dim]."""
        assert offsets is None and self.is_neox_style
        self.recompute_cos_sin = recompute_cos_sin
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((sin, sin), dim=-1), persistent=False)

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates by the prepared cos/sin; `positions` count only if none are prepared or each call recomputes."""
        if not hasattr(self, "sin") or self.recompute_cos_sin:
            self.prepare_cos_sin(positions, recompute_cos_sin=True)
        return self._rotated(query, positions.numel()), None if key is None else self._rotated(key, positions.numel())

    def _rotated(self, states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        heads = states.view(num_tokens, -1, self.head_size)
        if self.cos.shape[0] != num_tokens:  # else one row would broadcast
            raise RuntimeError(f"cos/sin are prepared for {self.cos.shape[0]} tokens, the call has {num_tokens}")
        rotary, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = rotary.chunk(2, dim=-1)
        rotary = rotary * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return torch.cat((rotary, rest), dim=-1).view(states.shape)
