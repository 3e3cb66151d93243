"""Steps of Opacus and of PyTorch.

An environment for it, for which the CPU build of PyTorch is enough:

    python -m venv opacus
    opacus/bin/pip install torch opacus==1.6.0

The models are those of `keras_models`, with Opacus' own attention and recurrent layers
where they are private. Row "hooks" keeps every example's gradient; row "ghost" takes
two backward passes, and instantiates what is neither Linear nor Embedding, layer by
layer, for the norms.
"""

import argparse
import os
from typing import Any

# Where other processes run too, threads that spin while they wait slow their own
# process down several times: it would not be PyTorch that is measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import opacus
import steps
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_EPSILON = 1e-3  # of normalization, as in Keras


def stepper(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the step of a row."""
    if row == "noise":
        return noise
    x, y = map(torch.from_numpy, steps.examples(options.model, options.batch_size))
    y = y.long()
    model = build(options.model, private=row != "ordinary")
    optimizer = torch.optim.SGD(model.parameters(), steps.LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()
    if row != "ordinary":
        model, optimizer, *criterions, _ = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), options.batch_size),
            noise_multiplier=steps.NOISE_MULTIPLIER,
            max_grad_norm=steps.L2_NORM_CLIP,
            poisson_sampling=False,
            grad_sample_mode=row,
        )
        criterion = criterions[0] if criterions else criterion

    def step() -> None:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def noise() -> None:
    """Add noise to a million numbers, drawn as Opacus' optimizer does."""
    numbers = torch.zeros(steps.NUMBERS_OF_NOISE)
    drawn = torch.normal(mean=0, std=steps.NOISE_MULTIPLIER, size=numbers.shape)
    (numbers + drawn)[0].item()


def build(name: str, *, private: bool) -> nn.Module:
    """Build a model by its name, which may give its width, as in `"mlp:512"`."""
    name, _, width = name.partition(":")
    if name == "mlp":
        return _mlp(int(width or 1024))
    if name in {"transformer", "lstm"}:
        return {"transformer": _Transformer, "lstm": _Lstm}[name](private=private)
    return {
        "cnn": _cnn,
        "resnet9": _ResNet9,
        "embedding": _Embedding,
        "synthetic": _synthetic,
    }[name]()


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(784, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        _ChannelsFirst(),
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        nn.Flatten(),
        *(nn.Linear(512, 32), nn.ReLU()),
        nn.Linear(32, 10),
    )


def _synthetic() -> nn.Module:
    return nn.Sequential(nn.Linear(5120, 2560), nn.ReLU(), nn.Linear(2560, 1280))


class _ChannelsFirst(nn.Module):
    """Turns Keras's order of axes into PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)


class _ResNet9(nn.Module):
    """Eight convolutions, two of them pairs with a shortcut, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            _ChannelsFirst(), _block(3, 32), _block(32, 64, nn.MaxPool2d(2))
        )
        self.first_pair = nn.Sequential(_block(64, 64), _block(64, 64))
        self.second = nn.Sequential(
            _block(64, 128, nn.MaxPool2d(2)), _block(128, 256, nn.MaxPool2d(2))
        )
        self.second_pair = nn.Sequential(_block(256, 256), _block(256, 256))
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x + self.first_pair(x))
        x = x + self.second_pair(x)
        return self.head(x.amax((2, 3)))


def _block(inputs: int, outputs: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(min(32, outputs // 4), outputs, eps=_EPSILON),
        nn.ReLU(),
        *more,
    )


class _Transformer(nn.Module):
    """Two blocks of width 128, four heads, normalized after each half."""

    def __init__(self, *, private: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 128)
        self.blocks = nn.Sequential(_Attending(private), _Attending(private))
        self.head = nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)).mean(1))


class _Attending(nn.Module):
    """A block of the Transformer."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        attention: Any = DPMultiheadAttention if private else nn.MultiheadAttention
        self.attention = attention(128, 4, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.first_norm = nn.LayerNorm(128, eps=_EPSILON)
        self.second_norm = nn.LayerNorm(128, eps=_EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.second_norm(x + self.inner(x))


class _Lstm(nn.Module):
    """A recurrent classifier of 64 time steps."""

    def __init__(self, *, private: bool) -> None:
        super().__init__()
        self.recurrent = (DPLSTM if private else nn.LSTM)(32, 128, batch_first=True)
        self.head = nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class _Embedding(nn.Module):
    """A large table, of which a batch reads a part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100_000, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


if __name__ == "__main__":
    steps.main(
        stepper,
        f"Opacus {opacus.__version__}, PyTorch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
    )
