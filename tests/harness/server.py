# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a process of its own on the host, on a CPU, that counts the rows its layers see."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import hosts

FLAG = "--kv-sharing-fast-prefill"
START_TIMEOUT = 600  # seconds, on a busy machine
ROW_COUNTER = Path(hosts.__file__).with_name("row_counter")


class ServerError(Exception):
    pass


@dataclass
class Server:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    row_counts: Path

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"{self.name}: the server ended with exit code {self.process.returncode}")
            try:
                status, _ = self.request("GET", "/health")
            except OSError:
                status = None
            if status == 200:
                self.row_counts.write_text("")  # drops the passes of the start
                return
            time.sleep(0.5)
        raise ServerError(f"{self.name}: the server did not answer within {START_TIMEOUT} s")

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens that follow a prompt, greedily."""
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        status, answer = self.request("POST", "/v1/completions", {"prompt": prompt, **sampling})
        if status != 200:
            raise ServerError(f"{self.name}: a completion gave {status}: {answer}")
        return json.loads(answer)["choices"][0]["token_ids"]

    def prompt_passes(self) -> list[dict[str, Any]]:
        """The prompt passes so far, of each of the server's workers, as ``row_counter`` describes them."""
        passes = map(json.loads, self.row_counts.read_text().splitlines())
        return [p for p in passes if p["prompt"]]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def serve(checkpoint: Path, folder: Path, name: str, *args: str) -> Iterator[Server]:
    """A float32 server with all plugins and these further arguments, stopped at the end; its files are in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, row_counts = folder / f"{name}.log", folder / f"{name}.rows"
    environment = {**os.environ, **hosts.environment(), "ROW_COUNT_FILE": str(row_counts)}
    environment["PYTHONPATH"] += os.pathsep + str(ROW_COUNTER)
    environment.pop("VLLM_PLUGINS", None)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--limit-mm-per-prompt", '{"image": 0, "audio": 0, "video": 0}']
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *args], env=environment, stdout=output, stderr=subprocess.STDOUT)
    server = Server(name, process, port, log, row_counts)
    try:
        yield server
    finally:
        server.stop()
