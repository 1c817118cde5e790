import pytest

from paged_jax.checkpoints.chat_template import render_chat_template

CHATML = """{% for message in messages %}
<|{{ message['role'] }}|>{{ message['content'] }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""
HELLO = [{"role": "user", "content": "Hello"}]


def render(template, messages=HELLO, add_generation_prompt=True, **special_tokens):
    return render_chat_template(
        template, messages, add_generation_prompt=add_generation_prompt, special_tokens=special_tokens
    )


def test_blocks_leave_no_blank_lines():
    assert render(CHATML) == "<|user|>Hello\n<|assistant|>\n"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>Hello\n"


def test_special_tokens_are_variables_and_missing_ones_are_empty():
    assert render("{{ bos_token }}|{{ eos_token }}", bos_token="<s>") == "<s>|"


def test_tojson_does_not_escape_html():
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hello"}'
    assert render("{{ '<é>' | tojson }}") == '"<é>"'


def test_loop_controls_generation_blocks_and_the_date():
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_the_templates_own_refusal_is_the_error():
    with pytest.raises(ValueError, match="only users may speak"):
        render("{{ raise_exception('only users may speak') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__ }}",  # the way out of a sandbox
        "{% do messages.append(1) %}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_failing_template_is_one_error(template):
    with pytest.raises(ValueError, match="chat template refuses these messages"):
        render(template)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (["hi"], "message 0 must be a dict"),
        ([{"content": "hi"}], "message 0 needs a string under 'role'"),
        ([*HELLO, {"role": "user", "content": None}], "message 1 needs a string under 'content'"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(ValueError, match=words):
        render(CHATML, messages)
