"""A slow Laneformer in numpy float64, written from DESIGN's description alone, to hold the fast one against.

One token, one lane and one head at a time, on released weight names and shapes. Nothing is shared with the
package but the configuration's fields.
"""

import numpy as np


def reference_logits(config, weights, ids, positions=None):
    """Logits (B, S, V) of token ids (B, S); positions (B, S) start again at 0 in every packed document."""
    if positions is None:
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return np.stack([_row(config, weights, i, p) for i, p in zip(ids, positions, strict=True)])


def _row(c, weights, ids, positions):
    lanes = range(c.num_lanes)
    partials = {"attention": [], "mlp": []}  # [layer][lane] → (S, D)
    x = [weights["model.tok_embeddings.weight"][ids] for _ in lanes]
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        states = [_normed(c, weights, f"{name}.attention_norm", x[lane], lane) for lane in lanes]
        outputs = [_attention(c, weights, name, layer, lane, states[lane], positions) for lane in lanes]
        _add(c, layer, "attention", outputs, partials["attention"], x)
        states = [_normed(c, weights, f"{name}.ffn_norm", x[lane], lane) for lane in lanes]
        outputs = [_swiglu(weights, f"{name}.feed_forward", lane, states[lane]) for lane in lanes]
        _add(c, layer, "mlp", outputs, partials["mlp"], x)
    return _head(c, weights, x)


def _add(c, layer, kind, outputs, partials, x):
    """Add one kind of module's partial outputs to each lane's residual, and remember them for later layers."""
    comm = c.use_attention_comm if kind == "attention" else c.use_mlp_comm
    delay = c.broadcast_delay
    partials.append(outputs)
    for lane in range(c.num_lanes):
        if delay == 0 or (layer < delay and c.use_early_comm):
            change = sum(outputs)
        elif layer < delay or not comm:
            change = np.sqrt(c.num_lanes) * outputs[lane]
        else:
            earlier = partials[layer - delay]
            change = outputs[lane] + sum(earlier[j] for j in range(c.num_lanes) if j != lane)
        x[lane] = x[lane] + change


def _normed(c, weights, name, x, lane):
    per_lane = weights.get(f"{name}.scale")
    scale = weights[f"{name}.weight"] if per_lane is None else per_lane[lane]
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * scale


def _turned(c, head, positions):
    """(S, E): each neighbouring pair is a complex number, turned by its position times its frequency."""
    width = head.shape[-1]
    result = np.empty_like(head)
    for pair in range(width // 2):
        angle = positions * c.rope_theta ** (-2 * pair / width)
        turned = (head[:, 2 * pair] + 1j * head[:, 2 * pair + 1]) * np.exp(1j * angle)
        result[:, 2 * pair], result[:, 2 * pair + 1] = turned.real, turned.imag
    return result


def _attention(c, weights, name, layer, lane, x, positions):
    width = c.hidden_size // c.num_attention_heads
    queries_per_key = c.num_attention_heads // c.num_key_value_heads
    q, k, v = (x @ weights[f"{name}.attention.w{w}.weight"][lane].T for w in "qkv")
    heads = []
    for head in range(c.num_attention_heads // c.num_lanes):
        own = slice(head * width, (head + 1) * width)
        shared = slice(head // queries_per_key * width, (head // queries_per_key + 1) * width)
        query, key = _turned(c, q[:, own], positions), _turned(c, k[:, shared], positions)
        heads.append(
            np.stack([_look_back(c, layer, t, query, key, v[:, shared], positions) for t in range(len(x))])
        )
    return np.concatenate(heads, axis=-1) @ weights[f"{name}.attention.wo.weight"][lane].T


def _look_back(c, layer, token, query, key, value, positions):
    """What one token reads: walk back to its document's start, or to the window's end."""
    seen = [token]
    while positions[seen[-1]] != 0 and not (layer in c.swa_layers and len(seen) == c.sliding_window):
        seen.append(seen[-1] - 1)
    scores = key[seen] @ query[token] / np.sqrt(query.shape[-1])
    odds = np.exp(scores - scores.max())
    return odds @ value[seen] / odds.sum()


def _swiglu(weights, name, lane, x):
    gate, value = x @ weights[f"{name}.w1.weight"][lane].T, x @ weights[f"{name}.w3.weight"][lane].T
    return (gate / (1 + np.exp(-gate)) * value) @ weights[f"{name}.w2.weight"][lane].T


def _head(c, weights, x):
    if c.pre_norm_lane_agg:
        states = [_normed(c, weights, "model.norm", sum(x), lane=None)]
    else:
        states = [_normed(c, weights, "model.norm", x[lane], lane) for lane in range(c.num_lanes)]
    if c.lm_head_type == "lane":
        return np.concatenate(states, axis=-1) @ weights["lm_head.linear.weight"].T
    if c.lm_head_type == "vocab_parallel":
        slices = weights["lm_head.weight"]
        return np.concatenate([states[lane] @ slices[lane].T for lane in range(c.num_lanes)], axis=-1)
    head = weights["model.tok_embeddings.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return sum(states) / len(states) @ head.T
