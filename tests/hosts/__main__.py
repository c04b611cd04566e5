# SPDX-License-Identifier: Apache-2.0
import os
import sys

from tests.hosts import environment

os.environ.update(environment())
os.execvp(sys.argv[1], sys.argv[1:])
