"""A model that says what it was told to say, with reasoning and tools: exact tests of every API.

`Script` is an executor whose sequences, in the order in which they begin, sample given answers.
`tool_model` is a served model whose template renders tools, calls, reasoning and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ds4_common.contract.frontend import ReasoningSyntax, ToolSyntax
from ds4_worker.executor.api import ExecutorConfig, Sampled, Sampling, Slice
from ds4_worker.http.model import ServedModel
from ds4_worker.http.template import ChatTemplate
from helpers.fake_executor import FakeExecutor, allowed_tokens
from helpers.fake_model import EOS, VOCABULARY, ByteTokenizer, served_model

TOOLS = ToolSyntax(
    syntax="TOOL_TAGGED_JSON",
    open="<tool_call>",
    close="</tool_call>",
    separator="",
    wrap_newlines=True,
)
REASONING = ReasoningSyntax(
    syntax="REASONING_THINK_TAGS",
    open="<think>",
    close="</think>",
    wrap_newlines=False,
    terminal_marker="",
    assistant_open="[assistant]",
    message_end="[end]",
)
TOOL_TEMPLATE = """\
{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}[end]{% endif %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ "\\n" }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant]<think>
{%- if not enable_thinking %}</think>{% endif %}{% endif %}"""


def tokens(answer: str) -> list[int]:
    """The tokens of an answer: `<think>` and `</think>` are one each; EOS ends it."""
    return [*ByteTokenizer().encode(answer, add_special=False, parse_special=True), EOS]


class Script(FakeExecutor):
    """Says `answers[i]` in the i-th sequence that begins; the last one again and again. What
    the engine forces or rules out is obeyed: another token takes the place of the one to be said.
    """

    def __init__(
        self,
        *answers: str | Sequence[int],
        banks: int = 2,
        context_tokens: int = 4096,
        before_step: Callable[[], None] | None = None,
        stubborn: bool = False,
    ) -> None:
        """`stubborn`: what the engine rules out is said all the same."""
        config = ExecutorConfig(banks=banks, context_tokens=context_tokens)
        super().__init__(config, vocabulary=VOCABULARY, before_step=before_step)
        self._answers = [tokens(a) if isinstance(a, str) else list(a) for a in answers]
        self._begun = 0
        self._stubborn = stubborn
        self._said: list[list[int]] = [[] for _ in range(banks)]

    def _draw(self, piece: Slice, sample: Sampling, history: list[int]) -> Sampled:
        sampled = super()._draw(piece, sample, history)
        if sampled.error is not None:
            return sampled
        if sample.index == 0:
            last = len(self._answers) - 1
            self._said[piece.bank] = self._answers[min(self._begun, last)]
            self._begun += 1
        said = self._said[piece.bank]
        if sample.index >= len(said) and piece.checks:  # after a draft that was the end
            return sampled
        wanted = said[sample.index]
        obeys = self._stubborn or wanted in allowed_tokens(sample, VOCABULARY)
        if sample.forced >= 0 or not obeys:
            return sampled
        return Sampled(wanted, sampled.logprob, sampled.top)


def tool_model(
    *,
    template: str = TOOL_TEMPLATE,
    tools: ToolSyntax | None = TOOLS,
    reasoning: ReasoningSyntax | None = REASONING,
    banks: int = 2,
    context_tokens: int = 4096,
) -> ServedModel:
    model = served_model(banks=banks, context_tokens=context_tokens, template=template)
    record = msgspec.structs.replace(model.frontend, tools=tools, reasoning=reasoning)
    chat_template = ChatTemplate(template, bos_token=record.bos_token, eos_token=record.eos_token)
    return msgspec.structs.replace(model, frontend=record, template=chat_template)
