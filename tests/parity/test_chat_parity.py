"""Chat prompts against transformers' apply_chat_template."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ambidex.core.errors import RequestError
from ambidex.formats.locate import find_model
from ambidex.text.chat import ChatTemplate
from ambidex.text.tokenizer import load_tokenizer
from tiny_tokenizers import gpt2_tokenizer, save_folder

_LLAMA3 = """{%- for message in messages %}
    {%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
    {%- if loop.first %}
        {{- bos_token }}
    {%- endif %}
    {{- text + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
{%- if tools is not none %}
    {{- raise_exception('no tools') }}
{%- endif %}
"""
_MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set opening = system + '\\n\\n' if loop.first and system is defined else '' %}
        {{- '[INST] ' + opening + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
_ODD = """{% for message in messages %}
  {% if message.role == "system" %}
    {% continue %}
  {% endif %}
  {{ message | tojson }} {{ message.content | upper | tojson(indent=2) }}
{% generation %}{{ loop.index }}{% endgeneration %}
{% endfor %}

{{ namespace(a=1).a }} {{ messages | length }} {{ ([1, 2] | list)[-1] }} {{ unk_token }}
"""
_CHATS = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ' <b>é</b> "quoted"\n{{ 1 }} '}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": ""},
    ],
)


def _smollm2_template() -> str:
    template = load_tokenizer(find_model("smollm2")).chat_template
    assert template is not None
    return template


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = save_folder(
        tmp_path_factory.mktemp("chat"),
        gpt2_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    return AutoTokenizer.from_pretrained(Path(folder))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral", "odd"])
def test_render_equals_transformers(name: str, add_generation_prompt: bool, oracle: PreTrainedTokenizerBase) -> None:
    source = _smollm2_template() if name == "smollm2" else {"llama3": _LLAMA3, "mistral": _MISTRAL, "odd": _ODD}[name]
    template = ChatTemplate(source, oracle.bos_token, oracle.eos_token)
    for messages in _CHATS:
        expected = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert template.render(messages, add_generation_prompt) == expected


def test_render_wrong_alternation_is_refused_with_the_templates_words(oracle: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="roles must alternate user/assistant"):
        ChatTemplate(_MISTRAL, oracle.bos_token, oracle.eos_token).render(messages)
