# SPDX-License-Identifier: Apache-2.0
import torch


def manual_seed_all(seed: int) -> None:
    torch.manual_seed(seed)
