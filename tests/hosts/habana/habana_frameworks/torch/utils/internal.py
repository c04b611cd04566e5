# SPDX-License-Identifier: Apache-2.0


def is_lazy() -> bool:
    return False
