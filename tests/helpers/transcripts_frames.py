"""Answers in the syntaxes that are frames around everything."""

from __future__ import annotations

from helpers.transcript import NOW, PARIS, Transcript

_XTML_CALL = (
    '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_XTML = f"<|open|>tools<|sep|>{_XTML_CALL}<|close|>tools<|sep|>"
_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
_HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|>'
)

TRANSCRIPTS = [
    # --- XTML ---
    Transcript(
        case="xtml",
        what="all channels",
        answer="Let me think.<|close|>think<|sep|><|open|>response<|sep|>Looking.\n"
        f"<|close|>response<|sep|>{_XTML}<|close|>message<|sep|>",
        in_reasoning=True,
        reasoning="Let me think.",
        content="Looking.",
        calls=[PARIS],
        block=_XTML,
    ),
    Transcript(
        case="xtml",
        what="typed values, entities and parallel calls",
        answer="<|open|>think<|sep|><|close|>think<|sep|>\n<|open|>tools<|sep|>\n"
        '<|open|>call tool="write.file" index="1"<|sep|>\n'
        '<|open|>argument key="a&amp;&quot;b" type="string"<|sep|>x &amp; "y"'
        "<|close|>argument<|sep|>\n"
        '<|open|>argument key="n" type="number"<|sep|>1e2<|close|>argument<|sep|>\n'
        '<|close|>call<|sep|>\n<|open|>call tool="get_weather" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"city": "Paris"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        calls=[("write.file", '{"a&\\"b":"x &amp; \\"y\\"","n":1e2}', True), PARIS],
        block="<|open|>tools<|sep|>\n"
        '<|open|>call tool="write.file" index="1"<|sep|>\n'
        '<|open|>argument key="a&amp;&quot;b" type="string"<|sep|>x &amp; "y"'
        "<|close|>argument<|sep|>\n"
        '<|open|>argument key="n" type="number"<|sep|>1e2<|close|>argument<|sep|>\n'
        '<|close|>call<|sep|>\n<|open|>call tool="get_weather" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"city": "Paris"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    Transcript(
        case="xtml",
        what="plain answer",
        answer="<|open|>response<|sep|>Hi <b>!<|close|>response<|sep|><|close|>message<|sep|>",
        content="Hi <b>!",
    ),
    Transcript(
        case="xtml",
        what="cut off inside a tag",
        answer="<|open|>response<|sep|>Hi<|close|>resp",
        content="Hi",
    ),
    Transcript(
        case="xtml",
        what="unknown tag and unknown tool",
        answer="<|open|>response<|sep|>a<|open|>b<|sep|>c<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>',
        content='a<|open|>b<|sep|>c<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>',
    ),
    # --- recipient headers ---
    Transcript(
        case="recipient",
        what="reasoning, commentary, calls",
        answer=" to=self<|message|>Check it.<|eom|><|start|>assistant to=commentary<|message|>"
        f"Looking.<|eom|><|start|>assistant to=get_weather<|message|>{_ATEM}<|eom|>"
        '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
        "</atem:invoke>\n</atem:function_calls>",
        reasoning="Check it.",
        content="Looking.",
        calls=[PARIS, NOW],
        block=f"<|start|>assistant to=get_weather<|message|>{_ATEM}<|eom|>"
        '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
        "</atem:invoke>\n</atem:function_calls>",
    ),
    Transcript(
        case="recipient",
        what="first frame is a call, typed by schema",
        answer=' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city"> Paris\n</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n'
        '<atem:parameter name="hours">[1,2]</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|>",
        calls=[("get_weather", '{"city":" Paris\\n","days":3,"hours":[1,2]}', True)],
        block=' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city"> Paris\n</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n'
        '<atem:parameter name="hours">[1,2]</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
    ),
    Transcript(
        case="recipient",
        what="inside reasoning, then the user",
        answer="Check it.<|eom|><|start|>assistant to=user<|message|>It is sunny.",
        in_reasoning=True,
        reasoning="Check it.",
        content="It is sunny.",
    ),
    Transcript(
        case="recipient",
        what="the generic recipient and a namespaced name",
        answer=' to=tool<|message|><atem:function_calls><atem:invoke name="now.now"></atem:invoke>'
        "</atem:function_calls>",
        calls=[NOW],
        whole=True,
    ),
    Transcript(
        case="recipient",
        what="a namespace as recipient",
        answer=' to=write.*<|message|><atem:function_calls><atem:invoke name="write.file">'
        "</atem:invoke></atem:function_calls>",
        calls=[("write.file", "{}", True)],
        whole=True,
    ),
    Transcript(
        case="recipient",
        what="another tool than the recipient",
        answer=' to=get_weather<|message|><atem:function_calls><atem:invoke name="now">'
        "</atem:invoke></atem:function_calls><|eom|>",
        content=' to=get_weather<|message|><atem:function_calls><atem:invoke name="now">'
        "</atem:invoke></atem:function_calls>",
    ),
    Transcript(
        case="recipient",
        what="cut off inside a header",
        answer=" to=self<|message|>Hm.<|eom|><|start|>assistant to=us",
        reasoning="Hm.",
    ),
    # --- harmony ---
    Transcript(
        case="harmony",
        what="analysis, preamble, call",
        answer="<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>"
        f"commentary<|message|>Looking.<|end|>{_HARMONY}",
        reasoning="Need weather.",
        content="Looking.",
        calls=[PARIS],
        block=_HARMONY,
    ),
    Transcript(
        case="harmony",
        what="the end of the call is the end of the sequence",
        answer=_HARMONY.removesuffix("<|call|>").removeprefix("<|start|>assistant"),
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="harmony",
        what="recipient before the channel",
        answer="<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        reasoning="a",
        calls=[NOW],
        block="<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    Transcript(
        case="harmony",
        what="final",
        answer="a<|end|>\n<|start|>assistant<|channel|>final<|message|>b <|x|> c <|return|>",
        in_reasoning=True,
        reasoning="a",
        content="b <|x|> c ",
    ),
    Transcript(
        case="harmony",
        what="a built-in tool",
        answer='<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        content='<|channel|>analysis to=browser.search code<|message|>{"query": "x"}',
    ),
    Transcript(
        case="harmony",
        what="cut off",
        answer='<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par',
        calls=[("get_weather", '{"city":"Par', False)],
    ),
]
