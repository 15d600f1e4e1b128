"""nn.DataParallel by hand beside plain training: the same gradient. Needs PyTorch alone."""

import torch
from torch import nn
from torch.func import functional_call


class ByHand(nn.Module):
    def __init__(self, module, places):
        super().__init__()
        self.module, self.places = module, places

    def forward(self, batch):
        outputs, tensors = [], self.module.state_dict(keep_vars=True)
        for place, shard in zip(self.places, batch.chunk(len(self.places))):
            replica = {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}
            outputs.append(functional_call(self.module, replica, shard.to(place)))
        return torch.cat([output.to(self.places[0]) for output in outputs])


def gradient(model, images, labels):
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


if __name__ == "__main__":
    torch.manual_seed(0)
    gpus = torch.cuda.device_count()
    places = [f"cuda:{i}" for i in range(gpus)] if gpus > 1 else ["cpu"] * 3
    model = nn.Sequential(nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10)).to(places[0])
    images = torch.randn(30, 784, device=places[0])
    labels = torch.randint(10, (30,), device=places[0])
    plain = gradient(model, images, labels)
    wrapped = {"by hand": ByHand(model, places)}
    if gpus > 1:
        wrapped["nn.DataParallel"] = nn.DataParallel(model)
    for name, wrapper in wrapped.items():
        far = (gradient(wrapper, images, labels) - plain).abs().max()
        print(f"{name}: within 1e-6 of the plain gradient: {(far < 1e-6).item()}")
