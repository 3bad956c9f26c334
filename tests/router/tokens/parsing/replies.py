"""Replies as models write them, at least one for each way of writing calls."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

STRING = {"type": "string"}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool(
        "get_weather",
        city=STRING,
        days={"type": "integer"},
        units={"type": "array", "items": STRING},
    ),
    _tool("write_file", path=STRING, text=STRING),
]

BERLIN = {"city": "Berlin", "days": 3}
TOKYO = {"city": "東京 🗼"}


Calls = list[tuple[str, dict[str, Any]]]


class Reply(NamedTuple):
    parser: str
    written: str
    calls: Calls
    text: str


def _weather(*arguments: dict[str, Any]) -> Calls:
    return [("get_weather", each) for each in arguments]


def _file(**arguments: Any) -> Calls:
    return [("write_file", arguments)]


ONE, BOTH = _weather(BERLIN), _weather(BERLIN, TOKYO)
WRITTEN = {
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": $BERLIN}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": $TOKYO}\n</tool_call>',
    "json_tools 2": 'I look.\n\n<tool_call>{"name":"get_weather","arguments":"{\\"city\\": '
    '\\"Berlin\\", \\"days\\": 3}"}</tool_call>\n\nDone. ',
    "json_tools 3": '<tool_call>\n{"name": "write_file", "arguments": {"path": "a.md", "text": "'
    '</tool_call>\\n<tool_call>"}}\n</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=write_file>\n<parameter=path>\nx.py\n</parameter>\n<parameter=text>\nif 1 < 2:\n"
    "    print('<b>')\n</parameter>\n</function>\n</tool_call>",
    "glm47": "\nChecking.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Berlin"
    "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_weather"
    "<arg_key>city</arg_key><arg_value>東京 🗼</arg_value></tool_call>",
    "laguna": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Berlin</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
    "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>"
    '{"name": "get_weather", "arguments": $TOKYO}</longcat_tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Berlin'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_weather">\n'
    '<parameter name="city">東京 🗼</parameter>\n</invoke>\n</minimax:tool_call>',
    "minicpm5": 'Sure.\n<function name="get_weather"><param name="city">Berlin</param>'
    '<param name="days">3</param></function><function name="write_file"><param name="path">a'
    '</param><param name="text"><![CDATA[x < y && z]]></param></function>',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]$BERLIN[TOOL_CALLS]get_weather[ARGS]$TOKYO",
    "mistral 2": 'Wait. [TOOL_CALLS][{"name": "get_weather", "arguments": $BERLIN}]',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter '
    'name="city">Berlin</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "pythonic": "<|tool_call_start|>[get_weather(city='Berlin', days=3), get_weather(city=\"東京 "
    '🗼")]<|tool_call_end|>Both asked.',
    "kimi_k2": "One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    "<|tool_call_argument_begin|>$BERLIN<|tool_call_end|><|tool_call_begin|>"
    "functions.get_weather:1<|tool_call_argument_begin|>$TOKYO<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>'
    'argument key="city" type="string"<|sep|>Berlin<|close|>argument<|sep|><|open|>'
    'argument key="days" type="integer"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>$TOKYO'
    "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Berlin<|"|>,days:3}<tool_call|><|tool_call>'
    'call:get_weather{city:<|"|>東京 🗼<|"|>}<tool_call|>',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Berlin<escape>,days:3}"
    "<end_function_call>",
    "deepseek_v3": "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "get_weather\n```json\n$BERLIN\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>get_weather\n```json\n$TOKYO\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3 2": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    'write_file\n```json\n{"path": "a.md", "text": "```json\\n{}\\n```"}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>$BERLIN"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>$TOKYO<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": "I look it up.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke "
    'name="get_weather">\n<｜DSML｜parameter name="city" string="true">Berlin</｜DSML｜parameter>'
    '\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter name="path" string="true">a'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="text" string="true">{"a": [1]}\n'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
    'name="city" string="true">Berlin</｜DSML｜parameter>\n<｜DSML｜parameter name="units" '
    'string="false">["C", "F"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "minimax_m3": 'I look.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]'
    "<]minimax[>[<city>Berlin]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]"
    '<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>10]'
    "<]minimax[>[</city>]<]minimax[>[<units>]<]minimax[>[<item>C]<]minimax[>[</item>]<]minimax[>["
    "<item>F]<]minimax[>[</item>]<]minimax[>[</units>]<]minimax[>[</invoke>\n]<]minimax[>["
    "</tool_call>",
    "minimax_m3 2": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="write_file">]<]minimax[>'
    "[<text><invoke></a>]<]minimax[>[</text>]<]minimax[>[<odd>]<]minimax[>[<a>1]<]minimax[>[</a>]"
    "<]minimax[>[<a>x]<]minimax[>[</a>]<]minimax[>[</odd>]<]minimax[>[</invoke>\n]<]minimax[>["
    "</tool_call>",
    "granite": '<|tool_call|> [\n  {"name": "get_weather", "arguments": $BERLIN},\n'
    '  {"name": "get_weather", "arguments": $TOKYO}\n]',
    "granite 2": '<|tool_call|>[{"arguments": $BERLIN, "name": "get_weather"}]',
    "jamba": ' Sure!<tool_calls>[\n    {"name": "get_weather", "arguments": $BERLIN},\n'
    '    {"name": "get_weather", "arguments": $TOKYO}\n]</tool_calls>',
    "nemotron": 'Let me check that.<TOOLCALL>[{"name": "get_weather", "arguments": $BERLIN}, '
    '{"name": "get_weather", "arguments": $TOKYO}]</TOOLCALL>\n',
    "nemotron 2": '<TOOLCALL>[{"name": "get_weather", "arguments": "{\\"city\\": \\"東京 🗼\\"}"}]'
    "</TOOLCALL>",
    "phi4_mini": '<|tool_call|>[{"type": "function", "function": {"name": "get_weather", '
    '"arguments": $BERLIN}}]<|/tool_call|>',
    "phi4_mini 2": '<|tool_call|>{"name": "get_weather", "arguments": $BERLIN}<|/tool_call|>'
    '<|tool_call|>{"name": "get_weather", "arguments": $TOKYO}<|/tool_call|>',
    "seed_oss": "I'll check.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Berlin"
    "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    "mistral 3": "[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]$BERLIN[TOOL_CALLS]get_weather[CA"
    "LL_ID]b1b2c3d4e[ARGS]$TOKYO",
    "json": '<|python_start|>{"type": "function", "name": "get_weather", "parameters": $BERLIN}'
    "<|python_end|>",
    "json 2": '<|python_start|><|python_end|>{"name": "get_weather", "parameters": '
    '$BERLIN}{"name": "get_weather", "parameters": $TOKYO}',
    "harmony": "<|channel|>analysis<|message|>Weather, so I ask.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.get_weather <|constrain|>json<|message|>$BERLIN<|call|>",
    "json 3": '{"name": "get_weather", "arguments": $BERLIN}\n{"name": "get_weather", '
    '"parameters": $TOKYO}',
    "json 4": '```json\n[{"type": "function", "function": {"name": "get_weather", "arguments": '
    "$BERLIN}}]\n```",
    "json 5": '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": $BERLIN}',
    "json 6": '{"name": "Ada", "age": 36}\n',
    "json 7": '\n{"city": "Berlin"} is JSON.',
}
"""Replies by parser and number. $BERLIN and $TOKYO stand for the JSON of these arguments."""
CALLED: dict[str, Calls] = {
    "json_tools 2": ONE,
    "json_tools 3": _file(path="a.md", text="</tool_call>\n<tool_call>"),
    "qwen3_coder": ONE + _file(path="x.py", text="if 1 < 2:\n    print('<b>')"),
    **dict.fromkeys(("laguna", "mistral 2", "muse_spark", "function_gemma", "granite 2"), ONE),
    "minicpm5": ONE + _file(path="a", text="x < y && z"),
    "deepseek_v3 2": _file(path="a.md", text="```json\n{}\n```"),
    "deepseek_v32": ONE + _file(path="a", text='{"a": [1]}\n'),
    "deepseek_v4": _weather({"city": "Berlin", "units": ["C", "F"]}),
    "minimax_m3": _weather(BERLIN, {"city": "10", "units": ["C", "F"]}),
    "minimax_m3 2": _file(text="<invoke></a>", odd={"a": [1, "x"]}),
    "nemotron 2": _weather(TOKYO),
    **dict.fromkeys(("phi4_mini", "seed_oss", "harmony", "json", "json 4", "json 5"), ONE),
    "json 6": [],
    "json 7": [],
}
"""What is called in those that do not call for both cities."""
TEXTS = {
    "json_tools 2": "I look.\n\n\n\nDone. ",
    "qwen3_coder": "Let me see.",
    "glm47": "\nChecking.",
    "minicpm5": "Sure.",
    "mistral 2": "Wait.",
    "pythonic": "Both asked.",
    "kimi_k2": "One moment.",
    "deepseek_v3": "Let me look.",
    "deepseek_v32": "I look it up.",
    "minimax_m3": "I look.",
    "jamba": " Sure!",
    "nemotron": "Let me check that.",
    "seed_oss": "I'll check.",
    "harmony": "I ask.",
    "json 6": '{"name": "Ada", "age": 36}\n',
    "json 7": '\n{"city": "Berlin"} is JSON.',
}
"""What is text in those in which not all is reasoning and calls."""
JSON_OF = {"$BERLIN": json.dumps(BERLIN), "$TOKYO": json.dumps(TOKYO, ensure_ascii=False)}
REPLIES = [
    Reply(
        name.partition(" ")[0],
        re.sub(r"\$[A-Z]+", lambda found: JSON_OF[found[0]], written),
        CALLED.get(name, BOTH),
        TEXTS.get(name, ""),
    )
    for name, written in WRITTEN.items()
]

BROKEN = [
    ("json_tools", "a <tool_call> b </tool_call> c"),
    ("json_tools", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("json_tools", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
    ("json_tools", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("json_tools", '<tool_call>["get_weather"]</tool_call>'),
    ("json_tools", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ("json_tools", "<tool_call></tool_call>"),
    (
        "json_tools",
        "<tool_call>" + " " * 3000 + '{"name": "get_weather", "arguments": {x}}</tool_call>',
    ),
    ("json_tools", '<tool_call>{"arguments": {"days": NaN}, "name": "get_weather"}</tool_call>'),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]"city": '),
    ("kimi_k2", "<|tool_calls_section_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
    ("qwen3_coder", "<tool_call>\n<function=\n</tool_call>"),
    ("glm47", "<tool_call>no such tool</tool_call>"),
    ("longcat", "<longcat_tool_call>what?</longcat_tool_call>"),
    ("minimax_m2", "<minimax:tool_call>nothing</minimax:tool_call>"),
    ("pythonic", "<|tool_call_start|>[get_weather(open('x'))]<|tool_call_end|>"[:-20]),
    ("pythonic", "<|tool_call_start|>" + "(" * 3000 + "<|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|>?<|tool_calls_section_end|>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>tools<|sep|>'),
    ("gemma4", "<|tool_call>call:get_weather{city:}<tool_call|>"),
    ("function_gemma", "<start_function_call>call:get_weather{city}<end_function_call>"),
    ("muse_spark", "<atem:function_calls></atem:function_calls>"),
    ("minicpm5", '<function name="get_weather"</function>'),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>get_weather\n<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", '<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>'),
    ("deepseek_v31", "Now.<｜tool▁calls▁begin｜>get_weather"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f"</｜DSML｜function_calls>'),
    ("deepseek_v4", "<｜DSML｜tool_calls></｜DSML｜tool_calls>"),
    ("minimax_m3", "]<]minimax[>[<tool_call>\n]<]minimax[>[<city>]<]minimax[>[</tool_call>"),
    ("granite", '<|tool_call|> [{"name": "get_weather", "arguments": ['),
    ("jamba", "<tool_calls>[]</tool_calls>"),
    ("nemotron", '<TOOLCALL>[{"name": "broken", "arguments": {}</TOOLCALL>'),
    ("phi4_mini", "<|tool_call|>tool<|/tool_call|>"),
    ("seed_oss", "<seed:tool_call><function=x></seed:tool_call>"),
    ("json", '{"name": "get_weather", "arguments": ["city"'),
]
"""Text that looks like calls but is none: the name of a parser, and the text."""
