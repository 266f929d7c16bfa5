"""What a binding's text declares, checked before it is compiled: schemas and signature lines.

Only what is written as plain literals is looked at, and nothing where the preprocessor chooses;
the manifest of the compiled library is checked in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cuda_ops.dispatch.library import check_signature, parsed_schema
from cuda_ops.names import HOME, apart

_TOKEN = re.compile(
    r'R"([^()\\\s]*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)'|//[^\n]*|/\*.*?\*/",
    re.S,
)
_LITERALS = r'((?:"(?:[^"\\\n]|\\["\\])*"\s*)+)'
_OP = re.compile(rf"\.\s*op\(\s*{_LITERALS},\s*{_LITERALS}\)")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\["\\])*)"')


def check(stem: str, binding: str, namespace: str = HOME) -> None:
    """Refuses a schema or a signature line that the loader would refuse, in the same words.

    Args:
        stem: the pair's name.
        binding: the text of its ``.cpp``.
        namespace: the pair's namespace.

    Raises:
        ManifestError: names operator and argument.
    """
    names: set[str] = set()
    for schema, line, is_composed in _declared(binding):
        parsed = parsed_schema(schema, stem, names, is_composed, namespace)
        names.add(apart(parsed.name)[1])
        check_signature(parsed.name, line, parsed)


def _declared(binding: str) -> Iterator[tuple[str, str, bool]]:
    """Returns the schema and the line of each operator, and whether it is composed."""
    # Neither comments nor raw strings: a schema needs none.
    code = _TOKEN.sub(lambda m: " " if m[0][0] in "/R" else m[0], binding)
    if re.search(r"^\s*#\s*(if|define)", code, re.MULTILINE):
        return
    found = list(_OP.finditer(code))
    for i, match in enumerate(found):
        end = found[i + 1].start() if i + 1 < len(found) else len(code)
        yield _joined(match[1]), _joined(match[2]), ".composite<" in code[match.end() : end]


def _joined(literals: str) -> str:
    return "".join(re.sub(r"\\(.)", r"\1", text) for text in _LITERAL.findall(literals))
