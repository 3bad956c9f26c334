"""Tiny random models that embed or rank, as checkpoints with the names that hubs have.

Weights depend on nothing but their names and shapes, so that the reference vectors in
``tests/engine/embedding/references.json`` are those of the same weights in PyTorch
(`tests.engine.embedding.make_references`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 320
MAX_TOKENS = 520
REFERENCES = Path(__file__).parent / "engine" / "embedding" / "references.json"
Ending = Literal["encoder", "decoder"]
_SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3,
          "num_attention_heads": 4, "intermediate_size": 96, "pad_token_id": 0}  # fmt: skip
_BERT = _SMALL | {
    "max_position_embeddings": MAX_TOKENS, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}  # fmt: skip
_ROBERTA = _BERT | {
    "model_type": "xlm-roberta", "max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1,
    "type_vocab_size": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip
_MODERN = _SMALL | {
    "model_type": "modernbert", "max_position_embeddings": MAX_TOKENS, "local_attention": 32,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
    "norm_eps": 1e-5, "hidden_activation": "gelu", "classifier_pooling": "mean",
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_DECODER = _SMALL | {
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": MAX_TOKENS, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ONE = {"id2label": {"0": "LABEL_0"}}


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint."""

    architecture: str
    config: Mapping[str, Any]
    pooling: str = ""  # of sentence-transformers; empty: the checkpoint does not say
    normalizes: bool = True
    dense: Sequence[tuple[int, str]] = ()  # width and activation
    ranks: bool = False
    task: str = "auto"  # that has to be said
    prompts: Mapping[str, str] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "bert": Kind("BertModel", _BERT | {"model_type": "bert"}, "mean",
                 prompts={"query": "query: ", "document": "passage: "}),
    "bert_cls": Kind("BertModel", _BERT | {"model_type": "bert"}, "cls", normalizes=False),
    "xlm_roberta": Kind("XLMRobertaModel", _ROBERTA, "mean"),
    "modernbert": Kind("ModernBertModel", _MODERN, "cls"),
    "nomic": Kind("NomicBertModel", _BERT | {"model_type": "nomic_bert", "hidden_act": "silu",
                  "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, "mean"),
    "qwen3": Kind("Qwen3Model", _DECODER | {"model_type": "qwen3"}, "lasttoken",
                  prompts={"query": "Instruct: find\nQuery:"}),
    "mistral": Kind("MistralModel", _DECODER | {"model_type": "mistral", "sliding_window": None},
                    "lasttoken"),
    "gemma": Kind("Gemma3TextModel", _DECODER | {"model_type": "gemma3_text", "sliding_window": 32,
                  "num_hidden_layers": 6,
                  "use_bidirectional_attention": True, "query_pre_attn_scalar": 16,
                  "_sliding_window_pattern": 6, "rope_local_base_freq": 10000.0,
                  "hidden_activation": "gelu_pytorch_tanh"}, "mean",
                  dense=((128, "Identity"), (64, "Identity"))),
    "bert_reranker": Kind("BertForSequenceClassification", _BERT | {"model_type": "bert"} | ONE,
                          ranks=True),
    "xlm_roberta_reranker": Kind("XLMRobertaForSequenceClassification", _ROBERTA | ONE,
                                 ranks=True),
    "modernbert_reranker": Kind("ModernBertForSequenceClassification", _MODERN | ONE, ranks=True),
    "qwen3_reranker": Kind("Qwen3ForCausalLM", _DECODER | {"model_type": "qwen3"}, ranks=True,
                           task="rerank"),
}  # fmt: skip


def weights(kind: Kind, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights with these ``shapes``."""
    gemma = kind.config["model_type"] == "gemma3_text"
    found = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if "norm" in name.lower() and name.endswith("weight"):
            found[name] = 0.1 * noise + (0 if gemma else 1)
        else:
            found[name] = noise * (0.1 if len(shape) == 1 else 0.15)
    return {name: array.astype(np.float32) for name, array in found.items()}


def dense_shape(kind: Kind, number: int) -> tuple[int, int]:
    before = 64 if number == 0 else kind.dense[number - 1][0]
    return kind.dense[number][0], before


def dense_weight(kind: Kind, number: int) -> np.ndarray[Any, Any]:
    return weights(kind, {f"dense{number}.weight": dense_shape(kind, number)})[
        f"dense{number}.weight"
    ]


def make_text_model(name: str, path: Path, **changes: Any) -> Path:
    """Write the checkpoint of this kind into the directory ``path``, and return ``path``.
    ``changes`` replace fields of the config."""
    kind = KINDS[name]
    shapes = json.loads(REFERENCES.read_text())[name]["shapes"]
    path.mkdir(parents=True, exist_ok=True)
    config = {**kind.config, "architectures": [kind.architecture], **changes}
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(kind, shapes), path / "model.safetensors", {"format": "pt"})
    is_encoder = any(word in kind.architecture for word in ("Bert", "Roberta"))
    _write_tokenizer(path, "encoder" if is_encoder else "decoder")
    if kind.pooling:
        _write_modules(kind, path)
    return path


def _write_modules(kind: Kind, path: Path) -> None:
    """Write the files of sentence-transformers."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]

    def add(name: str, config: Mapping[str, Any]) -> Path:
        number = len(modules)
        folder = path / f"{number}_{name}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": number, "name": str(number), "path": folder.name, "type": kind})
        return folder

    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    add("Pooling", {"word_embedding_dimension": 64, f"pooling_mode_{names[kind.pooling]}": True})
    for number, (width, activation) in enumerate(kind.dense):
        layer = {
            "in_features": dense_shape(kind, number)[1],
            "out_features": width,
            "bias": False,
            "activation_function": f"torch.nn.modules.linear.{activation}",
        }
        folder = add("Dense", layer)
        save_file({"linear.weight": dense_weight(kind, number)}, folder / "model.safetensors")
    if kind.normalizes:
        add("Normalize", {})
    (path / "modules.json").write_text(json.dumps(modules))
    said = {"prompts": kind.prompts, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(said))


def make_tokenizer(ending: Ending) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = "yes no the of and to in is that it was for on are as with they be at one have this"
    tokenizer.train_from_iterator([words] + ["yes", "no"] * 9, trainer)
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    if ending == "decoder":
        single, pair = "$A [SEP]", "$A $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def _write_tokenizer(path: Path, ending: Ending) -> None:
    make_tokenizer(ending).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS}
    if ending == "encoder":
        config |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        config |= {"pad_token": "[PAD]", "eos_token": "[SEP]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
