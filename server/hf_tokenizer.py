"""Reads the tokenizer of a model directory in Hugging Face layout.

tokenizer.json says how text is cut and what is put around it (`add_bos_token` in tokenizer_config.json counts for
nothing beside it, as in transformers 5); tokenizer_config.json and special_tokens_map.json name tokens and add some;
chat_template.jinja goes before the template in tokenizer_config.json. Runs no code of the model.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from server.tokenizer_parts import Spelling, TokenizerError, TokenizerParts

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_hf_tokenizer(directory: Path) -> TokenizerParts:
    """Read the tokenizer files of `directory`. Raises TokenizerError."""
    backend = _read_backend(directory)
    config = _read_json(directory / "tokenizer_config.json")
    token_map = _read_json(directory / "special_tokens_map.json")
    named = _named_tokens(config, token_map)
    _add_missing_tokens(backend, config, token_map, named)
    spelling, byte_fallback = _spelling(backend, directory)
    added = backend.get_added_tokens_decoder()
    ids = {name: backend.token_to_id(str(token)) for name, token in named.items()}
    return TokenizerParts(
        backend=backend,
        spelling=spelling,
        byte_fallback=byte_fallback,
        # SentencePiece vocabularies write added tokens with the space mark too, so those are not literal.
        literal_ids=frozenset(added) if spelling == "byte_level" else frozenset(),
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        eos_token_ids=_eos_token_ids(directory, ids.get("eos_token")),
        bos_token_id=ids.get("bos_token"),
        special_tokens={name: str(token) for name, token in named.items()},
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json; older forms (tokenizer.model, vocab.json with merges.txt) are not "
            "read: save the tokenizer again with a current transformers, which writes tokenizer.json."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare Exception
        raise TokenizerError(f"{path} is not a tokenizer that this version can read ({error}).") from error
    # Files carry the settings of whoever saved them; a server never cuts or pads a prompt on its own.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object.")
    return value


def _as_token(value: Any, where: str) -> AddedToken:  # noqa: ANN401 - JSON can hold anything
    """A token in one of its two JSON forms: a string, or an object with `content`."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TokenizerError(f"{where} is {value!r}, which is neither a string nor a token object.")
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)


def _named_tokens(config: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, AddedToken]:
    merged = dict(token_map) | {name: value for name, value in config.items() if value is not None}
    return {name: _as_token(merged[name], name) for name in _NAMED_TOKENS if merged.get(name) is not None}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    token_map: Mapping[str, Any],
    named: Mapping[str, AddedToken],
) -> None:
    """Tokens that the configuration knows and tokenizer.json does not; in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdigit() for key in listed):
        raise TokenizerError("added_tokens_decoder in tokenizer_config.json does not map token ids to tokens.")
    tokens = [_as_token(listed[key], f"added_tokens_decoder[{key}]") for key in sorted(listed, key=int)]
    tokens += named.values()
    for extra in (config.get("additional_special_tokens"), token_map.get("additional_special_tokens")):
        tokens += [_as_token(value, "additional_special_tokens") for value in _as_list(extra)]
    for token in tokens:
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)


def _as_list(value: Any) -> Iterable[Any]:  # noqa: ANN401 - JSON can hold anything
    return value if isinstance(value, list) else []


def _spelling(backend: tokenizers.Tokenizer, directory: Path) -> tuple[Spelling, bool]:
    """How tokens spell bytes, which is what the tokenizer's decoder undoes; and whether <0xNN> is a byte."""
    # The decoder's pickled state is its JSON: the whole tokenizer's would be tens of megabytes.
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    types = [step.get("type") for step in steps]
    if "ByteLevel" in types:
        return "byte_level", False
    marks = [step for step in steps if step.get("type") == "Replace" and step.get("pattern") == {"String": "\u2581"}]
    if "Metaspace" in types or marks or "ByteFallback" in types:
        return "sentencepiece", "ByteFallback" in types
    raise TokenizerError(
        f"{directory / 'tokenizer.json'} has a decoder of type {' + '.join(str(name) for name in types)}; "
        "ByteLevel, Metaspace and SentencePiece with byte fallback are supported."
    )


def _eos_token_ids(directory: Path, own: int | None) -> tuple[int, ...]:
    """The ids that end a sequence: those for generation, which people edit, else the model's; and the tokenizer's."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids = [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
        if ids:
            break
    if own is not None:
        ids.append(own)
    return tuple(dict.fromkeys(ids))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; the one that transformers uses by itself is `default`."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    for item in _as_list(value):
        if not (isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)):
            raise TokenizerError("chat_template in tokenizer_config.json holds an entry without name and template.")
        templates[item["name"]] = item["template"]
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise TokenizerError(f"{path} cannot be read ({error}).") from error
    return templates
