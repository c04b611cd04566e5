# SPDX-License-Identifier: Apache-2.0
import os
import sys

from tests.hosts import environment

if len(sys.argv) < 2:
    sys.exit("usage: python -m tests.hosts COMMAND [ARGUMENT...]")
os.environ.update(environment())
os.execvp(sys.argv[1], sys.argv[1:])
