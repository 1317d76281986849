"""Import: exact round trips, released configurations of every age, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import CheckpointError, check_files, load_checkpoint
from model.cli import main
from model.config import LaneformerConfig
from model.hf_config import HARMLESS, IMPLIED, read_config
from model.hf_export import export_checkpoint
from model.hf_import import import_folder, write_checkpoint
from tests.golden.test_golden import load_case
from tests.unit.hf_fixtures import VARIANTS, small_checkpoint, small_config

SMALL_SHARD = 20_000


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, torch.float32) for variant in VARIANTS)]
    + [(variant, torch.bfloat16) for variant in ("base", "tied", "lane_head", "vocab_parallel", "pre_norm")],
)
def test_export_import_export_is_byte_identical(
    variant: str, dtype: torch.dtype, tiny_data: Path, tmp_path: Path
) -> None:
    model = small_checkpoint(variant, tiny_data / "tokenizer.model", tmp_path / "step-3")
    export_checkpoint(tmp_path / "step-3", tmp_path / "a", dtype, SMALL_SHARD)
    import_folder(tmp_path / "a", tmp_path / "back")
    check_files(tmp_path / "back", hashes=True)
    export_checkpoint(tmp_path / "back", tmp_path / "b", dtype, SMALL_SHARD)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    again, config, _ = load_checkpoint(tmp_path / "back")
    assert config == model.sizes
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype).float()), name


def test_shards_hold_every_tensor_once_and_are_no_larger_than_asked(tiny_data: Path, tmp_path: Path) -> None:
    small_checkpoint("base", tiny_data / "tokenizer.model", tmp_path / "step-3")
    folder = export_checkpoint(tmp_path / "step-3", tmp_path / "out", torch.float32, SMALL_SHARD)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    found = {}
    for file in files:
        shard = load_file(file)
        assert sum(value.nbytes for value in shard.values()) <= SMALL_SHARD or len(shard) == 1
        found |= dict.fromkeys(shard, file.name)
        assert file.stat().st_mode & 0o777 == 0o644
    assert found == index["weight_map"]
    whole = export_checkpoint(tmp_path / "step-3", tmp_path / "whole", torch.float32)
    weights = load_file(whole / "model.safetensors")
    assert weights.keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert not (whole / "model.safetensors.index.json").exists()


def test_damaged_weights_are_not_exported(tiny_data: Path, tmp_path: Path) -> None:
    small_checkpoint("base", tiny_data / "tokenizer.model", tmp_path / "step-3")
    [file] = (tmp_path / "step-3").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged: its SHA-256 differs"):
        export_checkpoint(tmp_path / "step-3", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.parametrize("name", ["base", "early_comm", "lane_norms", "vocab_parallel"])
def test_a_released_folder_gives_its_logits(name: str, tiny_data: Path, tmp_path: Path) -> None:
    """Weights and logits of another implementation, under the config.json of an older release."""
    config, weights, arrays = load_case(name)
    folder = tmp_path / "released"
    folder.mkdir()
    # Its vocabulary is smaller than any tokenizer's here: rows that no prompt uses are added.
    (folder / "config.json").write_text(json.dumps({**released_config(config), "vocab_size": 384}))
    grown = {key: value.float() for key, value in with_larger_vocabulary(config, weights).items()}
    save_file(grown, folder / "model.safetensors")
    words = [f"out={tmp_path / 'step-0'}", f"tokenizer={tiny_data / 'tokenizer.model'}"]
    assert main(["import", str(folder), *words]) == 0
    model, read, _ = load_checkpoint(tmp_path / "step-0")
    assert read.to_dict() == config.to_dict() | {"vocab_size": 384}
    with torch.no_grad():
        logits = model(arrays["input_ids"])
    if config.lm_head_type == "vocab_parallel":  # each lane's slice has grown
        logits = logits.unflatten(-1, (config.num_lanes, -1))[..., : config.vocab_size // config.num_lanes]
        logits = logits.flatten(-2)
    torch.testing.assert_close(logits[..., : config.vocab_size].double(), arrays["logits"], rtol=0, atol=1e-4)


def with_larger_vocabulary(
    config: LaneformerConfig, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights with a vocabulary of 384."""
    grown = dict(weights)
    for name in ("model.tok_embeddings.weight", "lm_head.weight", "lm_head.linear.weight"):
        if name in grown:
            value = grown[name]
            axis = 1 if value.ndim == 3 else 0
            rows = 384 // (config.num_lanes if value.ndim == 3 else 1) - value.shape[axis]
            shape = list(value.shape)
            shape[axis] = rows
            grown[name] = torch.cat([value, value.new_zeros(shape)], dim=axis)
    return grown


def released_config(config: LaneformerConfig) -> dict[str, Any]:
    """What an older release calls the same architecture, with the fields that it has besides."""
    content = config.to_dict()
    windowed, layers = content.pop("swa_layers"), config.num_hidden_layers
    assert content.pop("use_attention_comm") == config.use_mlp_comm == content.pop("use_mlp_comm")
    last = max(windowed, default=-1)
    return {
        **content,
        "model_type": "laneformer_tp",
        "architectures": ["LaneformerTPForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_laneformer_tp.LaneformerTPConfig"},
        "use_comm": config.use_mlp_comm,
        "sliding_window_n_layers": last + 1,
        "unclamped_layers": [i for i in range(layers) if i < last and i not in windowed],
        "multiple_of": 32,
        "depth_init": True,
        "use_flex_attn": False,
        "attn_mask_type": "causal",
        "use_cache": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "transformers_version": "4.57.1",
    }


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"sliding_window_n_layers": 3}, [0, 1, 2]),
        ({"sliding_window_n_layers": -2}, [3, 4]),
        ({"sliding_window_n_layers": 99}, [0, 1, 2, 3, 4]),
        ({"sliding_window_n_layers": -99}, [0, 1, 2, 3, 4]),
        ({"sliding_window_n_layers": 0}, []),
        ({"sliding_window_n_layers": 4, "unclamped_layers": [1, 4]}, [0, 2, 3]),
        ({"sliding_window_n_layers": 3, "swa_layers": [0, 1, 2]}, [0, 1, 2]),
        ({"swa_layers": [2], "unclamped_layers": [0]}, [2]),
        ({"sliding_window": None}, []),
    ],
)
def test_windowed_layers(fields: dict[str, Any], windowed: list[int]) -> None:
    content = {**small_config("base").to_dict(), "model_type": "laneformer"}
    del content["swa_layers"]
    config = read_config({**content, **fields}, has_head=True)
    assert list(config.swa_layers) == windowed
    assert config.sliding_window == (6 if windowed else None)


@pytest.mark.parametrize(
    ("fields", "missing", "name", "value"),
    [
        ({"use_comm": False}, ("use_attention_comm", "use_mlp_comm"), "use_mlp_comm", False),
        ({"use_comm": True}, ("use_attention_comm", "use_mlp_comm"), "use_attention_comm", True),
        ({"num_key_value_heads": None}, (), "num_key_value_heads", 8),
        ({}, ("num_key_value_heads",), "num_key_value_heads", 8),
        ({}, ("tie_word_embeddings",), "tie_word_embeddings", False),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            ("rope_theta",),
            "rope_theta",
            5e5,
        ),
    ],
)
def test_other_spellings(fields: dict[str, Any], missing: tuple[str, ...], name: str, value: Any) -> None:
    content = {**small_config("base").to_dict(), "model_type": "laneformer", **fields}
    assert getattr(read_config({k: v for k, v in content.items() if k not in missing}, True), name) == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; only laneformer and laneformer_tp"),
        (
            {"logit_softcap": 30.0},
            "logit_softcap = 30.0 is not known and might change what the model computes",
        ),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling must be None, got \{'factor': 8.0\}"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters must be of rope_type default"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 10000.0 but rope_parameters says 1.0"),
        ({"rope_parameters": {"factor": 2}}, "rope_parameters.factor is not known"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        ({"head_dim": 16}, "head_dim 16 must be hidden_size / num_attention_heads = 4"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types .* contradict swa_layers"),
        ({"use_comm": False}, "use_comm is False but use_attention_comm is True"),
        ({"sliding_window_n_layers": 2}, r"mean the layers \[0, 1\], but swa_layers says"),
        ({"sliding_window_n_layers": "2"}, "sliding_window_n_layers must be an integer"),
        ({"unclamped_layers": [1]}, "contradict each other"),
        ({"unclamped_layers": 1}, "unclamped_layers must be a list of integers"),
        ({"norm_eps": None}, "norm_eps must be a number"),
        ({"num_lanes": 3}, "is not divisible by num_lanes 3"),
    ],
)
def test_what_would_change_the_function_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    content = {**small_config("base").to_dict(), "model_type": "laneformer", **fields}
    with pytest.raises(ValueError, match=message):
        read_config(content, has_head=True)


def test_all_problems_are_told_at_once_and_no_field_has_two_meanings() -> None:
    content = {**small_config("base").to_dict(), "model_type": "laneformer", "x": 1, "y": 2}
    del content["norm_eps"]
    with pytest.raises(ValueError, match=r"(?s)norm_eps is missing.* x = 1 .* y = 2 "):
        read_config(content, has_head=True)
    assert not HARMLESS & set(IMPLIED)
    assert not (HARMLESS | set(IMPLIED)) & set(small_config("base").to_dict())


@pytest.fixture
def folder(tiny_data: Path, tmp_path: Path) -> Path:
    small_checkpoint("base", tiny_data / "tokenizer.model", tmp_path / "step-3")
    return export_checkpoint(tmp_path / "step-3", tmp_path / "folder", torch.float32, 100_000)


def test_pickles_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin: pickles, which can run any code"):
        import_folder(folder, tmp_path / "out")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        import_folder(folder, tmp_path / "out")
    # A pickle under the name of a safetensors file is not unpickled either.
    torch.save({}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        import_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            import_folder(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not [*tmp_path.glob(".*.tmp")]

    index_file = folder / "model.safetensors.index.json"
    text = index_file.read_text()
    index = json.loads(text)
    first = index["weight_map"]["model.norm.weight"]

    index_file.write_text(text.replace(first, "../elsewhere.safetensors"))
    refused("which is no safetensors file of the folder")
    index["weight_map"]["model.more.weight"] = first
    index_file.write_text(json.dumps(index))
    refused(f"{first} does not hold what .* says: model.more.weight")
    index_file.write_text(text)

    weights = load_file(folder / first)
    save_file({**weights, "model.norm.weight": torch.ones(7)}, folder / first)
    refused(r"model\.norm\.weight has shape \(7,\), expected \(32,\)")
    save_file({**weights, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, folder / first)
    refused("model.norm.weight is torch.int8")
    save_file(weights, folder / first)

    tokenizer = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").unlink()
    refused(r"tokenizer\.model is missing; name a SentencePiece model with tokenizer=FILE")
    (folder / "tokenizer.model").write_bytes(b"{}")
    refused("is not a SentencePiece model")
    (folder / "tokenizer.model").write_bytes(tokenizer)

    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text[:-9])
    refused(r"config\.json is not JSON")
    config.write_text(text.replace('"vocab_size": 384', '"vocab_size": 380'))
    refused(r"expected \(380, 32\)")
    config.write_text(text)
    import_folder(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="out exists already"):
        import_folder(folder, tmp_path / "out")


def test_a_tied_head_may_be_written_out_but_must_be_the_embedding(tiny_data: Path, tmp_path: Path) -> None:
    small_checkpoint("tied", tiny_data / "tokenizer.model", tmp_path / "step-3")
    folder = export_checkpoint(tmp_path / "step-3", tmp_path / "folder", torch.float32)
    file = folder / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    head = weights["model.tok_embeddings.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, file)
    import_folder(folder, tmp_path / "same")
    save_file({**weights, "lm_head.weight": head + 1}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        import_folder(folder, tmp_path / "other")


def test_a_template_in_the_tokenizer_configuration_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    import_folder(folder, tmp_path / "out")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    export_checkpoint(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == template


def test_export_mistakes(tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_checkpoint("base", tiny_data / "tokenizer.model", tmp_path / "step-3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    checkpoint = f"checkpoint={tmp_path / 'step-3'}"
    assert main(["export", checkpoint, f"out={tmp_path / 'full'}"]) == 2
    assert "full exists already" in capsys.readouterr().err
    assert [*(tmp_path / "full").iterdir()] == [tmp_path / "full" / "file"]
    assert main(["export", checkpoint, f"out={tmp_path / 'empty'}"]) == 0
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["dtype"] == "bfloat16"
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    tokenizer = (tiny_data / "tokenizer.model").read_bytes()
    write_checkpoint(tmp_path / "large", model.sizes, model.state_dict(), tokenizer, {})
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has values that are not finite in torch\.float16"
    ):
        export_checkpoint(tmp_path / "large", tmp_path / "half", torch.float16)
    assert not (tmp_path / "half").exists()
    assert not [*tmp_path.glob(".half*")]


def test_the_folder_may_be_given_without_its_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "one", "two", "out=x"]) == 2
    assert "'two' is not key=value; keys: path, out, tokenizer" in capsys.readouterr().err
    assert main(["import", "nowhere", "out=x"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert main(["import", "out=x"]) == 2
    assert "path= is needed" in capsys.readouterr().err
