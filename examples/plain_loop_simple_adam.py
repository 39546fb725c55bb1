"""SimpleAdam in a plain PyTorch loop: no Lightning, and no host read until the run is over.

python examples/plain_loop_simple_adam.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from zdtrain.optim import Cosine, SimpleAdam, Warmup

EPOCHS, BATCH = 20, 64


def main() -> float:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    y = torch.tensor(digits.target, device=device)
    train, test = slice(0, 1500), slice(1500, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)).to(device)
    num_steps = EPOCHS * (1500 // BATCH)
    optimizer = SimpleAdam(
        model.parameters(),
        lr=3e-3,
        weight_decay=0.01,
        max_norm=1.0,
        skip_nonfinite=True,
        schedule=Warmup(lr_warmup_steps=20, then=Cosine(num_steps=num_steps - 20)),
    )
    losses = torch.zeros(num_steps, device=device)

    step = 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(1500, device=device).split(BATCH)[: 1500 // BATCH]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[train][batch]), y[train][batch])
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
            step += 1

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()  # the first time the host waits
    print(f"loss {losses[0]:.3f} -> {losses[-20:].mean():.3f}, accuracy {accuracy:.3f}")
    print(f"lr ends at {optimizer.param_groups[0]['lr']:.1e}, {int(optimizer.skipped_count)} steps skipped")
    return accuracy


if __name__ == "__main__":
    main()
