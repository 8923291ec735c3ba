"""Chat templates: a model's own Jinja program, run without trusting it.

Owns: the limits of a rendering. A template comes out of a model file, so it gets no attribute that
could reach Python, no output beyond `MAX_CHARS`, and no more than `MAX_SECONDS`. Environment and
filters (`sandbox.py`) follow what Hugging Face renders with: templates are written for that.

jinja2 takes as long to import as the rest of the worker's start-up together, so it is imported by
`warm`, in a thread, while the weights are being mapped.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ds4_common.errors import RequestError
from ds4_worker.http.template_form import TemplateForm

if TYPE_CHECKING:
    import jinja2

MAX_CHARS = 16 << 20
MAX_SECONDS = 5.0

# What a program that is not ours may raise while it is compiled or run, besides jinja2's own.
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)

_Result = TypeVar("_Result")


class OutOfTime(BaseException):
    """Raised asynchronously inside a rendering thread. No template can catch it."""


class ChatTemplate:
    """One template, compiled at most once. Safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._compiled: jinja2.Template | None = None
        self._variables: frozenset[str] | None = None
        self.form = TemplateForm(self)
        # Where a template looks for the reasoning before a call, beside `reasoning_content`.
        self.names_thinking = "message.thinking" in source

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template takes from outside; none when it does not compile."""
        if self._variables is None:
            self._variables = self._find_variables()
        return self._variables

    def _find_variables(self) -> frozenset[str]:
        from jinja2 import TemplateError, meta

        try:
            environment = self._template().environment
            return frozenset(meta.find_undeclared_variables(environment.parse(self._source)))
        except (TemplateError, *_FAULTS):
            return frozenset()  # reported by the first request that renders it

    def warm(self) -> threading.Thread:
        """Imports and compiles in the background; the first rendering waits for it."""
        thread = threading.Thread(target=self._compile_ahead, name="template", daemon=True)
        thread.start()
        return thread

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError (400) with the template's own message."""
        from jinja2 import TemplateError

        from ds4_worker.http.sandbox import ChatEnvironment

        pieces: list[str] = []
        size = 0
        try:
            values = {
                **(extra or {}),
                **self._tokens,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
            }
            template = self._template()
            assert isinstance(template.environment, ChatEnvironment)
            template.environment.begin()
            for piece in template.generate(values):
                size += len(piece)
                if size > MAX_CHARS:
                    raise _refusal(f"its output exceeds {MAX_CHARS} characters")
                pieces.append(piece)
            text = "".join(pieces)
            text.encode()  # a lone surrogate is no text that could be tokenized
        except TemplateError as error:
            raise _refusal(error.message or type(error).__name__) from error
        except _FAULTS as error:
            # A template that does not expect these messages: the client's input, as a rule.
            raise _refusal(f"{type(error).__name__}: {error}") from error
        except MemoryError as error:
            raise _refusal("it needs too much memory") from error
        return text

    def _template(self) -> jinja2.Template:
        with self._lock:
            if self._compiled is None:
                from ds4_worker.http.sandbox import make_environment

                self._compiled = make_environment(MAX_CHARS).from_string(self._source)
            return self._compiled

    def _compile_ahead(self) -> None:
        try:
            from jinja2 import TemplateError
        except OSError:
            return  # no descriptor to read it with: the first request tries again
        try:
            self._template()
        except (TemplateError, MemoryError, *_FAULTS):
            return  # reported by the first request that needs the template


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"the model's chat template refuses this conversation: {reason}",
        param="messages",
        code="template_error",
    )


async def run_with_deadline(
    work: Callable[[], _Result], seconds: float = MAX_SECONDS, late: RequestError | None = None
) -> _Result:
    """Runs `work` in a thread of its own; interrupts it after `seconds`, or when nobody waits.

    Raises `late` when its time was over (without it: that the template takes too long), else what
    `work` raises. A single call into C that never returns is not interrupted; the sandbox bounds
    those.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()
    abandoned = threading.Event()  # nobody waits any more, the loop may even be closed
    ended = threading.Event()

    def settle(result: _Result | None, failure: BaseException | None) -> None:
        if done.done():
            return
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = RuntimeError("preparing a prompt failed; see the log")
        try:
            result = work()
            failure = None
        except RequestError as error:
            failure = error
        except OutOfTime:
            return
        finally:
            # Also on the way out of a programming error, which threading.excepthook then reports.
            ended.set()
            if not abandoned.is_set():
                loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=run, name="prepare", daemon=True)
    if late is None:
        late = _refusal(f"it ran for more than {seconds:g} s")
    timer = loop.call_later(seconds, settle, None, late)
    thread.start()
    try:
        return await done
    finally:
        timer.cancel()
        abandoned.set()
        if not ended.is_set():  # out of time, or the client went away
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(OutOfTime)
            )
