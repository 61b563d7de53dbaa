from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import InvalidRequest, ModelUnsupported
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.text.chat import ChatTemplate

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{% if tools is not none %}
Environment: ipython
{% endif %}
{{ ns.system }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content | trim }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}
        {{- index ~ ':' ~ message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

INSTRUCTIONS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS, "instructions": INSTRUCTIONS}
SYSTEM = {"role": "system", "content": "  Be <brief> & 'kind'.  "}
USER = {"role": "user", "content": "Größe? 🙂\n"}
ASSISTANT = {"role": "assistant", "content": "</think>\n42 "}
CHATS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [USER, ASSISTANT]]
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": [None, "<x>"]}}}


@pytest.fixture(scope="session")
def reference() -> Any:
    import transformers  # takes seconds
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("variables", [{}, {"tools": [TOOL]}, {"enable_thinking": False}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_transformers_renders_them(
    reference: Any, name: str, variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    ours = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    options = {"add_generation_prompt": add_generation_prompt, **variables}
    for messages in CHATS:
        if name == "instructions" and messages[0] is SYSTEM:
            continue  # that template refuses it
        expected = reference.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
        assert ours.render(messages, **options) == expected


@pytest.mark.slow
def test_smollm2_renders_as_transformers_renders_it(reference: Any, smollm2_source: TokenizerMetadata) -> None:
    template = smollm2_source.chat_template
    for messages in CHATS:
        expected = reference.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert ChatTemplate(template).render(messages) == expected


def test_a_conversation_becomes_one_text() -> None:
    assert ChatTemplate(CHATML).render([USER]) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\nGröße? 🙂\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_json_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([{"role": "ü<&>'"}]) == '[{"role": "ü<&>\'"}]'


def test_what_is_set_inside_a_generation_stays_inside() -> None:
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(template).render([]) == "21"


def test_a_token_the_model_does_not_have_renders_as_nothing() -> None:
    assert ChatTemplate("[{{ bos_token }}{{ eos_token }}]", eos_token="</s>").render([]) == "[</s>]"


def test_the_date_is_known_to_templates() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])) == 10


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only user and assistant') }}", "only user and assistant"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ 'a' + messages[0].content }}", "concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_the_client_s_error(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        ChatTemplate(template).render([{"role": "assistant", "content": None}])
    assert refusal.value.param == "messages"


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None).render([USER])


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ModelUnsupported, match="does not compile"):
        ChatTemplate("{% for message in messages %}")
