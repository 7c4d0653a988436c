"""A DataLoader with forked workers in a process whose tensors are registered.

    python examples/torch_dataloader.py

An RDMA library sends from the registered tensors. The workers are forked after that, and do not
inherit them. They read samples that are not registered. Their batches come through shared memory.

Needs torch (its CPU build will do).
"""

import sys
import time

try:
    import torch
    from torch.utils.data import DataLoader, Dataset
except ImportError as error:
    sys.exit(f"torch_dataloader.py needs torch; its CPU build will do: {error}")

import rdmafork

SAMPLES, WORKERS = 256, 2


class Squares(Dataset[torch.Tensor]):  # type: ignore[misc, unused-ignore]
    """Samples that are not registered: a worker inherits them."""

    def __init__(self) -> None:
        self.values = torch.arange(SAMPLES, dtype=torch.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index] ** 2


def main() -> None:
    rdmafork.fork_init()
    gradients = [torch.zeros(1 << 22) for _ in range(8)]  # 16 MiB each
    regions = [rdmafork.register(tensor) for tensor in gradients]
    loader = DataLoader(
        Squares(), batch_size=32, num_workers=WORKERS, multiprocessing_context="fork"
    )
    start = time.perf_counter()
    total = sum(float(batch.sum()) for batch in loader)
    took = time.perf_counter() - start
    assert total == sum(n * n for n in range(SAMPLES))
    gradients[0].fill_(1)  # the parent still has the pages that the device knows
    print(f"{sum(region.nbytes for region in regions) >> 20} MiB registered")
    print(f"{WORKERS} workers, {took:.2f} s an epoch, {total:.0f}")
    print(rdmafork.stats())
    for region in regions:
        region.close()


if __name__ == "__main__":
    main()
