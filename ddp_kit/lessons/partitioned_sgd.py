"""Partitioned SGD: every rank trains on its part of the digits; gradients are averaged.

The tutorial's data-parallel training by hand and with `DistributedDataParallel`; --tutorial runs
its experiment on all 60,000 digits. Source: "Writing Distributed Applications with PyTorch",
https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html#distributed-training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_kit import compare, device, mnist, progress
from ddp_kit.error_text import count
from ddp_kit.launch import Ranks, lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._digits import accuracy, as_batch, first_digits, flat
from ddp_kit.notebook.controls import Explorer, positive

SEED = 1234
GLOBAL_BATCH = 128
USUAL_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


class Partition(Dataset):
    """The part of a dataset given by a list of positions."""

    def __init__(self, data: Dataset, index: Sequence[int]) -> None:
        self.data, self.index = data, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int):
        return self.data[self.index[position]]


class DataPartitioner:
    """Cuts a dataset at random into parts of the given sizes, the same on every rank.

    sizes: fractions of the whole, such as (0.25, 0.25, 0.25, 0.25).
    """

    def __init__(self, data: Dataset, sizes: Sequence[float], seed: int = SEED) -> None:
        self.data, self.partitions = data, []
        index = list(range(len(data)))
        Random(seed).shuffle(index)
        for size in sizes:
            length = int(size * len(data))
            self.partitions.append(index[:length])
            index = index[length:]

    def use(self, part: int) -> Partition:
        """Return one of the parts."""
        return Partition(self.data, self.partitions[part])


class Net(nn.Module):
    """The tutorial's network: two convolutions, two linear layers, 21,840 parameters.

    The input has shape (batch, 1, 28, 28), the output (batch, 10): log-probabilities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def partition_dataset(rank: int, world_size: int, full: bool = False) -> DataLoader:
    """Load this rank's part of the digits, 128 // world_size in a batch.

    full: of all 60,000 training digits, else of the 10,000 that are part of the package.
    """
    digits = mnist(full=full)
    part = DataPartitioner(digits, [1 / world_size] * world_size).use(rank)
    images, labels = as_batch(part)  # transformed once, instead of once an epoch
    batch_size = GLOBAL_BATCH // world_size  # 128 / world_size would be a float
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks: one all_reduce per parameter."""
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world_size


def average_gradients_flat(model: nn.Module) -> None:
    """Do the same with a single all_reduce: all gradients share one flat buffer."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffer = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
    buffer /= dist.get_world_size()
    pieces = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def keep_gradients(model: nn.Module) -> None:
    """Average nothing: each rank keeps its own."""


def train(
    rank: int,
    world_size: int,
    epochs: int = 3,
    average: Callable[[nn.Module], None] = average_gradients,
    lr: float = 0.01,
    momentum: float = 0.5,
    full: bool = False,
) -> dict:
    """Train one replica on this rank's part of the digits.

    full: use all of MNIST. Returns "losses" (mean training loss of each epoch), "accuracy" (on
    the test digits, 0 to 1), and "parameters" (all of them, one flat tensor).
    """
    torch.manual_seed(SEED)  # the same start on every rank
    batches = partition_dataset(rank, world_size, full)
    model = Net().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for _ in progress(range(epochs)):
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            average(model)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    parameters = flat(model.parameters())
    return {"losses": losses, "accuracy": accuracy(model, full), "parameters": parameters}


def train_ddp(
    rank: int, world_size: int, epochs: int = 3, lr: float = 0.01, momentum: float = 0.5
) -> torch.Tensor:
    """Train like `train`, with DDP in place of `average_gradients`; return all parameters, flat."""
    torch.manual_seed(SEED)
    batches = partition_dataset(rank, world_size)
    model = DistributedDataParallel(Net().to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in progress(range(epochs)):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()  # DDP averages the gradients in here
            optimizer.step()
    return flat(model.parameters())


def first_steps(
    rank: int,
    world_size: int,
    lr: float = 0.03,
    average: Callable[[nn.Module], None] = average_gradients_flat,
    steps: int = 24,
) -> list[float]:
    """Train one replica for some steps, cycling through the first eight batches.

    A batch has 128 digits for all ranks together. Without dropout, 1, 2, 4 and 8 ranks take the
    same course, up to rounding, which float64 keeps small; others have unequal shards. Returns
    the batch's loss in each step.
    """
    torch.manual_seed(SEED)
    model = Net().to(device(), torch.float64).eval()  # without dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    images, labels = (part.split(GLOBAL_BATCH) for part in first_digits(8 * GLOBAL_BATCH))
    losses = []
    for step in range(steps):
        x, y = images[step % 8][rank::world_size], labels[step % 8][rank::world_size]
        optimizer.zero_grad()
        loss = F.nll_loss(model(x.double()), y)
        loss.backward()
        average(model)
        optimizer.step()
        whole = loss.detach() * len(y) / GLOBAL_BATCH
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses


def explore(world_size: int = 4, lr: float = 0.03) -> Explorer:
    """Train for 24 steps and draw the loss of the whole batch.

    In JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    rates = positive("lr", lr, USUAL_RATES)
    return Explorer(
        "partitioned_sgd",
        {"world_size": world_size, "lr": lr},
        choices=lambda settings: {"world_size": range(1, max(8, world_size) + 1), "lr": rates},
        ask=lambda settings: (first_steps, settings["lr"]),
        draw=lambda result, settings: plot.losses(
            {"whole batch": result[0]}, _title(settings), "step", "loss"
        ),
    )


def _title(settings: dict) -> str:
    ranks = count(settings["world_size"], "rank")
    return f"The first steps of {ranks} with learning rate {settings['lr']:g}"


def mean_gradient(
    rank: int,
    world_size: int,
    per_rank: int = 32,
    average: Callable[[nn.Module], None] = average_gradients,
) -> torch.Tensor:
    """Average the gradients of equal shards of one batch; return them flat.

    Dropout is off: each rank would draw a mask of its own.
    """
    torch.manual_seed(SEED)
    model = Net().to(device()).eval()  # without dropout
    images, labels = first_digits(per_rank * world_size)
    shard = slice(rank * per_rank, (rank + 1) * per_rank)
    F.nll_loss(model(images[shard]), labels[shard]).backward()
    average(model)
    return flat(parameter.grad for parameter in model.parameters())


def whole_batch_gradient(count: int) -> torch.Tensor:
    """Return the gradient of one batch of `count` digits, in this one process."""
    return mean_gradient(0, 1, per_rank=count, average=keep_gradients)


VARIANTS = {
    "no communication": (lambda model: model, keep_gradients),
    "one all_reduce per parameter": (lambda model: model, average_gradients),
    "one flat all_reduce": (lambda model: model, average_gradients_flat),
    "DistributedDataParallel": (DistributedDataParallel, keep_gradients),
}


def train_beside_ddp(rank: int, world_size: int, steps: int = 20) -> list[torch.Tensor]:
    """Train one replica by `average_gradients` and one by DDP; return both, each flat."""
    images, labels = first_digits(32 * world_size)
    replicas = []
    for name in ("one all_reduce per parameter", "DistributedDataParallel"):
        wrap, average = VARIANTS[name]
        torch.manual_seed(SEED)
        model = wrap(Net().to(device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            F.nll_loss(model(images[rank::world_size]), labels[rank::world_size]).backward()
            average(model)
            optimizer.step()
        replicas.append(flat(model.parameters()))
    return replicas


def step_seconds(rank: int, world_size: int, steps: int = 30) -> dict[str, list[float]]:
    """Time one training step of each variant, in turn, so that noise affects all alike.

    Returns seconds per step for each name in VARIANTS, `steps` of them.
    """
    images, labels = first_digits(GLOBAL_BATCH)
    images, labels = images[rank::world_size], labels[rank::world_size]
    contestants = {}
    for name, (wrap, average) in VARIANTS.items():
        model = wrap(Net().to(device()))
        contestants[name] = model, torch.optim.SGD(model.parameters(), lr=0.01), average
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for step in range(steps + 3):
        for name, (model, optimizer, average) in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            average(model)
            optimizer.step()
            if images.is_cuda:
                torch.cuda.synchronize()
            if step >= 3:  # the first steps warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest(result) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank in each step, from those of `step_seconds`."""
    steps = {name: zip(*(rank[name] for rank in result), strict=True) for name in result[0]}
    return {name: list(map(max, ranks)) for name, ranks in steps.items()}


def repeat_tutorial(ranks: Ranks, epochs: int = 10) -> None:
    """Train as the tutorial does; print the mean loss of each epoch, and the test accuracy.

    All 60,000 digits, learning rate 0.01, momentum 0.5. Raises DataError as `kit.mnist` does.
    """
    mnist(full=True)  # an error comes before any rank starts
    start = time.perf_counter()
    replicas = ranks(train, epochs, average_gradients, 0.01, 0.5, True)
    seconds = time.perf_counter() - start
    by_epoch = zip(*(replica["losses"] for replica in replicas), strict=True)
    for epoch, losses in enumerate(by_epoch, 1):
        ranks.say(f"epoch {epoch:2}  loss {sum(losses) / len(losses):.4f}")
    right = replicas[0]["accuracy"]
    ranks.say(f"{ranks}: {right:.2%} of the test digits are right, in {seconds:.0f} s")


def main(argv: list[str] | None = None) -> None:
    """Train, compare with one process and with DDP, and print one line."""
    parser = lesson_parser("partitioned_sgd", __doc__)
    parser.add_argument("--epochs", type=int, help="passes over the digits (default 1)")
    parser.add_argument(
        "--tutorial",
        action="store_true",
        help="train as the tutorial does: 10 epochs on all 60,000 digits of MNIST; takes minutes",
    )
    options = parser.parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        if options.tutorial:
            repeat_tutorial(ranks, 10 if options.epochs is None else options.epochs)
            return
        whole = compare(ranks(mean_gradient), whole_batch_gradient(32 * ranks.world_size))
        prove("the mean of the shards' gradients is the batch's gradient", whole)
        both = ranks(train_beside_ddp)
        prove("average_gradients equals DDP", compare([hand for hand, _ in both], both[0][1]))
        epochs = 1 if options.epochs is None else options.epochs
        replicas = [replica["parameters"] for replica in ranks(train, epochs)]
        same = compare(replicas, replicas[0], rtol=0, atol=0)
        prove("all replicas are equal to the last bit", same)
        ranks.say(f"partitioned_sgd: {ranks}, replicas bit-equal, gradients equal one process")


if __name__ == "__main__":
    run_as_script(main)
