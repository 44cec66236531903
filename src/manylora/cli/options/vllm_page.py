"""The section of `docs/options.md` about the flags of `vllm serve`."""

from __future__ import annotations

from collections.abc import Iterator

from manylora.cli.options.vllm_flag_table import SAME_NAMES, TRANSLATED, VLLM_FLAGS

__all__ = ["vllm_section"]

_HEAD = """## Flags of `vllm serve`

`manylora serve` takes a command line of vLLM: a flag works, or is ignored with a remark because it is not needed, or
stops the start with one line of why. Underscores count as hyphens. Several values may follow `--lora-modules`, and
`--served-model-name` and `--api-key` where the model comes before them.

| flag | here | why |
|---|---|---|
"""


def vllm_section() -> str:
    """Return the section, a row for each flag in alphabetical order."""
    rows = "".join(f"| `{flag}` | {here} | {why} |\n" for flag, here, why in sorted(_rows()))
    return _HEAD + rows


def _rows() -> Iterator[tuple[str, str, str]]:
    yield "--model", "works", "as the argument MODEL"
    for flag in SAME_NAMES:
        yield flag, "works", ""
    for flag, by_value in TRANSLATED.items():
        ours = ", ".join(f"`{one}`" for one in dict.fromkeys(by_value.values()))
        yield flag, "works", f"as {ours}"
    for flag, known in VLLM_FLAGS.items():
        if known.fine is None:
            yield flag, "ignored", known.why
        elif known.fine:
            yield flag, f"{' or '.join(known.fine)} only", known.why
        else:
            yield flag, "refused", known.why
