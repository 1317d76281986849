"""A plain Llama with random weights, of a Laneformer's size, as a GGUF file and under llama.cpp.

Needs `pip install gguf xllamacpp`; xllamacpp is llama.cpp with its server's loop, as a wheel that needs no compiler
(built for AVX2; what it was built for is what `xllamacpp.get_system_info()` says).
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from model.config import LaneformerConfig
from tests.benchmarks.decode_single import Contestant, Run

FORMATS = ("F32", "F16", "Q8_0")


def write_gguf(config: LaneformerConfig, form: str, file: Path) -> int:
    """Write the file; returns the bytes of weights that one token reads. form is one of FORMATS."""
    gguf: Any = importlib.import_module("gguf")
    kind = gguf.GGMLQuantizationType[form]
    width, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(form, f"MOSTLY_{form}")])
    _add_tokenizer(writer, gguf.TokenType, config.vocab_size)
    random = np.random.default_rng(0)
    read = 0

    def add(name: str, *shape: int) -> int:
        if len(shape) == 1:
            value = np.ones(shape, dtype=np.float32)
            writer.add_tensor(name, value)
            return value.nbytes
        value = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        return stored.nbytes

    add("token_embd.weight", config.vocab_size, width)
    for i in range(config.num_hidden_layers):
        read += add(f"blk.{i}.attn_norm.weight", width)
        read += add(f"blk.{i}.attn_q.weight", width, width)
        read += add(f"blk.{i}.attn_k.weight", keys, width)
        read += add(f"blk.{i}.attn_v.weight", keys, width)
        read += add(f"blk.{i}.attn_output.weight", width, width)
        read += add(f"blk.{i}.ffn_norm.weight", width)
        read += add(f"blk.{i}.ffn_gate.weight", config.intermediate_size, width)
        read += add(f"blk.{i}.ffn_up.weight", config.intermediate_size, width)
        read += add(f"blk.{i}.ffn_down.weight", width, config.intermediate_size)
    read += add("output_norm.weight", width)
    read += add("output.weight", config.vocab_size, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _add_tokenizer(writer: Any, kinds: Any, size: int) -> None:
    """A vocabulary that llama.cpp accepts; no text passes through it. kinds is gguf.TokenType."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    tokens += [f"t{i}" for i in range(len(tokens), size)]
    types += [kinds.NORMAL] * (len(tokens) - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(types[:size])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def llama(config: LaneformerConfig, form: str, threads: int, name: str) -> Contestant:
    """Raises ModuleNotFoundError if a package is missing."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plain.gguf"
        read = write_gguf(config, form, file)
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = config.max_position_embeddings
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.verbosity = 0
        server = xllamacpp.Server(parameters)

    def run(prompt: list[int], tokens: int) -> Run:
        request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = server.handle_completions({**request, "ignore_eos": True, "cache_prompt": False})
        timings = answer["timings"]
        # The first of the tokens comes with the prompt.
        return Run(timings["predicted_ms"] / 1e3 / (tokens - 1), timings["prompt_ms"] / 1e3)

    return Contestant(name, read, run)
