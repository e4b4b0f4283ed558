"""Ordinary models, written as users write them, to be sliced."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LeNet(nn.Module):
    """The tutorial's network, with a width written into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = x.view(-1, 16 * 4 * 4)
        x = functional.dropout(functional.relu(self.fc1(x)), 0.5, training=self.training)
        return self.fc2(x)

    def twice(self) -> int:
        return 2


class Residual(nn.Module):
    """Batch normalisation, a residual sum, and a plain view by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4 * 4, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        x = x + functional.relu(self.norm(self.conv(x))) * self.scale
        x = functional.adaptive_avg_pool2d(x, 4)
        return self.fc(x.view(x.size(0), -1))


class Mobile(nn.Module):
    """Depthwise and grouped convolutions and a squeeze-and-excitation gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 32, 3, padding=1, groups=16)
        self.point = nn.Conv2d(32, 24, 1)
        self.act = nn.PReLU(24)
        self.squeeze = nn.Conv2d(24, 8, 1)
        self.excite = nn.Conv2d(8, 24, 1)
        self.grouped = nn.Conv2d(24, 32, 3, groups=4)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.point(torch.relu(self.depthwise(torch.relu(self.stem(x))))))
        gate = torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        x = torch.relu(self.grouped(x * self.excite(gate)))
        return self.fc(x.mean(dim=[2, 3]))


class UNet(nn.Module):
    """Concatenated skip connections and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.down(x))
        low = torch.relu(self.deep(functional.max_pool2d(high, 2)))
        joined = torch.cat([high, torch.relu(self.up(low))], dim=1)
        return self.out(torch.relu(self.join(joined)))


class Attention(nn.Module):
    """An embedding tied to the classifier, a position parameter, attention by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.place = nn.Parameter(torch.randn(1, 6, 16))
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.hidden = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        attended, _ = self.attend(x, x, x, need_weights=False)
        x = x + attended
        x = x + self.back(torch.relu(self.hidden(x)))
        return self.head(x)


class ViT(nn.Module):
    """Patches, a class token, a standard encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.place = nn.Parameter(torch.randn(1, 5, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1)
        return self.head(self.encoder(tokens + self.place)[:, 0])


class Text(nn.Module):
    """One-dimensional convolutions over an embedding, with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).permute(0, 2, 1)
        return self.fc(torch.relu(self.norm(self.conv(x))).amax(dim=-1))


def images(channels: int, size: int) -> Tensor:
    return torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(0))


def tokens(words: int, length: int) -> Tensor:
    return torch.randint(words, (4, length), generator=torch.Generator().manual_seed(0))


ZOO = {
    "lenet": (LeNet, images(1, 28)),
    "residual": (Residual, images(3, 8)),
    "mobile": (Mobile, images(3, 8)),
    "unet": (UNet, images(1, 8)),
    "attention": (Attention, tokens(11, 6)),
}
