"""The JSON bodies that clients send, typed, and what chat and text completions share in them.

Owns: field names and types of the OpenAI requests this server understands, and the message for a
body that does not fit, with the path of the field. Fields it does not know are ignored, as OpenAI-
compatible servers do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.constraints import ConstraintFields
from ds4_worker.http.conversation import Decoding, Observation


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonFields(ConstraintFields, kw_only=True):
    """What chat and text completions share. Absent and null mean the same."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_token_timestamps: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def observation(self) -> Observation:
        return Observation(
            token_ids=bool(self.return_token_ids), timestamps=bool(self.return_token_timestamps)
        )

    def decoding(self, **more: Any) -> Decoding:
        """The shared fields in neutral form; `more` are those that the endpoints name apart."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sequences = self.stop_token_sequences or ()
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": token_bias(self.logit_bias or {}),
            "seed": self.seed,
            "n": self.n,
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "stop_token_sequences": tuple(map(tuple, sequences)),
            "ignore_eos": bool(self.ignore_eos),
            "constraint": self.constraint(),
        }
        return Decoding(**(fields | more))


def token_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Keys are token ids, which JSON can only spell as strings."""
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise RequestError(
            f"logit_bias: {error}; expected token ids as keys", param="logit_bias"
        ) from error


Body = TypeVar("Body", bound=msgspec.Struct)

_PLACE = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MESSAGE_CHARS = 500  # a value that is none of an enum's is repeated whole
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """Parses a request body. Raises RequestError (400) naming the field that does not fit."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the body's JSON is nested too deeply", code="invalid_json") from error


def _misfit(text: str) -> RequestError:
    match = _PLACE.match(text)
    what, path = (match[1], match[2] or "") if match else (text, "")
    if len(what) > _MESSAGE_CHARS:
        what = f"{what[:_MESSAGE_CHARS]}..."
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    where = f"{path}: " if path else ""
    return RequestError(f"{where}{what}", param=path or None, code="invalid_type")
