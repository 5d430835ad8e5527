import datetime
from collections.abc import Sequence
from unittest.mock import Mock

import jinja2.filters
import pytest

from ambidex.core.errors import RequestError
from ambidex.text.chat import ChatTemplate

_HELLO = [{"role": "user", "content": "hello"}]


def _render(source: str, messages: Sequence[dict[str, str]] = _HELLO, add_generation_prompt: bool = True) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, add_generation_prompt)


def test_render_passes_messages_and_tokens() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m['content'] }}{% endfor %}{{ eos_token }}"
    assert _render(source) == "<s>user=hello</s>"


@pytest.mark.parametrize(("add_generation_prompt", "expected"), [(True, "yes"), (False, "no")])
def test_render_passes_generation_prompt(add_generation_prompt: bool, expected: str) -> None:
    source = "{{ 'yes' if add_generation_prompt else 'no' }}"
    assert _render(source, add_generation_prompt=add_generation_prompt) == expected


def test_render_token_that_the_model_lacks_is_undefined() -> None:
    template = ChatTemplate("{{ bos_token is defined }} {{ eos_token is defined }}", None, "</s>")
    assert template.render(_HELLO) == "False True"


def test_render_blocks_are_trimmed() -> None:
    assert _render("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_render_tojson_keeps_characters() -> None:
    assert _render("{{ messages[0] | tojson }} {{ '<é>' | tojson }}") == '{"role": "user", "content": "hello"} "<é>"'


def test_render_strftime_now_is_today() -> None:
    before = datetime.datetime.now().strftime("%Y")
    assert _render("{{ strftime_now('%Y') }}") in (before, datetime.datetime.now().strftime("%Y"))


def test_render_loop_controls_are_known() -> None:
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_render_generation_tag_prints_its_body() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert _render(source) == "[hello]"


def test_render_leaves_messages_alone() -> None:
    messages = [dict(_HELLO[0])]
    with pytest.raises(RequestError, match="refuses these messages"):
        _render("{{ messages.append(1) }}", messages)
    assert messages == _HELLO


def test_template_none_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no chat template: use `generate` .* or give `chat_template` FILE"):
        ChatTemplate(None, "<s>", "</s>").render(_HELLO)


@pytest.mark.parametrize("source", ["a\n{% if %}", "{{ 1 + }}", "{% endfor %}", "{{ x | no_such_filter }}"])
def test_template_of_bad_syntax_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"the chat template is not valid in line \d"):
        ChatTemplate(source, None, None).render(_HELLO)


_BROKEN = {
    "missing": None,
    "bad syntax": "{{ 1 + }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many digits": "{{ " + "9" * 5000 + " }}",
    "nested loops": "{% for x in y %}" * 30 + "{% endfor %}" * 30,
}


@pytest.mark.parametrize("source", _BROKEN.values(), ids=_BROKEN)
def test_template_broken_is_refused_by_render_and_check_only(source: str | None) -> None:
    # Bug: the constructor raised (RecursionError among others), so a model with a bad template could not be loaded.
    template = ChatTemplate(source, None, None)
    with pytest.raises(RequestError, match="chat template"):
        template.render(_HELLO)
    with pytest.raises(RequestError, match="chat template"):
        template.check()


def test_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", None, None)
    template.check()
    monkeypatch.setattr("ambidex.text.chat._environment", None)
    assert [template.render(_HELLO) for _ in range(2)] == ["hello", "hello"]


_HUGE = (
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**10 }}",
    "{% set x = 'a' * 10**10 %}",
    "{{ 10**(10**10) }}",
    "{{ 2**(10**6) * 2**(10**6) }}",
)


@pytest.mark.parametrize("source", _HUGE)
def test_render_huge_product_or_power_is_refused(source: str) -> None:
    # Bug: Jinja folded the constants while it compiled, which filled the memory before anything was checked.
    template = ChatTemplate(source, None, None)
    template.check()
    with pytest.raises(RequestError, match="would make more than 1048576 characters, items or bits"):
        template.render(_HELLO)


@pytest.mark.parametrize("source", ["{{ 'a' | center(1000) }}", "{% set x = 'a' | center(1000) %}"])
def test_check_computes_no_constants(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bug: as above; without its optimizer Jinja still folds what stands alone between the braces.
    center = Mock(return_value="")
    monkeypatch.setitem(jinja2.filters.FILTERS, "center", center)
    template = ChatTemplate(source, None, None)
    template.check()
    assert not center.called
    template.render(_HELLO)
    assert center.called


@pytest.mark.parametrize(
    ("source", "expected"),
    [("{{ 'ab' * 3 }}", "ababab"), ("{{ 3 * 1.5 }} {{ 2 ** 10 }} {{ 2 ** -1 }}", "4.5 1024 0.5")],
)
def test_render_small_products_and_powers_are_computed(source: str, expected: str) -> None:
    assert _render(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.mro() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_render_error_in_template_is_refused_with_its_message(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        _render(source)
    assert message in str(caught.value)


def test_render_of_endless_text_is_refused() -> None:
    source = "{% for i in range(90000) %}{{ 'x' * 100 }}{% endfor %}"
    with pytest.raises(RequestError, match="makes more than 1049856 characters"):
        _render(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ("hello", "messages is str: it must be a list"),
        (["hello"], "message 0 is str: it must have a role and a content"),
        ([*_HELLO, {"role": "user"}], "message 1: content must be a string, got None"),
        ([{"content": "x"}], "message 0: role must be a string, got None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0: content must be a string, got [{"),
        ([{"role": "user", "content": "x", "age": "me"}], "message 0 has 'age': known are role, content, name"),
        ([{"role": "user", "content": "x", "name": 5}], "message 0: name must be a string, got 5"),
        ([{"role": "a", "content": None, "tool_calls": "x"}], "message 0: tool_calls must be a list of objects"),
    ],
)
def test_render_malformed_messages_are_refused(messages: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        _render("", messages)
    assert message in str(caught.value)
