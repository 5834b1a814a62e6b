"""A training script for a GPU, as people write them: nothing in it knows of memsize."""

import argparse

import torch
from model import Test
from torch.nn import functional as F


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Test().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler()
    for step in range(options.steps):
        images = torch.randn(options.batch_size, 3, 64, 64).to(device)
        targets = torch.randn(options.batch_size, 1).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = F.mse_loss(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
