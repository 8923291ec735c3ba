"""Answers in the syntaxes that write calls in tags."""

from __future__ import annotations

from helpers.syntaxes import BAR
from helpers.transcript import NOW, PARIS, Transcript

_QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
_DSML = (
    f'<{BAR}tool_calls>\n<{BAR}invoke name="get_weather">\n'
    f'<{BAR}parameter name="city" string="true">Paris</{BAR}parameter>\n'
    f"</{BAR}invoke>\n</{BAR}tool_calls>"
)

TRANSCRIPTS = [
    # --- Qwen Coder ---
    Transcript(case="qwen", what="call", answer=_QWEN, calls=[PARIS], whole=True),
    Transcript(
        case="qwen",
        what="values by schema",
        answer="Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n 12\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=where>\n{"lat": 1.0}\n</parameter>\n'
        "<parameter=label>\nnull\n</parameter>\n<parameter=size>\nbig\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=more>\nx\ny\n</parameter>\n"
        "</function>\n</tool_call>",
        content="Sure.",
        calls=[
            (
                "get_weather",
                '{"city":" 12\\n","days":3,"metric":true,"hours":[1,2],"where":{"lat":1.0},'
                '"label":null,"size":"big","unit":"C","more":"x\\ny"}',
                True,
            )
        ],
        block="<tool_call>\n<function=get_weather>\n<parameter=city>\n 12\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=where>\n{"lat": 1.0}\n</parameter>\n'
        "<parameter=label>\nnull\n</parameter>\n<parameter=size>\nbig\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=more>\nx\ny\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    Transcript(
        case="qwen",
        what="a value that is no JSON stays visible",
        answer="<tool_call><function=get_weather><parameter=days>soon</parameter></function>"
        "</tool_call>",
        calls=[("get_weather", '{"days":"soon"}', True)],
        whole=True,
    ),
    Transcript(
        case="qwen",
        what="no parameters",
        answer="<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[NOW],
        whole=True,
    ),
    Transcript(
        case="qwen",
        what="cut off inside a value",
        answer="<tool_call>\n<function=get_weather>\n<parameter=hours>\n[1, 2",
        calls=[("get_weather", '{"hours":[1, 2', False)],
    ),
    Transcript(
        case="qwen",
        what="unknown function",
        answer="<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        content="<tool_call>\n<function=rm>\n</function>\n</tool_call>",
    ),
    # --- GLM ---
    Transcript(
        case="glm",
        what="call with newlines",
        answer=f"<think>hm</think>\n{_GLM}",
        reasoning="hm",
        calls=[PARIS],
        block=_GLM,
    ),
    Transcript(
        case="glm",
        what="calls without newlines",
        answer="<tool_call>get_weather<arg_key>city</arg_key><arg_value>a\nb</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        calls=[("get_weather", '{"city":"a\\nb","days":2}', True), NOW],
        whole=True,
    ),
    Transcript(
        case="glm",
        what="no arguments on a line of its own",
        answer="<tool_call>now\n</tool_call>",
        calls=[NOW],
        whole=True,
    ),
    Transcript(
        case="glm",
        what="stopped before the closer",
        answer=_GLM.removesuffix("</tool_call>"),
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="glm",
        what="cut off inside a value",
        answer=_GLM.partition("is</arg_value>")[0],
        calls=[("get_weather", '{"city":"Par', False)],
    ),
    Transcript(
        case="glm",
        what="key without value",
        answer="<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>",
        calls=[("now", "{", False)],
        content="</tool_call>",
    ),
    # --- DSML ---
    Transcript(
        case="dsml",
        what="call",
        answer=f"hm</think>Let me see.\n\n{_DSML}",
        in_reasoning=True,
        reasoning="hm",
        content="Let me see.",
        calls=[PARIS],
        block=_DSML,
    ),
    Transcript(
        case="dsml",
        what="call inside reasoning that never closes",
        answer=f"hm\n\n{_DSML}",
        in_reasoning=True,
        reasoning="hm\n\n",
        calls=[PARIS],
        block=_DSML,
    ),
    Transcript(
        case="dsml",
        what="first bar missing",
        answer=_DSML.replace("\uff5cDSML", "DSML"),
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="dsml",
        what="plain tags",
        answer=_DSML.replace(BAR, ""),
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="dsml",
        what="JSON values, entities and parallel calls",
        answer=f'<{BAR}tool_calls>\n<{BAR}invoke name="write.file">\n'
        f'<{BAR}parameter name="text" string="true">a &lt;b&gt; &amp; &amp;lt; &x "c"\n'
        f"</parameter></{BAR}parameter>\n"
        f'<{BAR}parameter name="n" string="false">{{"a": [1, "</{BAR}parameter>"]}}'
        f"</{BAR}parameter>\n"
        f'</{BAR}invoke>\n<{BAR}invoke name="now">\n</{BAR}invoke>\n</{BAR}tool_calls>',
        calls=[
            (
                "write.file",
                '{"text":"a <b> & &lt; &x \\"c\\"\\n</parameter>",'
                f'"n":{{"a":[1,"</{BAR}parameter>"]}}}}',
                True,
            ),
            NOW,
        ],
        whole=True,
    ),
    Transcript(
        case="dsml",
        what="string attribute missing",
        answer=f'<{BAR}tool_calls><{BAR}invoke name="get_weather"><{BAR}parameter name="city">'
        f' Rome </{BAR}parameter><{BAR}parameter name="where">\n'
        f'<{BAR}parameter name="lat" string="false">'
        f'1</{BAR}parameter>\n<{BAR}parameter name="lon" string="true">2</{BAR}parameter>\n'
        f"</{BAR}parameter></{BAR}invoke></{BAR}tool_calls>",
        calls=[("get_weather", '{"city":" Rome ","where":{"lat":1,"lon":"2"}}', True)],
        whole=True,
    ),
    Transcript(
        case="dsml",
        what="wrapper missing",
        answer=f'Ok.\n<{BAR}invoke name="now"></{BAR}invoke>',
        content="Ok.",
        calls=[NOW],
        block=f'<{BAR}invoke name="now"></{BAR}invoke>',
    ),
    Transcript(
        case="dsml",
        what="drifts to other markup after a call",
        answer=f'<{BAR}tool_calls><{BAR}invoke name="now"></{BAR}invoke><other>',
        calls=[NOW],
        content="<other>",
        block=f'<{BAR}tool_calls><{BAR}invoke name="now"></{BAR}invoke>',
    ),
]
