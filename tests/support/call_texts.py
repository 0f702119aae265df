"""Calls as the published chat templates of models write them."""

# ruff: noqa: RUF001  # markers of DeepSeek

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

HARD: dict[str, Any] = {
    "city": 'São "Paulo" {x} [y] \\ </tool_call>, 東京 🌧\n2nd line\t</parameter',
    "days": -3,
    "exact": True,
    "place": {"a": {"b": [1, 2.5, None, {"c": "}"}]}, "d": "{\"e\": 'f'}"},
    "tags": ["", "]", "a, b"],
    "note": None,
}
"""Quotes, braces, escapes, characters beyond ASCII, objects in objects."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {as_json(a)}}}\n</tool_call>' for n, a in calls)


def llama3(*calls: tuple[str, Any]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {as_json(a)}}}' for n, a in calls)


def python(*calls: tuple[str, Any]) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def llama4(*calls: tuple[str, Any]) -> str:
    return f"<|python_start|>{python(*calls)}<|python_end|>"


def array(*calls: tuple[str, Any]) -> str:
    return as_json([{"name": n, "parameters": a} for n, a in calls])


def in_python(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call_start|>{python(*calls)}<|tool_call_end|>"


def by_lines(*calls: tuple[str, Any]) -> str:
    return "\n".join(["<function_calls>", *(python(call)[1:-1] for call in calls), "</function_calls>"])


def mistral(*calls: tuple[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}" for n, a in calls)


def mistral_older(*calls: tuple[str, Any]) -> str:
    return "[TOOL_CALLS] " + as_json([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])


def granite(*calls: tuple[str, Any]) -> str:
    return "<|tool_call|>" + as_json([{"name": n, "arguments": a} for n, a in calls])


def phi4(*calls: tuple[str, Any]) -> str:
    return "functools" + as_json([{"name": n, "arguments": a} for n, a in calls])


def jamba(*calls: tuple[str, Any]) -> str:
    return f"<tool_calls>{as_json([{'name': n, 'arguments': a} for n, a in calls])}</tool_calls>"


def deepseek_v3(*calls: tuple[str, Any]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{as_json(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: tuple[str, Any]) -> str:
    written = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>" for n, a in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def deepseek_v32(*calls: tuple[str, Any]) -> str:
    mark = "｜DSML｜"
    text = f"<{mark}function_calls>\n"
    for n, a in calls:
        text += f'<{mark}invoke name="{n}">\n'
        for k, v in a.items():
            is_text = str(isinstance(v, str)).lower()
            text += f'<{mark}parameter name="{k}" string="{is_text}">{plain(v)}</{mark}parameter>\n'
        text += f"</{mark}invoke>\n"
    return f"{text}</{mark}function_calls>"


def kimi(*calls: tuple[str, Any]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def qwen3(*calls: tuple[str, Any]) -> str:
    def value(v: Any) -> str:
        return as_json(v) if isinstance(v, (dict, list)) else str(v)

    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in a.items())

    return "\n".join(f"<tool_call>\n<function={n}>\n{arguments(a)}</function>\n</tool_call>" for n, a in calls)


def glm45(*calls: tuple[str, Any], line: str = "\n") -> str:
    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v)}</arg_value>{line}" for k, v in a.items())

    return "\n".join(f"<tool_call>{n}{line}{arguments(a)}</tool_call>" for n, a in calls)


def glm47(*calls: tuple[str, Any]) -> str:
    return glm45(*calls, line="")


def minimax(*calls: tuple[str, Any]) -> str:
    text = "<minimax:tool_call>\n"
    for n, a in calls:
        arguments = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in a.items())
        text += f'<invoke name="{n}">\n{arguments}</invoke>\n'
    return text + "</minimax:tool_call>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(v, quote) for v in value) + "]"
    return as_json(value)


def gemma4(*calls: tuple[str, Any]) -> str:
    return "".join(f"<|tool_call>call:{n}{gemma_value(a, '<|' + chr(34) + '|>')}<tool_call|>" for n, a in calls)


def functiongemma(*calls: tuple[str, Any]) -> str:
    written = [f"call:{n}{gemma_value(a, '<escape>')}" for n, a in calls]
    return "".join(f"<start_function_call>{each}<end_function_call>" for each in written)


def harmony(*calls: tuple[str, Any]) -> str:
    written = [f"commentary to=functions.{n} <|constrain|>json<|message|>{as_json(a)}<|call|>" for n, a in calls]
    return "<|start|>assistant".join(f"<|channel|>{each}" for each in written)


def deepseek_v4(*calls: tuple[str, Any]) -> str:
    return deepseek_v32(*calls).replace("function_calls>", "tool_calls>")


def deepseek_v41(*calls: tuple[str, Any]) -> str:
    return deepseek_v32(*calls).replace("function_calls>", "calls>").replace("｜DSML｜", "｜DSML｜ ")


def seed_oss(*calls: tuple[str, Any]) -> str:
    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<parameter={k}>{plain(v)}</parameter>\n" for k, v in a.items())

    written = [f"<function={n}>\n{arguments(a)}</function>" for n, a in calls]
    return "\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in written)


def invokes(calls: tuple[tuple[str, Any], ...], tag: str = "", line: str = "") -> list[str]:
    written = []
    for n, a in calls:
        own = "".join(f'<{tag}parameter name="{k}">{plain(v)}</{tag}parameter>{line}' for k, v in a.items())
        written.append(f'<{tag}invoke name="{n}">{line}{own}</{tag}invoke>{line}')
    return written


def dots(*calls: tuple[str, Any]) -> str:
    return f"<dots_function_call>{''.join(invokes(calls))}</dots_function_call>"


def step3(*calls: tuple[str, Any]) -> str:
    begin, end = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
    written = "".join(f"{begin}{each}{end}" for each in invokes(calls, "steptml:"))
    return f"<｜tool_calls_begin｜>{written}<｜tool_calls_end｜>"


def minicpm5(*calls: tuple[str, Any]) -> str:
    def value(v: Any) -> str:
        return f"<![CDATA[{v}]]>" if isinstance(v, str) and "<" in v else plain(v)

    written = [(n, "".join(f'<param name="{k}">{value(v)}</param>' for k, v in a.items())) for n, a in calls]
    return "\n".join(f'<function name="{n}">{own}</function>' for n, own in written)


def hunyuan3(*calls: tuple[str, Any], separator: str = "<tool_sep>") -> str:
    written = glm45(*calls) + "\n"
    for name, _ in calls:
        written = written.replace(f"<tool_call>{name}\n", f"<tool_call>{name}{separator}\n")
    return f"<tool_calls>\n{written}</tool_calls>"


def hunyuan4(*calls: tuple[str, Any]) -> str:
    return hunyuan3(*calls, separator="")


def k2_horizon(*calls: tuple[str, Any]) -> str:
    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<ifm|arg_key>{k}</ifm|arg_key><ifm|arg_value>{plain(v)}</ifm|arg_value>" for k, v in a.items())

    written = "\n".join(f"<ifm|tool_call>{n}{arguments(a)}</ifm|tool_call>" for n, a in calls)
    return f"<ifm|tool_calls>{written}</ifm|tool_calls>"


def kimi_k3(*calls: tuple[str, Any]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    text = "<|open|>tools<|sep|>"
    for index, (n, a) in enumerate(calls):
        text += f'<|open|>call tool="{n}" index="{index}"<|sep|>'
        for k, v in a.items():
            kind = kinds.get(type(v), "null")
            text += f'<|open|>argument key="{k}" type="{kind}"<|sep|>{plain(v)}<|close|>argument<|sep|>'
        text += "<|close|>call<|sep|>"
    return f"{text}<|close|>tools<|sep|>"


def minimax_m3_element(name: str, value: Any) -> str:
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        own = "".join(minimax_m3_element(k, v) for k, v in value.items())
    elif isinstance(value, list):
        own = "".join(minimax_m3_element("item", v) for v in value)
    else:
        own = plain(value)
    return f"{mark}<{name}>{own}{mark}</{name}>"


def minimax_m3(*calls: tuple[str, Any]) -> str:
    mark = "]<]minimax[>["
    written = []
    for n, a in calls:
        own = "".join(minimax_m3_element(k, v) for k, v in a.items())
        written.append(f'{mark}<invoke name="{n}">{own}{mark}</invoke>\n')
    return f"{mark}<tool_call>\n{''.join(written)}{mark}</tool_call>"


def internlm(*calls: tuple[str, Any]) -> str:
    written = [as_json({"name": n, "parameters": a}) for n, a in calls]
    return "".join(f"<|action_start|><|plugin|>{each}<|action_end|>" for each in written)


def gigachat3(*calls: tuple[str, Any]) -> str:
    return "".join(f"<|function_call|>{as_json({'name': n, 'arguments': a})}" for n, a in calls)


def cohere(*calls: tuple[str, Any]) -> str:
    written = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(map(as_json, written)) + "\n]<|END_ACTION|>"


def apertus(*calls: tuple[str, Any]) -> str:
    return f"<|tools_prefix|>{as_json([{n: a} for n, a in calls])}<|tools_suffix|>"


def plamo3(*calls: tuple[str, Any]) -> str:
    def between(name: str, text: str) -> str:
        return f"<|plamo:begin_{name}:plamo|>{text}<|plamo:end_{name}:plamo|>"

    written = [
        between("tool_name", n) + between("tool_arguments", f"<|plamo:constrain|>json<|plamo:msg|>{as_json(a)}")
        for n, a in calls
    ]
    return between("tool_requests", "".join(between("tool_request", each) for each in written))


def xlam(*calls: tuple[str, Any]) -> str:
    return as_json([{"name": n, "arguments": a} for n, a in calls])


def inkling(*calls: tuple[str, Any]) -> str:
    written = [as_json({"name": n, "args": a}) for n, a in calls]
    return "".join(f"<|message_model|><|content_invoke_tool_json|>{each}<|end_message|>" for each in written)


def muse(*calls: tuple[str, Any]) -> str:
    written = [
        f"<|start|>assistant to={n}<|message|><atem:function_calls>\n{own}</atem:function_calls><|eom|>"
        for (n, _), own in zip(calls, invokes(calls, "atem:", "\n"), strict=True)
    ]
    return "".join(written)


FORMATS: dict[str, tuple[Callable[..., str], bool]] = {
    # name: how it writes calls, and whether text may stand before them
    "hermes": (hermes, True),
    "llama3_json": (llama3, False),
    "pythonic": (python, False),
    "llama4_pythonic": (llama4, True),
    "json_array": (array, False),
    "lfm2": (in_python, True),
    "olmo3": (by_lines, True),
    "mistral": (mistral, True),
    "granite": (granite, True),
    "phi4_mini_json": (phi4, True),
    "jamba": (jamba, True),
    "deepseek_v3": (deepseek_v3, True),
    "deepseek_v31": (deepseek_v31, True),
    "deepseek_v32": (deepseek_v32, True),
    "kimi_k2": (kimi, True),
    "qwen3_coder": (qwen3, True),
    "qwen3_xml": (qwen3, True),
    "glm45": (glm45, True),
    "glm47": (glm47, True),
    "minimax_m2": (minimax, True),
    "gemma4": (gemma4, True),
    "functiongemma": (functiongemma, True),
    "openai": (harmony, False),
    "deepseek_v4": (deepseek_v4, True),
    "deepseek_v41": (deepseek_v41, True),
    "seed_oss": (seed_oss, True),
    "dots": (dots, True),
    "step3": (step3, True),
    "minicpm5": (minicpm5, True),
    "hy_v3": (hunyuan3, True),
    "hy_v4": (hunyuan4, True),
    "k2_horizon": (k2_horizon, True),
    "kimi_k3": (kimi_k3, True),
    "minimax_m3": (minimax_m3, True),
    "internlm": (internlm, True),
    "gigachat3": (gigachat3, True),
    "cohere_command3": (cohere, True),
    "apertus": (apertus, True),
    "plamo3": (plamo3, True),
    "xlam": (xlam, False),
    "ernie45": (hermes, True),
    "inkling": (inkling, False),
    "muse": (muse, False),
}
