# SPDX-License-Identifier: Apache-2.0
"""The worker vLLM's executors drive."""

from typing import Any

import torch
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.tasks import SupportedTask
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

DEFAULT_CACHE_BYTES = 1 << 30


class HPUWorker(WorkerBase):
    model_runner: HPUModelRunner

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, backend="gloo"
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)
        self.model_runner = HPUModelRunner(self.vllm_config)

    def load_model(self, **kwargs: Any) -> None:
        self.model_runner.load_model()

    def get_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        return self.cache_config.kv_cache_memory_bytes or DEFAULT_CACHE_BYTES

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def reset_encoder_cache(self) -> None:
        pass
