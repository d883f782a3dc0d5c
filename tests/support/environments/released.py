"""Chat templates that render as those of released models, in short forms of our own, and the forms of a conversation.

A short form writes the roles, thinking, calls and results of the original letter for letter. It leaves out the prose
that introduces tools, today's date, and the counting of images. ``compare.py`` beside this file compares the short
forms with originals that lie in a folder.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.environments.tokenizers import make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DOCUMENTED = ""
"""In the place of a sha256: the original was not in hand, and the short form was written from documentation alone."""


@dataclass(frozen=True)
class Released:
    """A released template.

    Attributes:
        families: the families of models that have it.
        sha256: of the original template that the short form was compared with.
        template: the short form.
        special: the tokens of its chat. ends: those that end a turn of the model, the tokenizer's eos first.
    """

    families: str
    sha256: str
    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a tokenizer of bytes that has the template and its tokens."""
        tokenizer = deepcopy(make_tokenizer("qwen"))
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.special]})
        tokenizer.eos_token, tokenizer.chat_template = self.ends[0], self.template
        return tokenizer


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")

_GO_ON = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_PLAIN_CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"

_SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}"
    + _PLAIN_CHATML
    + "{% endfor %}"
    + _GO_ON
)

_QWEN1_5 = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if add_generation_prompt or not loop.last %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_INTERNVL = (
    """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{{- part.text if part.type == 'text' else '<' + part.type + '>\\n' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}"""
    + _GO_ON
)

_QWEN2_VL = (
    """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{{- part.text if part.type == 'text' else '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}{% endfor %}
{%- endif %}{{ '<|im_end|>\\n' }}{% endfor %}"""
    + _GO_ON
)

# The system block of Qwen's templates with tools: what stands there is given by `system`.
_SHOW_TOOLS = """\
{%- if tools or system %}{{ '<|im_start|>system\\n' + system }}
{%- if tools %}{{ ('\\n\\n' if system else '') + '# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endif %}"""
_SYSTEM = "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
_RESULTS = """\
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
_CALL = '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson }}'
_CALLS = (
    "{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    "{{- '\\n' if content or not loop.first }}" + _CALL + "{{ '}\\n</tool_call>' }}{% endfor %}"
)
_SAY = """\
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}ANSWER{{ '<|im_end|>\\n' }}"""
_CONTENT = "{%- set content = m.content if m.content is string else '' %}"

_QWEN2_5 = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else "
    "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}"
    + _SHOW_TOOLS
    + "{%- for m in messages %}"
    + _CONTENT
    + _SAY.replace(
        "ANSWER",
        "{{ '<|im_start|>assistant' + ('' if m.tool_calls and not content else '\\n' + content) }}"
        "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}{{ '\\n' }}"
        + _CALL
        + "{{ '}\\n</tool_call>' }}{% endfor %}",
    )
    + _RESULTS
    + "{%- endif %}{% endfor %}"
    + _GO_ON
)

_QWEN3_2507 = (
    _SYSTEM
    + _SHOW_TOOLS
    + "{%- for m in messages %}"
    + _CONTENT
    + _SAY.replace("ANSWER", "{{ '<|im_start|>assistant\\n' + content }}" + _CALLS)
    + _RESULTS
    + "{%- endif %}{% endfor %}"
    + _GO_ON
)

# Thought and content of an answer: as fields, or parted by </think>.
_PART = """\
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if m.reasoning_content is not string and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"""

_QWEN3 = (
    _SYSTEM
    + _SHOW_TOOLS
    + """
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}"""
    + _CONTENT
    + _SAY.replace(
        "ANSWER",
        _PART + "{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > last.query and (loop.last or thought) %}"
        "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
        "{% else %}{{ content }}{% endif %}" + _CALLS,
    )
    + _RESULTS
    + "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)

_QWEN3_VL = _QWEN3_2507.replace(
    _CONTENT,
    "{%- set content = '' %}{% if m.content is string %}{% set content = m.content %}{% else %}"
    "{% set parts = namespace(text='') %}{% for part in m.content %}{% set parts.text = parts.text + "
    "(part.text if part.type == 'text' else '<|vision_start|><|' + part.type + '_pad|><|vision_end|>') %}{% endfor %}"
    "{% set content = parts.text %}{% endif %}",
)

_QWEN3_5_CALLS = """\
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- ('\\n\\n' if content | trim else '') if loop.first else '\\n' }}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (SPELL) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}"""
_QWEN3_5 = (
    _SYSTEM
    + _SHOW_TOOLS
    + """
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- if last.query < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}{% set content = m.content | trim if m.content is string else '' %}
{%- if m.role == 'system' %}{% if not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}"""
    + _PART
    + """
{{- '<|im_start|>assistant\\n' }}{% if PRESERVE loop.index0 > last.query %}
{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"""
    + _QWEN3_5_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _RESULTS
    + "{%- else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{{ THINKS }}{% endif %}"
)
_OPEN, _EMPTY = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'"
_SPELLED = "value | tojson if value is mapping or (value is sequence and value is not string) else value | string"


def _write_qwen3_5(thinks: str, spelled: str = _SPELLED, preserve: str = "") -> str:
    return _QWEN3_5.replace("THINKS", thinks).replace("SPELL", spelled).replace("PRESERVE", preserve)


_GLM4_5 = (
    """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set content = m.content | string %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + content }}
{{- '/nothink' if enable_thinking is false and not content.endswith('/nothink') }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}"""
    + _PART
    + """
{{- '\\n<think>' + (thought | trim if loop.index0 > last.user else '') + '</think>' }}
{{- '\\n' + content | trim if content | trim }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '\\n<tool_call>' + call.name + '\\n' }}
{%- for name, value in call.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>\\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' %}{{ '<|system|>\\n' + content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{{- '\\n<think></think>' if enable_thinking is false }}{% endif %}"""
)

_GEMMA3 = """\
{{ bos_token }}{% set before = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if before else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (before if loop.first else '') }}
{%- if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}
{%- for part in m.content %}{{ part.text | trim if part.type == 'text' else '<start_of_image>' }}{% endfor %}
{%- else %}{{ raise_exception('Invalid content type') }}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_PHI3 = """\
{%- for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

_LLAMA3 = """\
{{- bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_LLAMA3_1 = """\
{{- bos_token }}{% set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson + '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL_V3 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{% set turn = namespace(number=0) %}
{%- for m in messages if m.role != 'tool' and not (m.tool_calls is defined and m.tool_calls is not none) %}
{%- if (m.role == 'user') != (turn.number % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{%- set turn.number = turn.number + 1 %}{% endfor %}
{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]~[' }}{% for tool in tools %}
{{- '{"type": "function", "function": {' }}{% for key, value in tool.function.items() %}
{{- '"' + key + '": ' + value | tojson + (', ' if not loop.last else '') }}{% endfor %}
{{- '}}' + (', ' if not loop.last else ']') }}{% endfor %}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]~' + (system + '\\n\\n' if loop.last and system is not none else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS]~[' }}{% for call in m.tool_calls %}
{%- if call.id | default('') | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}{% endfor %}
{{- eos_token }}
{%- elif m.role == 'assistant' %}{{ SAY + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | default('') | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]~{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"""

_MIXTRAL = """\
{{- bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"""

_LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_MISTRAL_TOKENS = tuple(
    f"[{slash}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for slash in ("", "/")
)
_MISTRAL = (*_MISTRAL_TOKENS, "[TOOL_CALLS]"), ("</s>",)
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), ("<|endoftext|>", "<|end|>")

RELEASED = {
    "Llama 3": Released(
        "llama",
        "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122",
        _LLAMA3,
        _LLAMA_TOKENS,
        ("<|eot_id|>",),
    ),
    "Llama 3.1": Released(
        "llama",
        "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
        _LLAMA3_1,
        _LLAMA_TOKENS,
        ("<|eot_id|>",),
    ),
    "SmolLM2": Released(
        "llama",
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
        _SMOLLM2,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Mistral v0.3": Released(
        "mistral",
        "e16746b40344d6c5b5265988e0328a0bf7277be86f1c335156eae07e29c82826",
        _MISTRAL_V3.replace("~", " ").replace("SAY", "' ' + m.content | trim"),
        *_MISTRAL,
    ),
    "Mistral Nemo": Released(
        "mistral",
        "7a29791b46bd731f43fbe4994f23c7b689daaa36c4d0294485fab19825a2ec5d",
        _MISTRAL_V3.replace("~", "").replace("SAY", "m.content"),
        *_MISTRAL,
    ),
    "Mixtral 8x7B": Released(
        "mixtral",
        "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7",
        _MIXTRAL,
        *_MISTRAL,
    ),
    "GLM-4.5": Released(
        "glm4_moe",
        "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
        _GLM4_5,
        _GLM_TOKENS,
        _GLM_ENDS,
    ),
    "Phi-3": Released("phi3", "dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa", _PHI3, *_PHI),
    "Qwen2.5": Released(
        "qwen2",
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
        _QWEN2_5,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen1.5": Released(
        "qwen2_moe",
        "7a2fad4301dcce93b13747dfd6ee5fa696dc12de86b85b86344bea8f649022b3",
        _QWEN1_5,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3": Released(
        "qwen3, qwen3_moe",
        "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
        _QWEN3,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3 2507": Released(
        "qwen3_moe, qwen3_next",
        "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
        _QWEN3_2507,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3.5": Released(
        "qwen3_5, qwen3_5_moe, qwen3_5_text, qwen3_5_moe_text",
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
        _write_qwen3_5(f"{_EMPTY} if enable_thinking is false else {_OPEN}"),
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3.5 small": Released(
        "qwen3_5, qwen3_5_text",
        "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
        _write_qwen3_5(f"{_OPEN} if enable_thinking is true else {_EMPTY}"),
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3.6": Released(
        "qwen3_5, qwen3_5_moe, qwen3_5_moe_text",
        "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
        _write_qwen3_5(
            f"{_EMPTY} if enable_thinking is false else {_OPEN}",
            "value if value is string else value | tojson",
            "preserve_thinking is true or",
        ),
        _CHATML,
        _CHATML_ENDS,
    ),
    "Gemma 3": Released(
        "gemma3, gemma3_text",
        "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
        _GEMMA3,
        ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<eos>"),
        ("<eos>", "<end_of_turn>"),
    ),
    "Qwen2.5-VL": Released(
        "qwen2_vl, qwen2_5_vl",
        "a0bc6f6fc7a29a80017a433e8f03a1cc1236e838a944a2d034295a60c4f2fddb",
        _QWEN2_VL,
        _CHATML,
        _CHATML_ENDS,
    ),
    "Qwen3-VL": Released(
        "qwen3_vl, qwen3_vl_moe",
        "3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",
        _QWEN3_VL,
        _CHATML,
        _CHATML_ENDS,
    ),
    "InternVL3": Released(
        "internvl",
        "cabb34545cf3d04f4d256439f6b8e9f6fcf61edaaee3b8cb5c0937a7ea6206d7",
        _INTERNVL,
        _CHATML,
        _CHATML_ENDS,
    ),
}
"""Name of a released model -> its template."""
