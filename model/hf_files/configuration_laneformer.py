"""Sizes of a Laneformer, as `transformers` reads them from config.json.

The network is L lanes side by side, each with its own weights and residual stream. A module's output on one lane
reaches the other lanes `broadcast_delay` layers later, so that a decoder with one device per lane never waits.
"""

from transformers import PretrainedConfig


class LaneformerConfig(PretrainedConfig):
    """The fields of config.json; the defaults are the 2.3B size.

    num_lanes, broadcast_delay: lanes, and layers until a partial output arrives on the other lanes (0: at once, which
    is standard tensor parallelism). use_early_comm: whether lanes sum at once in the layers before the first arrival.
    use_attention_comm, use_mlp_comm: whether lanes exchange that kind of output after them. lm_head_type: replicate
    (one head on the mean over lanes), lane (one on all lanes side by side) or vocab_parallel (each lane gives its
    slice). pre_norm_lane_agg: normalise the lanes' sum once at the end. replicated_rmsn_scale: lanes share norm
    scales. swa_layers: layers that see the last sliding_window tokens, the current one included.
    """

    model_type = "laneformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=3072,
        num_hidden_layers=15,
        num_attention_heads=32,
        num_key_value_heads=16,
        intermediate_size=12288,
        num_lanes=8,
        broadcast_delay=2,
        use_early_comm=False,
        use_attention_comm=True,
        use_mlp_comm=True,
        lm_head_type="replicate",
        pre_norm_lane_agg=False,
        replicated_rmsn_scale=True,
        sliding_window=2048,
        swa_layers=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
        rope_theta=10000.0,
        norm_eps=1e-5,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.intermediate_size = intermediate_size
        self.num_lanes = num_lanes
        self.broadcast_delay = broadcast_delay
        self.use_early_comm = use_early_comm
        self.use_attention_comm = use_attention_comm
        self.use_mlp_comm = use_mlp_comm
        self.lm_head_type = lm_head_type
        self.pre_norm_lane_agg = pre_norm_lane_agg
        self.replicated_rmsn_scale = replicated_rmsn_scale
        self.sliding_window = sliding_window
        self.swa_layers = list(swa_layers)
        self.rope_theta = rope_theta
        self.norm_eps = norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        # How transformers asks which layers keep a window only: its caches are built from this.
        kwargs["layer_types"] = [
            "sliding_attention" if i in self.swa_layers else "full_attention"
            for i in range(num_hidden_layers)
        ]
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    def window(self, layer):
        """Tokens that the layer sees, the current one included; None means all."""
        return self.sliding_window if layer in self.swa_layers else None

    def exchange(self, layer, kind):
        """How lanes share a layer's outputs of one kind ("attention", "mlp"): sum, local or delayed."""
        if self.broadcast_delay == 0 or self.num_lanes == 1:
            return "sum"
        if layer < self.broadcast_delay:
            return "sum" if self.use_early_comm else "local"
        on = self.use_attention_comm if kind == "attention" else self.use_mlp_comm
        return "delayed" if on else "local"
