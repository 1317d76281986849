"""The decoding engine in one process: several lane groups as threads, the identity of the delay, buffers, graphs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import Kind, LaneformerConfig
from model.decode import Decoder, Sampling
from model.delayed_tp import LaneGroup, Part
from model.exchange import Alone, Exchange, SocketExchange
from model.kv_cache import GRAPH_SLOTS, KeyValueCache
from model.laneformer import Laneformer, build_model
from model.sockets import Mesh, Peer
from tests.benchmarks import decode_gpu
from tests.parallel.test_delayed_tp import BASE, VARIANTS


def model_of(change: dict[str, Any]) -> Laneformer:
    config = LaneformerConfig.from_dict(BASE | change)
    return build_model(config, dtype=torch.float64).requires_grad_(False).eval()


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def meshes(size: int, timeout: float = 30) -> list[Mesh]:
    """Connected meshes for `size` threads."""
    peers: list[dict[int, Peer]] = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a):
            ends = socket.socketpair()
            peers[a][b], peers[b][a] = Peer(ends[0], f"thread {b}"), Peer(ends[1], f"thread {a}")
    return [Mesh(rank, dict(sorted(peers[rank].items())), timeout) for rank in range(size)]


def in_threads(size: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """work(exchange) for every rank of an exchange between threads; the results by rank."""
    exchanges: list[Exchange] = [Alone()] if size == 1 else [SocketExchange(mesh) for mesh in meshes(size)]

    def whole(exchange: Exchange) -> Any:
        result = work(exchange)
        exchange.close()  # sends what is left, for which others may wait
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(whole, exchanges))


@st.composite
def architectures(draw: st.DrawFn) -> dict[str, Any]:
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 5))
    windowed = sorted(draw(st.sets(st.integers(0, layers - 1))))
    head = draw(st.sampled_from(["replicate", "lane", "vocab_parallel"]))
    return {
        "vocab_size": 8 * draw(st.integers(2, 12)),
        "hidden_size": 32 * draw(st.integers(1, 2)),
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": draw(st.sampled_from([8, 16])),
        "intermediate_size": 8 * draw(st.integers(1, 5)),
        "num_lanes": lanes,
        "broadcast_delay": draw(st.integers(0, layers)) if lanes > 1 else 0,
        "use_early_comm": draw(st.booleans()),
        "use_attention_comm": draw(st.booleans()),
        "use_mlp_comm": draw(st.booleans()),
        "lm_head_type": head,
        "pre_norm_lane_agg": draw(st.booleans()) and head == "replicate",
        "replicated_rmsn_scale": draw(st.booleans()),
        "sliding_window": draw(st.integers(1, 12)) if windowed else None,
        "swa_layers": windowed,
        "max_position_embeddings": 40,
        "tie_word_embeddings": draw(st.booleans()) and head == "replicate",
    }


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    change=architectures(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    chunk=st.integers(1, 31),
    processes=st.sampled_from([1, 2, 4]),
)
def test_random_architectures(change: dict[str, Any], lengths: list[int], chunk: int, processes: int) -> None:
    model = model_of(change)
    processes = min(processes, model.sizes.num_lanes)
    vocabulary = model.sizes.vocab_size
    prompts = [[i % vocabulary for i in ids(length, seed)] for seed, length in enumerate(lengths)]

    def work(exchange: Exchange) -> tuple[list[list[int]], torch.Tensor]:
        decoder, sampling, tokens, logits = (
            Decoder(LaneGroup.of(model, exchange), prompts, 6),
            Sampling(),
            [],
            [],
        )
        logits_BV = decoder.prefill(chunk)
        for _ in range(6):
            logits.append(logits_BV.clone())
            drawn_B, _ = decoder.draw(logits_BV, sampling, [], cancel=False)
            tokens.append(drawn_B.tolist())
            logits_BV = decoder.advance(drawn_B[:, None])
        return tokens, torch.stack(logits)

    results = in_threads(processes, work)
    tokens = results[0][0]
    assert all(other == tokens for other, _ in results)
    logits = torch.cat([part for _, part in results], dim=-1)
    for row, prompt in enumerate(prompts):
        whole = prompt + [step[row] for step in tokens]
        expected = model(torch.tensor([whole[:-1]]))[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits[:, row], expected, rtol=0, atol=1e-9)
        assert whole[len(prompt) :] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("change", [{}, {"use_early_comm": True}, {"broadcast_delay": 3}], ids=str)
def test_a_stream_is_what_all_know_plus_its_own_last_partials(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity that lets processes exchange sums: lanes differ by their own last `delay` partials only, and by
    what early layers added in their own way."""
    model = model_of(change)
    sizes, seen = model.sizes, []
    add = LaneGroup._add

    def spy(
        group: LaneGroup, x_LTD: torch.Tensor, o_LTD: torch.Tensor, layer: int, kind: Kind, way: Any
    ) -> None:
        before = x_LTD.clone() if not seen else None
        add(group, x_LTD, o_LTD, layer, kind, way)
        seen.append((before, o_LTD.clone(), layer, kind, x_LTD.clone()))

    monkeypatch.setattr(LaneGroup, "_add", spy)
    Decoder(LaneGroup.of(model), [ids(30)], 1).prefill()
    assert len(seen) == 2 * sizes.num_hidden_layers
    start_LTD = seen[0][0]
    for m, (_, _, layer, kind, x_LTD) in enumerate(seen):
        known_LTD, own_LTD = start_LTD.clone(), torch.zeros_like(start_LTD)
        for _, o_LTD, earlier, its_kind, _ in seen[: m + 1]:
            # While attention is being added, this layer has not collected what its SwiGLU awaits.
            now = layer if its_kind == "attention" or kind == "mlp" else layer - 1
            landed = earlier <= now - sizes.broadcast_delay
            known_LTD += o_LTD.sum(0) * landed
            mode = sizes.exchange(earlier, its_kind)
            if mode == "sum":  # added by all at once, and on the other lanes a second time when it lands
                known_LTD += o_LTD.sum(0)
                own_LTD -= o_LTD * landed
            else:
                own_LTD += o_LTD * (not landed)
            if mode == "local":
                own_LTD += (sizes.num_lanes**0.5 - 1) * o_LTD
        torch.testing.assert_close(x_LTD, known_LTD + own_LTD, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["as released", "lane head", "vocab parallel head", "early comm"])
@pytest.mark.parametrize("lengths", [[30], [3, 17]])
def test_fixed_shapes_for_graphs_change_nothing(
    name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph captures: all slots up to a multiple are attended to, those without a token masked."""
    monkeypatch.setattr("model.kv_cache.GRAPH_SLOTS", 16)
    model = model_of(VARIANTS[name])
    group, prompts = LaneGroup.of(model), [ids(length, length) for length in lengths]
    plain = Decoder(group, prompts, 60)
    fixed = Decoder(group, prompts, 60)
    lanes, like = model.sizes.num_lanes, torch.empty(0, dtype=torch.float64)
    fixed.cache = KeyValueCache(
        model.sizes, plain.cache.padding_B, plain.cache.capacity, like, lanes, graphs=True
    )
    expected, got = plain.prefill().clone(), fixed.prefill().clone()
    addresses = set()
    for token in range(60):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        tokens_B1 = torch.full((len(lengths), 1), token)
        expected, got = plain.advance(tokens_B1).clone(), fixed.advance(tokens_B1).clone()
        steps = [layer.step for layer in fixed.cache.layers]
        assert all(step and step.held in (16, 24, 32, 48, 64, 80, 90, 77) for step in steps)
        addresses.add(tuple(step.mask.data_ptr() for step in steps if step and step.mask is not None))
    assert len(addresses) == 1
    assert GRAPH_SLOTS == 256


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plain_functions_that_gpus_run(name: str) -> None:
    model, tokens = model_of(VARIANTS[name]), ids(60)

    def work(exchange: Exchange) -> torch.Tensor:
        group = LaneGroup.of(model, exchange)
        group.buffers.on = False
        decoder = Decoder(group, [tokens[:50]], 60)
        logits = [decoder.prefill(30)] + [decoder.advance(torch.tensor([[token]])) for token in tokens[50:]]
        return torch.cat(logits)

    expected = model(torch.tensor([tokens]))[0, 49:]
    for size in (1, 2):
        got = torch.cat(in_threads(size, work), dim=-1)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["as released", "no delay", "early comm", "tied"])
def test_a_token_takes_no_new_memory(name: str) -> None:
    """In the steady state of one sequence, the model's step makes no tensor; drawing the token is not counted."""
    group = LaneGroup.of(build_model(LaneformerConfig.from_dict(BASE | VARIANTS[name])).requires_grad_(False))
    decoder, token = Decoder(group, [ids(40)], 30), torch.tensor([[1]])
    decoder.prefill()
    for _ in range(3):
        decoder.advance(token)
    with torch.profiler.profile(profile_memory=True) as profile:
        decoder.advance(token)
    taken = [(event.key, event.self_cpu_memory_usage) for event in profile.key_averages()]
    assert sum(max(0, size) for _, size in taken) == 0, [entry for entry in taken if entry[1] > 0]


def test_messages_use_the_same_buffers_again() -> None:
    model = model_of({})

    def work(exchange: Exchange) -> list[int]:
        decoder, made = Decoder(LaneGroup.of(model, exchange), [ids(10)], 20), []
        decoder.prefill()
        for _ in range(20):
            decoder.advance(torch.tensor([[1]]))
            assert isinstance(exchange, SocketExchange)
            made.append(exchange.slots.made)
        return made

    for made in in_threads(2, work):
        assert made[3] == made[-1]


def test_each_process_holds_its_share() -> None:
    model = build_model(LaneformerConfig.from_dict(BASE | {"vocab_size": 96})).requires_grad_(False)
    whole = LaneGroup.of(model)
    assert whole.weight_bytes() == 4 * model.sizes.num_parameters()
    assert whole.layers[0].wqkv.nbytes == model.state_dict()["layers.0.attention.wqkv.weight"].nbytes

    def work(exchange: Exchange) -> tuple[int, int]:
        group = LaneGroup.of(model, exchange)
        return group.weight_bytes(), Decoder(group, [ids(10)], 20).cache.bytes()

    norms = 4 * 64 * (2 * 5 + 1)
    for weights, cache in in_threads(4, work):
        zeros = 2 * 64 * 4
        assert weights == 4 * model.sizes.part_parameters(4) + zeros
        assert weights == (whole.weight_bytes() - norms) // 4 + norms + zeros
        assert cache == Decoder(whole, [ids(10)], 20).cache.bytes() // 4


def test_lanes_that_cannot_be_dealt_out() -> None:
    with pytest.raises(ValueError, match="3 processes cannot share 8 lanes"):
        Part.of(LaneformerConfig.from_dict(BASE), 0, 3)


def test_the_gpu_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_gpu, "TOKENS", 2)
    monkeypatch.setattr(decode_gpu, "REPEATS", 1)
    rows = decode_gpu.measure("smoke", torch.float32, torch.device("cpu"), context=8)
    assert [row["row"].split(",")[0] for row in rows] == [
        "memory read",
        "one process",
        "one lane of 8",
        "8 GPUs",
    ]
    assert all(row["tokens/s"] > 0 for row in rows[1:])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_the_largest_part_is_as_computed(name: str, processes: int) -> None:
    model = build_model(LaneformerConfig.from_dict(BASE | VARIANTS[name])).requires_grad_(False)
    held = []
    for rank in range(processes):
        part = Part.of(model.sizes, rank, processes)
        parameters = {id(p): (n, p) for n, p in model.named_parameters()}  # a tied one once
        held.append(sum(part.cut(name, p, model.sizes).numel() for name, p in parameters.values()))
    assert max(held) == model.sizes.part_parameters(processes)
