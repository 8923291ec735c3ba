"""A model without weights: bytes are tokens, and a few specials. Goes with `FakeExecutor`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from ds4_common.contract.frontend import Frontend, SamplingDefaults
from ds4_worker.http.model import ServedModel
from ds4_worker.http.template import ChatTemplate

EOS = 256
BOS = 257
THINK = 258
END_THINK = 259
VOCABULARY = 260
SPECIALS = {"<think>": THINK, "</think>": END_THINK}  # those that a text can spell
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
_SPELLED = {token: text for text, token in SPECIALS.items()}


class ByteTokenizer:
    """Token i < 256 is byte i."""

    max_token_bytes = 8  # more than true, so that texts reach the tokenizer in tests

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = [BOS] if add_special else []
        for part in _SPECIAL.split(text) if parse_special else [text]:
            ids += [SPECIALS[part]] if part in SPECIALS else list(part.encode())
        return ids

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return _SPELLED.get(token, f"<{token}>").encode()

    def is_control(self, token: int) -> bool:
        return token >= 256

    is_special = is_control

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(bytes([token]) for token in ids if token < 256)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def frontend(*, context_tokens: int = 64, template: str | None = TEMPLATE) -> Frontend:
    return Frontend(
        served_id="fake-model",
        aliases=("fake",),
        fingerprint="0" * 16,
        context_tokens=context_tokens,
        vocabulary=VOCABULARY,
        eos_ids=(EOS,),
        bos_id=BOS,
        eos_id=EOS,
        add_bos=False,
        add_eos=False,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=template,
        defaults=SamplingDefaults(
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.05, repeat_penalty=1.0, max_tokens=0
        ),
        page_tokens=4,
        cache_bytes_per_token_f16=16,
        cache_bytes_per_token_f32=32,
        weights_bytes=0,
    )


def served_model(
    *, banks: int = 2, context_tokens: int = 64, template: str | None = TEMPLATE
) -> ServedModel:
    record = frontend(context_tokens=context_tokens, template=template)
    return ServedModel(
        frontend=record,
        tokenizer=ByteTokenizer(),
        template=None
        if template is None
        else ChatTemplate(template, bos_token=record.bos_token, eos_token=record.eos_token),
        names=(record.served_id, *record.aliases),
        context_tokens=context_tokens,
        banks=banks,
        created=1767225600,
    )
