"""The text of an expression becomes words, numbers, strings and operators, or is refused where it goes wrong."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from postbus.model import InvalidFilter

__all__ = ["Token", "refuse", "tokens_of"]

_SPACE = re.compile(r"(?:[ \t\r\n\f]|//[^\n]*)+")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|(?:[0-9]+\.[0-9]+|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?")
_IDENT = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
_QUOTED = re.compile(r"`([a-zA-Z0-9_./ -]+)`")
_STRING = re.compile(r"([rRbB]{0,2})(\"\"\"|'''|\"|')")
_PREFIXES = {"", "r", "b", "rb", "br"}
_OPERATOR = re.compile(r"&&|\|\||==|!=|<=|>=|[-+*/%!<>?:.,()\[\]{}]")
_ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\'\"`?])|[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2}))"
)
_PLAIN = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_SURROGATES = range(0xD800, 0xE000)
_CODE_POINT_MAX = 0x10FFFF


class Token(msgspec.Struct, frozen=True, gc=False):
    """``kind`` is the operator itself, or one of ident, quoted, int, float, string, end; ``in`` is an operator."""

    kind: str
    value: Any
    start: int
    end: int


def refuse(text: str, at: int, message: str, hint: str | None = None) -> NoReturn:
    """Refuse the expression, pointing at a character of it."""
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    raise InvalidFilter(f"expr: {message} (line {line}, column {column})", line=line, column=column, hint=hint)


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a text, the last of kind ``end``."""
    found = []
    at = 0
    while True:
        if space := _SPACE.match(text, at):
            at = space.end()
        if at == len(text):
            found.append(Token("end", None, at, at))
            return found
        token = _token(text, at)
        found.append(token)
        at = token.end


def _token(text: str, at: int) -> Token:
    if found := _STRING.match(text, at):
        return _string(text, at, found)
    if found := _IDENT.match(text, at):
        word = found[0]
        return Token("in" if word == "in" else "ident", word, at, found.end())
    if found := _NUMBER.match(text, at):
        return _number(text, at, found)
    if found := _OPERATOR.match(text, at):
        return Token(found[0], None, at, found.end())
    if found := _QUOTED.match(text, at):
        return Token("quoted", found[1], at, found.end())
    hint = {"=": "compare with ==", "&": "write &&", "|": "write ||"}.get(text[at])
    refuse(text, at, f"{text[at]!r} is not expected here", hint)


def _number(text: str, at: int, found: re.Match[str]) -> Token:
    digits, end = found[0], found.end()
    if text[end : end + 1] in {"u", "U"}:
        refuse(text, at, "unsigned numbers are not supported", "JSON has none: leave the u away")
    if _IDENT.match(text, end):
        refuse(text, end, f"{text[end]!r} is not expected after a number")
    if digits.startswith("0x"):
        return Token("int", int(digits, 16), at, end)
    if digits.isdigit():
        return Token("int", int(digits), at, end)
    return Token("float", float(digits), at, end)


def _string(text: str, at: int, opening: re.Match[str]) -> Token:
    prefix, quotes = opening[1].lower(), opening[2]
    if prefix not in _PREFIXES:
        refuse(text, at, f"{opening[1]!r} is no prefix of a string")
    if "b" in prefix:
        refuse(text, at, "bytes are not supported", "JSON has none: use a string")
    position = opening.end()
    parts: list[str] = []
    while True:
        if position >= len(text) or (len(quotes) == 1 and text[position] in "\r\n"):
            refuse(text, at, "the string has no end")
        if text.startswith(quotes, position):
            return Token("string", "".join(parts), at, position + len(quotes))
        if text[position] == "\\" and not prefix:
            found = _ESCAPE.match(text, position)
            if found is None:
                refuse(text, position, "this is no escape sequence", r"write \\ for a backslash, or r'...'")
            parts.append(_unescaped(text, position, found))
            position = found.end()
        else:
            parts.append(text[position])
            position += 1


def _unescaped(text: str, at: int, found: re.Match[str]) -> str:
    plain, byte, short, long, octal = found.groups()
    if plain:
        return _PLAIN.get(plain, plain)
    code = int(octal, 8) if octal else int(byte or short or long, 16)
    if code > _CODE_POINT_MAX or code in _SURROGATES:
        refuse(text, at, f"{found[0]} is no Unicode character")
    return chr(code)
