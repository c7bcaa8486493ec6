"""Start a kernel, load the extension, and check that a cell runs on two ranks and its result comes home."""

from __future__ import annotations

import sys

from jupyter_client.manager import start_new_kernel

CELL = """\
#!g2.2
#pragma taas --gpus 2
import torch
torch.distributed.init_process_group(backend='nccl', init_method='env://')
total = torch.ones(1, device='cuda' if torch.cuda.is_available() else 'cpu')
torch.distributed.all_reduce(total)
total = int(total)
"""


def main() -> int:
    """Run the cell; 0 if two ranks added up to two."""
    manager, client = start_new_kernel()
    try:
        for code in ("%load_ext taas_magic", CELL, "assert total == 2, total"):
            reply = client.execute_interactive(code, timeout=180)
            if reply["content"]["status"] != "ok":
                print(f"smoke: failed in the cell\n{code}", file=sys.stderr)
                return 1
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    print("smoke: a cell ran on 2 ranks from the wheel alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
