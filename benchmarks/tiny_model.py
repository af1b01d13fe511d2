"""A Llama of two layers without weights, and a tokenizer of single bytes: enough for a real vLLM to serve.

Words may be tokens, too, each with the space before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SPECIAL = ("<s>", "</s>")
SPACE = "Ġ"  # as a symbol of the vocabulary
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: "


def byte_symbols() -> list[str]:
    """A printable character for each byte, as in GPT-2."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in sorted(printable)] + [chr(256 + index) for index in range(len(others))]


def _beginnings(words: Sequence[str]) -> list[str]:
    """Of words with their space, as BPE puts them together: letter by letter."""
    spaced = [SPACE + word for word in words]
    return list(dict.fromkeys(word[:end] for word in spaced for end in range(2, len(word) + 1)))


def _vocabulary(words: Sequence[str]) -> dict[str, int]:
    symbols = (*SPECIAL, *byte_symbols(), *_beginnings(words))
    return {symbol: index for index, symbol in enumerate(symbols)}


def word_ids(words: Sequence[str]) -> list[int]:
    vocabulary = _vocabulary(words)
    return [vocabulary[SPACE + word] for word in words]


def make_model(folder: Path, max_tokens: int, words: Sequence[str] = ()) -> None:
    """For `vllm serve FOLDER --load-format dummy`."""
    folder.mkdir(parents=True)
    vocabulary = _vocabulary(words)
    merges = [[beginning[:-1], beginning[-1]] for beginning in _beginnings(words)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": name, **flags} for index, name in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(vocabulary),
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": max_tokens,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "chat_template": CHAT,
        "model_max_length": max_tokens,
    }
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", about), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content))
