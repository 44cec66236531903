"""Requests that are hostile by their size or shape."""

from __future__ import annotations

from dataclasses import dataclass

from attack_target import MODEL

__all__ = ["HOSTILE", "Hostile"]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SIZE = 900_000
"""Bytes of a hostile field: below the largest body that any server takes."""


@dataclass(frozen=True)
class Hostile:
    """A request, its status, and the field at fault."""

    slug: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    kind: str | None = None


def completion(slug: str, fields: bytes, **more: object) -> Hostile:
    return Hostile(slug, COMPLETIONS, b'{"model":"%b",%b}' % (MODEL.encode(), fields), **more)  # type: ignore[arg-type]


def chat(slug: str, fields: bytes, messages: bytes = b'[{"role":"user","content":"hi"}]', **more: object) -> Hostile:
    body = b'{"model":"%b","messages":%b,"max_tokens":3%b}' % (MODEL.encode(), messages, fields and b"," + fields)
    return Hostile(slug, CHAT, body, **more)  # type: ignore[arg-type]


def response(slug: str, fields: bytes, **more: object) -> Hostile:
    return Hostile(slug, RESPONSES, b'{"model":"%b","max_output_tokens":3,%b}' % (MODEL.encode(), fields), **more)  # type: ignore[arg-type]


def call(arguments: bytes) -> bytes:
    return b'{"id":"c","type":"function","function":{"name":"f","arguments":%b}}' % arguments


def tool(parameters: bytes) -> bytes:
    return b'{"type":"function","function":{"name":"f","parameters":%b}}' % parameters


def repeated(item: bytes) -> bytes:
    return b"[" + b",".join([item] * (SIZE // (len(item) + 1))) + b"]"


TOO_LONG = {"kind": "context_length_exceeded"}
TEXT = b'"' + b"the quick fox " * (SIZE // 14) + b'"'
FLOAT = b"1.2345678901234567e-300"
BIAS = b"{" + b",".join(b'"%d":%b' % (i, FLOAT) for i in range(SIZE // 30)) + b"}"
DEEP = b'{"a":' * 2_000 + b"1" + b"}" * 2_000
ASSISTANT = b'[{"role":"assistant","content":"","tool_calls":%b},{"role":"user","content":"hi"}]'
HOSTILE = [
    completion("a long prompt", b'"prompt":' + TEXT, param="prompt", **TOO_LONG),
    completion("dense text within the bound of characters", b'"prompt":"' + b"Zq#" * 17_000 + b'"', param="prompt"),
    completion("token ids times n", b'"n":128,"prompt":' + repeated(b"12"), param="prompt", **TOO_LONG),
    completion("empty prompts", b'"prompt":' + repeated(b"[]"), param="prompt"),
    completion("prompts without number", b'"prompt":' + repeated(b'"a"'), param="prompt"),
    completion("floats for token ids", b'"prompt":' + repeated(FLOAT), param="prompt"),
    completion("slow floats", b'"prompt":"a","logit_bias":' + BIAS, param="logit_bias"),
    completion("stop tokens", b'"prompt":"a","stop_token_ids":' + repeated(b"5"), param="stop_token_ids"),
    completion("long stop strings", b'"prompt":"a","stop":["' + b"a" * 30_000 + b'"]', param="stop"),
    completion("bad words without number", b'"prompt":"a","bad_words":' + repeated(b'"a"'), param="bad_words"),
    completion("a long bad word", b'"prompt":"a","bad_words":[' + TEXT + b"]", param="bad_words"),
    completion(
        "reports without number",
        b'"n":128,"prompt_logprobs":20,"prompt":[' + b",".join([b"12"] * 1_000) + b"]",
        param="prompt_logprobs",
    ),
    completion(
        "log-probabilities without number",
        b'"n":128,"logprobs":20,"max_tokens":1000000,"prompt":[' + b",".join([b'"a"'] * 16) + b"]",
        param="logprobs",
    ),
    completion("a long text to be cut", b'"truncate_prompt_tokens":5,"prompt":' + TEXT, param="prompt", **TOO_LONG),
    chat("a template", b'"chat_template":' + TEXT, param="chat_template"),
    completion("fields", b",".join(b'"f%d":0' % i for i in range(SIZE // 12)), param="prompt"),
    completion("a refused field among many", b'"suffix":' + TEXT + b',"prompt":"a"', param="suffix"),
    completion("a salt times n", b'"n":128,"prompt":["a","b"],"cache_salt":' + TEXT, param="cache_salt"),
    Hostile("a long model", COMPLETIONS, b'{"prompt":"a","model":' + TEXT + b"}", status=404, param="model"),
    Hostile("a long model of text", "/tokenize", b'{"prompt":"a","model":' + TEXT + b"}", status=404, param="model"),
    completion("a large number", b'"prompt":"a","max_tokens":%d' % 2**70, param="max_tokens"),
    completion("a large priority", b'"prompt":"a","priority":%d' % -(2**70), param="priority"),
    chat("messages without number", b"", repeated(b'{"role":"user","content":""}'), param="messages"),
    chat("empty messages", b"", repeated(b"{}"), param="messages"),
    chat("empty parts", b"", b'[{"role":"user","content":' + repeated(b"{}") + b"}]", param="messages"),
    chat("a long message", b"", b'[{"role":"user","content":' + TEXT + b"}]", param="messages", **TOO_LONG),
    chat("a large variable", b'"chat_template_kwargs":{"x":' + TEXT + b"}", param="chat_template_kwargs"),
    chat(
        "a deep variable", b'"chat_template_kwargs":{"x":' + b"[" * 99 + b"]" * 99 + b"}", param="chat_template_kwargs"
    ),
    chat("a wide indent", b'"chat_template_kwargs":{"indent":1000000000}', param="chat_template_kwargs"),
    *(
        chat(f"a variable {name}", b'"chat_template_kwargs":{"%b":[]}' % name.encode(), param="chat_template_kwargs")
        for name in ("messages", "self", "add_generation_prompt", "conversation")
    ),
    chat("tools without number", b'"tools":' + repeated(tool(b"null")), param="tools"),
    chat("the parameters of a tool", b'"tools":[' + tool(b'{"x":' + TEXT + b"}") + b"]", param="tools"),
    chat("deep parameters", b'"tool_choice":"required","tools":[' + tool(DEEP) + b"]"),
    chat("calls without number", b"", ASSISTANT % repeated(call(b'"{}"')), param="messages"),
    chat("the arguments of a call", b"", ASSISTANT % (b"[" + call(b'{"x":' + TEXT + b"}") + b"]"), param="messages"),
    chat("a large schema", b'"guided_json":{"x":' + TEXT + b"}", param="guided_json"),
    chat("a large expression", b'"guided_regex":' + TEXT, param="structured_outputs"),
    completion("an expression that multiplies", b'"prompt":"a","guided_regex":"(a{1000}){1000}"', param="guided_regex"),
    chat("allowed tokens", b'"allowed_token_ids":' + repeated(b"5"), param="allowed_token_ids"),
    response("items without number", b'"input":' + repeated(b"{}"), param="input"),
    response("a long input", b'"input":' + TEXT, param="input"),
    response("a large option", b'"input":"a","reasoning":{"x":' + TEXT + b"}", param="reasoning"),
    Hostile(
        "text to tokenize", "/tokenize", b'{"prompt":' + TEXT + b"}", param="prompt", kind="context_length_exceeded"
    ),
    Hostile("tokens to detokenize", "/detokenize", b'{"tokens":' + repeated(b"5") + b"}", param="tokens"),
]
