"""Chat templates: the Jinja text that a model's makers ship to turn messages into one prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's words for training.

    Here it stands for its body.
    """

    tags = {"generation"}  # noqa: RUF012  jinja2 declares the attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """The prompt for `messages`, rendered as Hugging Face does, and in a sandbox: templates are foreign code.

    `special_tokens` (`bos_token`, `eos_token`, ...) are variables of the template. Raises ValueError when a
    message lacks its role or content, or with the template's own words when it refuses the conversation.
    """
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} must be a dict with a role and a content, got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number} needs a string under {key!r}, got {message.get(key)!r}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    # a template is a program: besides what jinja2 reports, it can fail as any expression can
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
