# SPDX-License-Identifier: Apache-2.0
"""The host that runs vLLM in the tests, on a CPU: the real vllm-gaudi if `VLLM_GAUDI_ROOT` says where it is (a
checkout or a site-packages folder), the stand-in otherwise.

`python -m tests.hosts COMMAND...` runs a command on the host. Nothing here imports torch or vLLM before `reset`.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# The plugin's own switches for running on a CPU, Gaudi's attention path (not the naive one), no warm-up, no network.
# One thread: the matrices are small, and threads that wait for each other on a busy machine take many times as long.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_FAKE_HPU": "1",
    "VLLM_PROMPT_USE_FUSEDSDPA": "1",
    "VLLM_SKIP_WARMUP": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def name() -> str:
    """Either "plugin" or "stand-in"."""
    return "plugin" if os.environ.get("VLLM_GAUDI_ROOT") else "stand-in"


def environment() -> dict[str, str]:
    """The variables under which a process runs on the host, to be added to the process's own."""
    if name() == "plugin":
        paths = [_HERE / "habana", _importable(Path(os.environ["VLLM_GAUDI_ROOT"]).resolve())]
    else:
        paths = [_HERE / "stand_in"]
    if importlib.util.find_spec("torchvision") is None:  # vLLM's Gemma 4 imports it, for text too
        paths.append(_HERE / "no_torchvision")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    python_path = list(dict.fromkeys([*map(str, paths), *filter(None, inherited)]))
    return {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(python_path)}


def reset() -> None:
    """Forgets what the host keeps per process, so that the next engine is built from its own settings."""
    # Through sys.modules: what was not imported has kept nothing, and importing it here would be too early.
    if runtime := sys.modules.get("vllm_gaudi.extension.runtime"):
        runtime.clear_config()
    if environment := sys.modules.get("vllm_gaudi.extension.environment"):
        environment._VLLM_VALUES.clear()
    if bucketing := sys.modules.get("vllm_gaudi.extension.bucketing.common"):
        bucketing.HPUBucketingManager.deactivate()
    if runner := sys.modules.get("vllm_gaudi.v1.worker.hpu_model_runner"):
        runner._TYPE_CACHE.clear()


def _importable(root: Path) -> Path:
    """A folder for PYTHONPATH from which vLLM finds the plugin at `root` and its entry points."""
    distributions = importlib.metadata.distributions(path=[str(root)])
    if any(d.name.replace("-", "_") == "vllm_gaudi" for d in distributions):
        return root
    # A checkout that was never installed has no entry points, and it has a `tests` package that would hide ours.
    version = _version(root)
    key = hashlib.sha256(f"{root} {version}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"vllm-gaudi-{os.getuid()}-{key}"
    info = folder / f"vllm_gaudi-{version}.dist-info"
    info.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "vllm_gaudi").symlink_to(root / "vllm_gaudi")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm_gaudi\nVersion: {version}\n")
    sections = ("\n".join([f"[{group}]", *lines, ""]) for group, lines in _entry_points(root).items())
    (info / "entry_points.txt").write_text("\n".join(sections))
    return folder


def _entry_points(root: Path) -> dict[str, list[str]]:
    """vLLM's entry point groups in the `setup.py` of a checkout: group -> ["name = module:function"]."""
    for node in ast.walk(ast.parse((root / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            groups = ast.literal_eval(node.value)
            return {group: lines for group, lines in groups.items() if group.startswith("vllm.")}
    raise ValueError(f"no entry_points in {root / 'setup.py'}")


def _version(root: Path) -> str:
    """The version of a checkout, as setuptools-scm wrote it or as its tags tell, else 0.0.0+checkout."""
    written = root / "vllm_gaudi" / "_version.py"
    if written.exists() and (found := re.search(r"version = ['\"](\d.*)['\"]", written.read_text())):
        return found[1]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--tags", "--match", "v[0-9]*"]
        described = subprocess.run(command, capture_output=True, text=True)
        if described.returncode == 0:
            tag, _, commits = described.stdout.strip().removeprefix("v").partition("-")
            return f"{tag}+{commits.replace('-', '.')}" if commits else tag
    return "0.0.0+checkout"
