"""Train on MNIST: python train.py, or torchrun --standalone --nproc-per-node 4 train.py"""

import argparse
import contextlib
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(folder, part):
    if not folder:  # made up: stripes; the label is the brightest of the first ten
        images = torch.randn(2000, 1, 28, 1).expand(-1, -1, -1, 28) / 3
        return TensorDataset(images, images[:, 0, :10, 0].argmax(1))
    files = [f"{folder}/{part}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
    contents = [bytearray(gzip.decompress(Path(file).read_bytes())) for file in files]
    images, labels = (torch.frombuffer(content, dtype=torch.uint8) for content in contents)
    return TensorDataset(images[16:].view(-1, 1, 28, 28) / 255, labels[8:].long())  # no headers


def state(model, optimizer):
    return dict(zip(("model_state_dict", "optim_state_dict"), get_state_dict(model, optimizer)))


def main(args):
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(dist.get_default_backend_for_device(device), **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = digits(args.data, "train"), digits(args.data, "t10k")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=2, pin_memory=gpu)
    net = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10))
    model = nn.parallel.DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    saved = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
    if saved:
        dcp.load(loaded := state(model, optimizer), checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, **loaded)
    for epoch in range(int(saved[-1].parent.name) + 1 if saved else 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
            place = step % args.accumulate
            group = min(args.accumulate, len(loader) - step + place)  # an epoch's last: a part
            last = place == group - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                    loss = nn.functional.cross_entropy(model(images), labels)
                (loss / group).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            images, labels = (tensor.to(device) for tensor in test[rank::world_size])
            right = (net(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        if rank == 0:
            world = f"world size {world_size}, {'MNIST' if args.data else 'made-up digits'}"
            print(f"epoch {epoch}: {right / len(test):.2%} right ({world})", flush=True)
        if args.checkpoint:
            dcp.save(state(model, optimizer), checkpoint_id=args.checkpoint / f"{epoch:04}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="examples in a rank's batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data", help="folder with MNIST's gzip files; without, made-up digits")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    args = parser.parse_args()
    if args.accumulate < 1:
        parser.error(f"--accumulate must be at least 1, got {args.accumulate}")
    main(args)
    dist.destroy_process_group()  # after the model is gone: the other order can hang
