"""The model as the handlers see it: its record, its tokenizer and its template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ds4_common.contract.frontend import Frontend
from ds4_common.errors import RequestError
from ds4_worker.http.messages import ContextLengthExceeded
from ds4_worker.http.template import ChatTemplate

# Endings of names that ask for an answer with or without reasoning.
_THINKING_NAMES = {"-chat": False, "-nothink": False, "-reasoner": True, "-think": True}


class Tokenizer(Protocol):
    """Text to ids and back; see ds4_common.tokenizer."""

    @property
    def max_token_bytes(self) -> int: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def decode(self, ids: Iterable[int]) -> bytes: ...

    def is_control(self, token: int) -> bool: ...

    def is_special(self, token: int) -> bool: ...


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about the model that does not change while it is served."""

    frontend: Frontend
    tokenizer: Tokenizer
    template: ChatTemplate | None
    names: tuple[str, ...]  # what clients may call it; the first is what answers carry
    context_tokens: int  # per sequence
    banks: int  # sequences that run at once
    created: int  # Unix seconds, reported by /v1/models
    chat_max_tokens: int | None = None  # when a chat request says nothing; None: the context
    ignore_eos: bool = False  # for every request
    ignore_eos_in_reasoning: bool = False

    def resolve(self, name: str | None) -> str:
        """The name that the answer carries. Raises RequestError (404) for another model's name."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"model {name[:200]!r} is not served here; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def check_text(self, text: str, field: str) -> None:
        """Refuses a text that cannot fit before seconds are spent on tokenizing it."""
        least = len(text) // self.tokenizer.max_token_bytes
        if least >= self.context_tokens:
            raise ContextLengthExceeded(least, self.context_tokens, field, at_least=True)

    def thinking_by_name(self, name: str | None) -> bool | None:
        """What a name that the client used says of reasoning; None: nothing."""
        for ending, thinking in _THINKING_NAMES.items():
            if name is not None and name.endswith(ending):
                return thinking
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation. Raises RequestError for what the template refuses."""
        return self.chat_template.render(
            messages, extra=values, add_generation_prompt=add_generation_prompt
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises RequestError when the model has none."""
        if self.template is None:
            raise RequestError(
                "this model file has no chat template; complete a finished prompt instead "
                "(/v1/completions, or --raw-prompt on the terminal)",
                code="no_chat_template",
            )
        return self.template

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a rendered prompt."""
        # Most templates write the start token themselves.
        bos = self.frontend.bos_token
        add_special = self.frontend.add_bos and not (bos and text.startswith(bos))
        return self.tokenizer.encode(text, add_special=add_special, parse_special=True)
