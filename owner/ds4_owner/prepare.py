"""Turns a GGUF file's metadata and tensor places into the prepared contract.

Owns: the serving half of the contract (context, ends of generation, defaults, frontend); the
program half comes from the architecture's recipe. Pure: reads no tensor data. What it writes
passes `ds4_common.contract.validate`, or it raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ds4_common.allocation import TensorPlace
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.frontend import BLOB_NAME, frontend_from_bundle
from ds4_common.contract.validate import BUNDLE_FORMAT, MODEL_VERSION, validate
from ds4_common.gguf import Metadata
from ds4_common.tokenizer.vocabulary import Vocabulary, read_vocabulary
from ds4_owner.recipes import chat_template_for, recipe_for
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.parameters import MAX_TEMPLATE, Parameters, refuse
from ds4_owner.recipes.sampling import sampling_defaults
from ds4_owner.recipes.syntax import Syntax, detect_syntax
from ds4_owner.recipes.unread import refuse_unread
from ds4_owner.series import joined


def prepare_model(
    metadata: Metadata, places: Mapping[str, TensorPlace], *, served_id: str, fingerprint: str
) -> pb.Bundle:
    """Prepares the contract of one model.

    `places` maps every tensor of the model to where it lies; `fingerprint` names its content and
    becomes the cache identity. Raises UnsupportedModel naming what no recipe can serve.
    """
    parameters = Parameters(metadata, metadata.get_str("general.architecture"))
    recipe = recipe_for(parameters.architecture)
    vocabulary = read_vocabulary(metadata)
    n_tokens = len(vocabulary.texts)
    context_tokens = parameters.count("context_length")
    bundle = pb.Bundle(format=BUNDLE_FORMAT)
    places = joined(places)
    program = TextProgram(places, context_tokens)
    recipe(parameters, program, n_tokens, context_tokens, len(places))
    refuse_unread(parameters)
    program.finish(bundle)
    serving = bundle.serving
    serving.served_id = served_id
    serving.cache_identity = fingerprint.encode()
    serving.context_tokens = context_tokens
    serving.speculative_widths.append(1)
    serving.defaults.CopyFrom(sampling_defaults(metadata))
    template = _chat_template(metadata, vocabulary.texts)
    syntax = detect_syntax(template, vocabulary)
    serving.eos_ids.extend(_ends(syntax.ends(vocabulary)))
    serving.model.version = MODEL_VERSION
    serving.model.vocabulary = serving.model.input_vocabulary = n_tokens
    _write_frontend(bundle, vocabulary, template, syntax)
    validate(bundle)
    return bundle


def prepare_frontend(metadata: Metadata, bundle: pb.Bundle) -> bytes:
    """The `frontend` blob that goes with `bundle`: the same facts plus the texts."""
    frontend = bundle.serving.model.frontend
    texts = metadata.get_strings("tokenizer.ggml.tokens")
    bos, eos = (
        texts[getattr(frontend, name)].decode("utf-8", "replace") if frontend.HasField(name) else ""
        for name in ("bos_id", "eos_id")
    )
    return frontend_from_bundle(
        bundle, chat_template=_chat_template(metadata, texts), bos_token=bos, eos_token=eos
    )


def _chat_template(metadata: Metadata, tokens: Sequence[bytes]) -> str | None:
    """The file's own, else what its family has for files without one."""
    template = metadata.get_str("tokenizer.chat_template", None)
    if template is None:
        return chat_template_for(metadata.get_str("general.architecture"), tokens)
    if len(template) > MAX_TEMPLATE:
        raise refuse(
            "tokenizer.chat_template", f"{len(template)} characters", f"at most {MAX_TEMPLATE}"
        )
    return template


def _ends(ends: tuple[int, ...]) -> tuple[int, ...]:
    if not ends:
        raise refuse("tokenizer.ggml.eos_token_id", "no such key", "a token that ends a generation")
    return ends


def _write_frontend(
    bundle: pb.Bundle, vocabulary: Vocabulary, template: str | None, syntax: Syntax
) -> None:
    frontend = bundle.serving.model.frontend
    frontend.tokenizer = "tokenizer"
    bundle.resources.add(id="tokenizer", kind="tokenizer", path="tokenizer")
    if template is not None:
        text = template.encode()
        frontend.chat_template = "chat_template"
        bundle.resources.add(
            id="chat_template",
            kind="chat_template",
            path=BLOB_NAME,
            bytes=len(text),
            sha256=hashlib.sha256(text).digest(),
        )
    if vocabulary.bos >= 0:
        frontend.bos_id = vocabulary.bos
    if vocabulary.eos >= 0:
        frontend.eos_id = vocabulary.eos
    if syntax.tools is not None:
        frontend.tools.CopyFrom(syntax.tools)
    if syntax.reasoning is not None:
        frontend.reasoning.CopyFrom(syntax.reasoning)
    frontend.add_bos = vocabulary.add_bos
    frontend.add_eos = vocabulary.add_eos
