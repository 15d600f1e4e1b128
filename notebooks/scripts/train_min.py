"""Train on MNIST's files in a folder: torchrun --nproc-per-node 4 train_min.py --data FOLDER"""

import argparse
import contextlib
import gc
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(folder, part):
    files = [f"{folder}/{part}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
    contents = [bytearray(gzip.decompress(Path(file).read_bytes())) for file in files]
    images, labels = (torch.frombuffer(content, dtype=torch.uint8) for content in contents)
    return TensorDataset(images[16:].view(-1, 1, 28, 28) / 255, labels[8:].long())  # no headers


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = digits(args.data, "train"), digits(args.data, "t10k")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10))
    model = nn.parallel.DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # another order in each
        for step, (images, labels) in enumerate(loader):
            place = step % args.accumulate
            group = min(args.accumulate, len(loader) - step + place)  # an epoch's last: a part
            last = place == group - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                (loss / group).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            images, labels = (tensor.to(device) for tensor in test[rank::world_size])
            right = (net(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right / len(test):.2%} right (world size {world_size})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with MNIST's four gzip files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="examples in a rank's batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    main(parser.parse_args())
    gc.collect()  # DDP's models are in cycles
    dist.destroy_process_group()  # after the model is gone: the other order can hang, or abort
