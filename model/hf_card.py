"""The model card (README.md) of an exported folder: sizes, data, evaluation, licences, how to use it.

Facts come from the run directory around the checkpoint, as far as it has them: `resolved.yaml` of the run and of
those that it continued (`train.init_from`) for the data, the manifests of the prepared data for licences, and
`evals/step-N.json` for the scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from model.config import LaneformerConfig


def model_card(config: LaneformerConfig, dtype: str, checkpoint: Path, has_chat_template: bool) -> str:
    """The card of a checkpoint (`step-N`, usually in `runs/<name>/checkpoints/`), as Markdown."""
    run = checkpoint.resolve().parent.parent
    phases = _phases(run)
    step = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["step"]
    name = phases[-1]["name"] if phases else checkpoint.resolve().name
    scores = run / "evals" / f"step-{step}.json" if phases else None
    parts = [
        _header(),
        f"# {name}, step {step}",
        "A Laneformer: a Transformer in lanes, made for fast decoding of single requests. The output of a module on "
        "one lane reaches the other lanes a few layers later (Delayed Tensor Parallelism), so that devices that "
        "hold a lane each exchange data behind computation.",
        _usage(has_chat_template),
        "## Size\n\n" + _sizes(config, dtype),
        "## Data\n\n" + _data(phases),
        "## Evaluation\n\n" + _evaluation(scores),
        "## Licence\n\n" + LICENCE,
        "## Limits\n\n" + LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


LICENCE = (
    "- `modeling_laneformer.py` and `configuration_laneformer.py`: Apache-2.0.\n"
    "- Weights: the licence is for whoever publishes them to choose, within the terms of the training data. This "
    "card names none.\n"
    "- Tokenizer: it was brought by whoever trained the model and has a licence of its own (Llama 2's has, for "
    "one). Whether it may be passed on is yours to check before you publish this folder."
)

LIMITS = (
    "The model was trained on text from public sources and repeats their mistakes and biases. What it writes, code "
    "above all, has to be checked before it is used. Positions beyond max_position_embeddings were never trained. "
    "`transformers` runs all lanes on one device: it shows what the model computes, not how fast the architecture "
    "can decode.\n\n"
    "In a text, `<s>` and `</s>` become control tokens, as the chat template needs. Tokenise text that is not yours "
    "with `split_special_tokens=True`; the ids are then exactly those of `tokenizer.model`, but for a literal "
    "U+2581, which is spelled in bytes here, as in training, and is not taken for a space."
)


def _header() -> str:
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- laneformer\n- custom_code\n---"


def _usage(has_chat_template: bool) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        'inputs = tokenizer("def fibonacci(n):\\n", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
    ]
    if has_chat_template:
        lines += [
            "",
            'messages = [{"role": "user", "content": "Reverse a list in Python."}]',
            "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="
            '"pt", return_dict=True)',
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _sizes(config: LaneformerConfig, dtype: str) -> str:
    windowed = len(config.swa_layers)
    rows = {
        "parameters": f"{config.num_parameters():,}",
        "weights": dtype,
        "layers": f"{config.num_hidden_layers}, {windowed} of them with a sliding window"
        + (f" of {config.sliding_window:,} tokens" if windowed else ""),
        "lanes": f"{config.num_lanes}, outputs arrive {config.broadcast_delay} layers later",
        "hidden width": f"{config.hidden_size:,} a lane",
        "SwiGLU width": f"{config.intermediate_size:,} over all lanes",
        "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value",
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,}",
    }
    return _table(["", ""], [[key, value] for key, value in rows.items()])


def _phases(run: Path) -> list[dict[str, Any]]:
    """The configurations of the run and of those that it continues, first phase first; [] outside a run."""
    phases: list[dict[str, Any]] = []
    while (run / "resolved.yaml").is_file() and len(phases) < 16:
        resolved = yaml.safe_load((run / "resolved.yaml").read_text(encoding="utf-8"))
        phases.insert(0, resolved)
        earlier = resolved["train"]["init_from"]
        if earlier is None:
            break
        named = _runs_folder(run, resolved["name"]) / earlier
        run = (
            named
            if named.is_dir() and not (named / "manifest.json").exists()
            else Path(earlier).parent.parent
        )
    return phases


def _runs_folder(run: Path, name: str) -> Path:
    """The folder that holds runs by name; a name may have slashes."""
    return run.parents[len(Path(name).parts) - 1]


def _data(phases: list[dict[str, Any]]) -> str:
    if not phases:
        return "Not known: the checkpoint was exported outside the run directory that it was trained in."
    rows = []
    for phase in phases:
        data = phase["data"]
        weights = sorted((data.get("weights") or {}).items(), key=lambda item: (-item[1], item[0]))
        mixture = ", ".join(f"{source} {100 * weight:.4g} %" for source, weight in weights)
        rows.append([phase["name"], data["name"], f"{data['tokens']:,}", mixture])
    budgets = _table(["run", "recipe", "token budget", "mixture"], rows)
    return budgets + "\n\n" + _table(["source", "licence", "taken from"], _sources(phases))


def _sources(phases: list[dict[str, Any]]) -> list[list[str]]:
    """Name, licence and origin of each source, as the manifests of the prepared data have them."""
    rows: dict[str, list[str]] = {}
    for data in (phase["data"] for phase in phases):
        for source in data.get("weights") or {}:
            manifest = Path(data["root"]) / source / "train" / "manifest.json"
            origin: dict[str, Any] = {}
            if manifest.is_file():
                origin = json.loads(manifest.read_text(encoding="utf-8")).get("origin") or {}
            taken = " ".join(str(origin[key]) for key in ("name", "revision") if origin.get(key))
            rows[source] = [source, str(origin.get("licence") or "not on record"), taken or "not on record"]
    return list(rows.values())


def _evaluation(file: Path | None) -> str:
    if file is None or not file.is_file():
        return "None on record for this checkpoint."
    rows = []
    for entry in json.loads(file.read_text(encoding="utf-8"))["suites"]:
        notes = "; ".join(entry["notes"])
        totals = {k: v for k, v in entry["scores"].items() if "_task/" not in k}
        for score, value in totals.items():
            rows.append([entry["suite"], score, f"{value:.4f}", entry["settings_hash"], notes])
    return _table(["suite", "score", "value", "settings", "notes"], rows)


def _table(headers: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(headers), line(["---"] * len(headers)), *map(line, rows)])
