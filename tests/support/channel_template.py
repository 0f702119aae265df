"""A chat template of conversations in channels, as gpt-oss has them: one call a message, whose reasoning stands before
it until a later answer of the assistant's."""

TEMPLATE = """
{%- set last = namespace(answer=-1, name="") %}
{%- for m in messages %}
{%- if m.role == "assistant" and not m.tool_calls %}{% set last.answer = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == "assistant" and m.tool_calls %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{%- if m.content and m.thinking %}{{ raise_exception("one of content and thinking") }}{% endif %}
{%- if (m.thinking or m.content) and loop.index0 > last.answer %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (m.thinking or m.content) + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- (call.arguments | tojson) + "<|call|>" }}
{%- elif m.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
{%- elif m.role == "tool" %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + m.content + "<|end|>" }}
{%- else %}
{{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
