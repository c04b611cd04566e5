# SPDX-License-Identifier: Apache-2.0
"""Names only."""

from typing import Any

ImageReadMode: Any = None
decode_image: Any = None
