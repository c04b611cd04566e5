# SPDX-License-Identifier: Apache-2.0
import contextlib
from collections.abc import Iterator


def get_pt_compile_only_mode() -> bool:
    return False


@contextlib.contextmanager
def env_setting(name: str, value: object) -> Iterator[None]:
    # The plugin reads this as "no compile-only mode" and warms up by running the model.
    raise KeyError(name)
    yield
