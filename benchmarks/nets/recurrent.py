"""Recurrent language models; Zaremba et al., 2014, in size."""

from __future__ import annotations

from torch import Tensor, nn


class Recurrent(nn.Module):
    """An embedding, two recurrent layers (``"LSTM"`` or ``"GRU"``), and a head over the vocabulary."""

    def __init__(self, kind: str, both_ways: bool = False) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(10_000, 650), nn.Dropout(0.5)
        self.layers = getattr(nn, kind)(650, 650, 2, batch_first=True, dropout=0.5, bidirectional=both_ways)
        self.head = nn.Linear(1300 if both_ways else 650, 10_000)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, _ = self.layers(self.drop(self.tokens(input_ids)))
        return self.head(self.drop(x))
