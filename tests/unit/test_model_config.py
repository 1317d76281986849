"""Every check of the model configuration, and the arithmetic of the shipped sizes."""

from typing import Any

import pytest

from model.config import LaneformerConfig, load_size, size_names
from tests.architectures import SMALL, architecture

GOOD: dict[str, Any] = SMALL | {"vocab_size": 96, "swa_layers": [0, 1, 2], "rope_theta": 10000}

# Each change, and what the one error must say: both values wherever two disagree.
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"hidden_size": 36}, ["hidden_size 36", "num_attention_heads 8"]),
    ({"hidden_size": 40}, ["40 / 8 = 5", "even"]),
    ({"num_attention_heads": 2, "num_key_value_heads": 2}, ["num_attention_heads 2", "num_lanes 4"]),
    ({"num_key_value_heads": 2}, ["num_key_value_heads 2", "num_lanes 4"]),
    ({"num_key_value_heads": 12}, ["num_attention_heads 8", "num_key_value_heads 12"]),
    ({"intermediate_size": 66}, ["intermediate_size 66", "num_lanes 4"]),
    ({"broadcast_delay": 6}, ["0..5", "got 6"]),
    ({"broadcast_delay": -1}, ["0..5", "got -1"]),
    ({"swa_layers": [0, 5]}, ["layers 0..4", "got [5]"]),
    ({"swa_layers": [-1]}, ["got [-1]"]),
    ({"swa_layers": [1, 0]}, ["ascend", "[1, 0]"]),
    ({"swa_layers": [1, 1]}, ["without repeats", "[1, 1]"]),
    ({"sliding_window": None}, ["swa_layers [0, 1, 2] need sliding_window"]),
    ({"swa_layers": []}, ["sliding_window 6 has no effect"]),
    ({"sliding_window": 0}, ["sliding_window must be at least 1 token, got 0"]),
    ({"lm_head_type": "vocab_parallel", "vocab_size": 98}, ["vocab_size 98", "num_lanes 4"]),
    ({"lm_head_type": "lane", "pre_norm_lane_agg": True}, ["pre_norm_lane_agg", "got lane"]),
    (
        {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
        ["tie_word_embeddings", "vocab_parallel"],
    ),
    ({"lm_head_type": "shared"}, ["replicate, lane, vocab_parallel", "'shared'"]),
    ({"vocab_size": 0}, ["vocab_size must be at least 1, got 0"]),
    ({"num_lanes": 0}, ["num_lanes must be at least 1, got 0"]),
    ({"max_position_embeddings": -4}, ["max_position_embeddings", "-4"]),
    ({"rope_theta": 0.0}, ["rope_theta must be positive", "0.0"]),
    ({"norm_eps": float("nan")}, ["norm_eps", "nan"]),
    ({"norm_eps": "1e-5"}, ["norm_eps must be a number, got '1e-5'"]),
    ({"hidden_size": 32.0}, ["hidden_size must be an integer, got 32.0"]),
    ({"num_lanes": True}, ["num_lanes must be an integer, got True"]),
    ({"use_mlp_comm": 1}, ["use_mlp_comm must be true or false, got 1"]),
    ({"swa_layers": "0,1"}, ["swa_layers must be a list of integers, got '0,1'"]),
    ({"swa_layers": [0.0]}, ["swa_layers must be a list of integers"]),
    ({"sliding_window": 6.5}, ["sliding_window must be an integer or null, got 6.5"]),
    ({"num_layers": 5}, ["unknown key 'num_layers'", "num_hidden_layers"]),
]


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_wrong_value_is_named(change: dict[str, Any], says: list[str]):
    with pytest.raises(ValueError, match="invalid model configuration") as error:
        LaneformerConfig.from_dict({**GOOD, **change})
    for part in says:
        assert part in str(error.value)


def test_missing_keys_and_other_shapes_are_named():
    mapping = {key: value for key, value in GOOD.items() if key != "num_lanes"}
    with pytest.raises(ValueError, match="missing key 'num_lanes'"):
        LaneformerConfig.from_dict(mapping)
    with pytest.raises(ValueError, match="expected a mapping"):
        LaneformerConfig.from_dict(None)  # type: ignore[arg-type]


def test_all_problems_come_at_once():
    with pytest.raises(ValueError, match="invalid") as error:
        LaneformerConfig.from_dict(
            {**GOOD, "intermediate_size": 66, "broadcast_delay": 9, "swa_layers": [2, 1]}
        )
    assert str(error.value).count("\n- ") == 3


def test_round_trip():
    config = LaneformerConfig.from_dict(GOOD)
    assert config.to_dict() == GOOD
    assert LaneformerConfig.from_dict(config.to_dict()) == config
    assert type(config.rope_theta) is float
    assert config.swa_layers == (0, 1, 2)


@pytest.mark.parametrize("delay", range(6))
def test_exchanges(delay: int):
    config = LaneformerConfig.from_dict(
        {**GOOD, "broadcast_delay": delay, "use_attention_comm": False, "use_early_comm": True}
    )
    late = range(delay, 5) if delay else []
    assert [config.exchange(i, "attention") for i in range(5)] == ["sum"] * (5 - len(late)) + ["local"] * len(
        late
    )
    assert [config.exchange(i, "mlp") for i in range(5)] == ["sum"] * (5 - len(late)) + ["delayed"] * len(
        late
    )
    assert not any(config.is_awaited(i, "attention") for i in range(5))
    assert [config.is_awaited(i, "mlp") for i in range(5)] == [delay > 0 and i + delay < 5 for i in range(5)]


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        ({}, "..xx..xx"),  # what was local arrives; what is sent last arrives nowhere
        ({"use_early_comm": True}, "..xx..xx"),
        ({"use_mlp_comm": False}, "xxxxxxxx"),
        ({"use_early_comm": True, "use_mlp_comm": False}, "..xxxxxx"),
        ({"use_early_comm": True, "use_attention_comm": False, "use_mlp_comm": False}, "..xxxxxx"),
        ({"broadcast_delay": 0}, "........"),
        ({"num_lanes": 1}, "........"),
    ],
    ids=str,
)
def test_layers_that_change_what_a_lane_has_for_itself(change: dict[str, Any], changes: str):
    config = architecture(num_hidden_layers=8, **change)
    assert "".join(".x"[config.changes_rest(range(i, i + 1))] for i in range(8)) == changes
    assert config.changes_rest(range(8)) == ("x" in changes)


def test_the_2b_size():
    config = load_size("2b")
    assert config.num_parameters() == 2_320_069_632
    assert config.decode_bytes(2) == 4_443_537_408  # 4.44 GB in FP16
    assert config.flops_per_token(4096) == 14_273_925_120
    # Ten layers keep 2048 tokens and five 4096, each 16 heads of 96 for keys and for values.
    assert config.kv_bytes(4096, 2) == 2 * 16 * 96 * (10 * 2048 + 5 * 4096) * 2
    assert config.kv_bytes(1000, 4) == 2 * 16 * 96 * 15 * 1000 * 4


def test_dense_twins_have_equal_size():
    laned = [name for name in size_names() if not name.endswith("_dense")]
    assert laned == ["smoke", "125m", "350m", "2b"]
    for name in laned:
        config, twin = load_size(name), load_size(f"{name}_dense")
        assert (config.num_lanes, config.broadcast_delay) == (8, 2)
        assert (twin.num_lanes, twin.broadcast_delay) == (1, 0)
        assert twin.num_parameters() == pytest.approx(config.num_parameters(), rel=0.01)
        assert twin.flops_per_token(512) == pytest.approx(config.flops_per_token(512), rel=0.01)


def test_unknown_size_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown model size '3b'.*125m.*smoke"):
        load_size("3b")


@pytest.mark.parametrize("seq_len", [1, 5, 6, 7, 64])
def test_attended_keys_counts_the_mask(seq_len: int):
    config = LaneformerConfig.from_dict(GOOD)
    for window in (None, 1, 6):
        seen = [min(query + 1, window or seq_len) for query in range(seq_len)]
        assert config.attended_keys(seq_len, window) == pytest.approx(sum(seen) / seq_len)
