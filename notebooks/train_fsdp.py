"""Trains a small language model, sharded over the GPUs of a job: `torchrun --nproc-per-node 8 train_fsdp.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group()
device = torch.device("cuda", dist.get_node_local_rank())
torch.cuda.set_device(device)

width, words = 1024, 32_000
layers = [nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, words))
for layer in layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

for _ in range(100):
    tokens = torch.randint(words, (4, 513), device=device)
    scores = model(tokens[:, :-1])
    cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
