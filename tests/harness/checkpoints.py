# SPDX-License-Identifier: Apache-2.0
"""Small random Gemma 4 checkpoints in the published file layout: the published shapes with every width divided."""

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GemmaTokenizer,
    GenerationConfig,
)

Shape = Literal["E2B", "E4B"]
Architecture = Literal["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"]

# The published values.
WIDTHS = {
    "E2B": {"hidden_size": 1536, "intermediate_size": 6144, "head_dim": 256, "hidden_size_per_layer_input": 256},
    "E4B": {"hidden_size": 2560, "intermediate_size": 10240, "head_dim": 256, "hidden_size_per_layer_input": 256},
}
PERIOD = {"E2B": 5, "E4B": 6}  # layers in a group: the last one has full attention, the others slide
KV_HEADS = {"E2B": 1, "E4B": 2}

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
IMAGE_TOKENS = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
AUDIO_TOKENS = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
VIDEO_TOKEN = "<|video|>"
VOCAB_SIZE = 320
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS) + len(IMAGE_TOKENS) + len(AUDIO_TOKENS) + 1


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """All tokens in the order of their ids, and the merges of the two-letter ones."""
    specials = [*SPECIAL_TOKENS, *IMAGE_TOKENS.values(), *AUDIO_TOKENS.values(), VIDEO_TOKEN]
    # Each printable character is a token, so that any grammar can continue from any state.
    characters = ["▁", "\n", "\t", *(chr(c) for c in range(0x21, 0x7F))]
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    merges = [pair for v in vowels for c in consonants for pair in ((c, v), (v, c))]
    tokens = [*specials, *characters, *dict.fromkeys(a + b for a, b in merges)]
    tokens = tokens[:VOCAB_SIZE]
    return tokens, [pair for pair in merges if "".join(pair) in tokens]


def make_checkpoint(
    path: Path | str,
    *,
    shape: Shape = "E2B",
    architecture: Architecture = "Gemma4ForConditionalGeneration",
    num_layers: int | None = None,
    num_kv_shared_layers: int | None = None,
    sliding_window: int = 128,
    seed: int = 0,
    divisor: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    unused_shared_projections: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint and return its directory.

    The defaults keep two groups of layers, the second one KV-shared. `divisor` divides the published widths;
    `overrides` are fields of the text config and win over everything else. Text weights depend on the seed and their
    own names only: both architectures get the same ones. `unused_shared_projections` are `k_proj`, `v_proj` and
    `k_norm` of the KV-shared layers, which published checkpoints have and nothing reads.
    """
    path = Path(path)
    period = PERIOD[shape]
    num_layers = 2 * period if num_layers is None else num_layers
    num_kv_shared_layers = period if num_kv_shared_layers is None else num_kv_shared_layers
    fields: dict[str, Any] = {name: width // divisor for name, width in WIDTHS[shape].items()}
    fields |= {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_kv_shared_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS[shape],
        "global_head_dim": 2 * fields["head_dim"],
        "use_double_wide_mlp": shape == "E2B",
        "sliding_window": sliding_window,
        "layer_types": ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    }
    text_config = Gemma4TextConfig(**(fields | overrides))
    model: Gemma4ForConditionalGeneration | Gemma4ForCausalLM
    if architecture == "Gemma4ForCausalLM":
        model = Gemma4ForCausalLM(text_config)
    else:
        model = Gemma4ForConditionalGeneration(_multimodal_config(text_config))
    for name, tensor in model.state_dict().items():
        tensor.copy_(_random_weight(name, tensor.shape, seed, text_config))
    model.to(dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=2, eos_token_id=[1, 6], pad_token_id=0, do_sample=True, temperature=1.0, top_k=64, top_p=0.95
    )
    model.save_pretrained(path)
    if unused_shared_projections:
        _add_unused_shared_projections(path / "model.safetensors", text_config, seed)
    _write_tokenizer(path)
    if architecture == "Gemma4ForConditionalGeneration":
        _write_processor(path)
    return path


def _multimodal_config(text_config: Gemma4TextConfig) -> Gemma4Config:
    tokens, _ = vocabulary()
    return Gemma4Config(
        text_config=text_config,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 1024,
            "default_output_length": 70,
        },
        audio_config=None,
        boi_token_id=tokens.index(IMAGE_TOKENS["boi_token"]),
        eoi_token_id=tokens.index(IMAGE_TOKENS["eoi_token"]),
        image_token_id=tokens.index(IMAGE_TOKENS["image_token"]),
        boa_token_id=tokens.index(AUDIO_TOKENS["boa_token"]),
        eoa_token_index=tokens.index(AUDIO_TOKENS["eoa_token"]),
        audio_token_id=tokens.index(AUDIO_TOKENS["audio_token"]),
        video_token_id=tokens.index(VIDEO_TOKEN),
    )


def _random_weight(name: str, shape: torch.Size, seed: int, config: Gemma4TextConfig) -> torch.Tensor:
    """Weights that keep every activation near unit size, so that each layer, norm and scalar moves the logits."""
    name = name.replace("model.language_model.", "model.")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("layer_scalar"):
        return 0.9 + 0.1 * noise.clamp(-2, 2)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention has no 1/sqrt(head_dim): this gives scores of standard deviation 3, neither flat nor one-hot.
        return (3 / shape[0] ** 0.5) ** 0.5 * (1 + 0.2 * noise)
    if name == "model.norm.weight":
        return 4 * (1 + 0.2 * noise)  # large logits: the soft cap bends them, and greedy choices are clear
    if name.endswith("norm.weight") or "layernorm" in name:
        return 1 + 0.2 * noise
    weight = noise * shape[-1] ** -0.5
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        # Greedy decoding shall neither stop early nor emit image placeholders.
        weight[:FIRST_TEXT_TOKEN] *= 0.25
    if name == "model.embed_tokens_per_layer.weight":
        # Packed over the layers, but the model scales it by the width of one layer's slice.
        weight = noise * config.hidden_size_per_layer_input**-0.5
    return weight


def _add_unused_shared_projections(file: Path, config: Gemma4TextConfig, seed: int) -> None:
    """Published checkpoints ship the K/V projections of KV-shared layers; transformers drops them on load."""
    tensors = load_file(file)
    for name, query in list(tensors.items()):
        layer, found, _ = name.partition(".self_attn.q_proj.weight")
        if not found or "vision_tower" in name or f"{layer}.self_attn.k_proj.weight" in tensors:
            continue
        head_dim = query.shape[0] // config.num_attention_heads
        shapes = {"k_proj": (config.num_key_value_heads * head_dim, query.shape[1]), "k_norm": (head_dim,)}
        shapes["v_proj"] = shapes["k_proj"]
        for projection, shape in shapes.items():
            unused = f"{layer}.self_attn.{projection}.weight"
            tensors[unused] = _random_weight(unused, torch.Size(shape), seed, config).to(query.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def _write_tokenizer(path: Path) -> None:
    tokens, merges = vocabulary()
    tokenizer = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        add_bos_token=True,
        extra_special_tokens={"sot_token": "<|turn>", "eot_token": "<turn|>", **IMAGE_TOKENS, **AUDIO_TOKENS},
        model_max_length=131072,
    )
    tokenizer.save_pretrained(path)


def _write_processor(path: Path) -> None:
    """Written by hand: transformers' processor classes cannot be built without torchvision."""
    image = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_convert_rgb": True}
    config = {
        "processor_class": "Gemma4Processor",
        "image_seq_length": 70,
        "audio_seq_length": 750,
        "audio_ms_per_token": 40,
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **image},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **image},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    }
    (path / "processor_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_adapter(path: Path | str, checkpoint: Path | str, modules: list[str], seed: int, rank: int = 8) -> Path:
    """Write a random LoRA adapter for these projections of every decoder layer (`q_proj`, `down_proj`, ...)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118, it is no dict
            module, _, parameter = name.rpartition(".")
            if ".layers." in module and "tower" not in module and module.rpartition(".")[2] in modules:
                assert parameter == "weight"
                rows, columns = weights.get_slice(name).get_shape()
                down = torch.randn(rank, columns, generator=generator) * columns**-0.5
                tensors[f"base_model.model.{module}.lora_A.weight"] = down
                tensors[f"base_model.model.{module}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(checkpoint)}))
    return path


def config_without_layers(checkpoint: Path) -> dict[str, Any]:
    """For other numbers of layers: newer transformers write what single layers have by the layers' indices."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"].pop("per_layer_config", None)
    return config
