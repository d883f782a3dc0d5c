"""Numbers in a model's text. Each is read whole: 3/4 is no 4, 10^5 no 5, and 5:30 no 30."""

import re
import unicodedata
from decimal import Context, Decimal, Inexact
from fractions import Fraction

_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")  # minus, en dash, small and wide hyphen
    | dict.fromkeys("\u00d7\u00b7\u22c5", "*")
    | dict.fromkeys("\u00f7\u2044\u2215", "/")
    | {"\uff0b": "+"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_FRACTION = re.compile(r"[¼-¾⅐-⅞]")
_LATEX = [
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),  # a mixed number
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac(\d)(\d)"), r"\1/\2"),
    (re.compile(r"\\(?:times|cdot)\s*"), "*"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\{,\}|\\,(?=\d{3})"), ","),
    (re.compile(r"\\[()\[\]$!;, ]"), " "),
]
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_THOUSANDS = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'\u2019](?=\d{3}(?!\d))")
_ASIDE = re.compile(  # each looks ahead for its end, so that one without it costs no more than a glance
    r"\((?=[^()]*\))[^()A-Za-z]*[A-Za-z][^()]*\)|\[(?=[^\[\]]*\])[^\[\]A-Za-z]*[A-Za-z][^\[\]]*\]"
)

_PLAIN = r"(?:\d+(?:[.,]\d+)*|\.\d+)(?:[eE][-+]?\d+)?"
_JOINED = rf"(?:(?:[ ]?[/*^±][ ]?|:)[-+]?{_PLAIN})*"  # 3/4, 10^5, 2*10^5, 5:30
_DATE = r"\d{4}-\d{1,2}-\d{1,2}"
_MIXED = r"(?<![\w.])[-+]?\d+ \d+/\d+(?![\d/])"  # 1 1/2
_OF_LETTERS = rf"(?<![^\W\d_])[^\W\d_]+[ ]?[/^][ ]?[-+]?{_PLAIN}{_JOINED}"  # x/4, x^2
_NUMBERS = rf"(?<![A-Za-z\d._])(?<![A-Za-z]-)(?<![A-Za-z]\()[-+]?{_PLAIN}{_JOINED}(?:[ ]?\^)?"
EXPRESSION = re.compile(f"{_DATE}|{_MIXED}|{_OF_LETTERS}|{_NUMBERS}")
"""A number, or what holds numbers and is read as one thing."""

_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"(\d+),(\d+)")
_NUMBER = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_POWER = re.compile(r"(?:(?P<factor>[^*^/]+)\*)?(?P<base>[^*^/]+)\^(?P<exponent>[-+]?\d{1,3})")
_DIGITS = 400
"""Most digits of a value that is computed."""


def find_number(text: str) -> str:
    """Find the last number of a text as ``spell_number`` spells it; empty without one."""
    expression = find_expression(text)
    return spell_number(expression) if expression else ""


def find_expression(text: str) -> str:
    """Find the last number of a text, or of its last ``\\boxed{}``, as it is written in ASCII; empty without one.

    Asides, which are words in parentheses, are left out unless no number is elsewhere.
    """
    boxes = _BOXED.findall(text)
    text = normalise(boxes[-1] if boxes else text)
    expressions = EXPRESSION.findall(_ASIDE.sub(" ", text)) or EXPRESSION.findall(text)
    return expressions[-1] if expressions else ""


def is_number(text: str) -> bool:
    """Tell whether a text is a number, a fraction, a power or a time, and nothing else."""
    return EXPRESSION.fullmatch(normalise(text).strip()) is not None


def normalise(text: str) -> str:
    """Write the numbers of a text in ASCII: minus signs, fractions, powers and groups of digits, LaTeX's too."""
    text = re.sub(r"(?<=[\d)])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = _FRACTION.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _THOUSANDS.sub(",", text.translate(_SIGNS))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def spell_number(expression: str) -> str:
    """Spell the value of an expression as a decimal number, else as a fraction in lowest terms.

    What has no value, such as 5:30 and 2024-01-05, stays as it is, without its spaces.
    """
    expression = expression.strip()
    mixed = re.fullmatch(r"([-+]?)(\d+) (\d+/\d+)", expression)
    if mixed:
        whole, part = Fraction(mixed[2]), _read_value(mixed[3])
        value = None if part is None else (whole + part) * (-1 if mixed[1] == "-" else 1)
    else:
        expression = expression.replace(" ", "")
        number = _read_plain(expression.lstrip("-+"))
        if number is not None:  # of however many digits
            spelled = f"{number.normalize(Context(len(expression) + 1)):f}"
            return f"-{spelled}" if expression[0] == "-" and number else spelled
        value = _read_value(expression)
    if value is None:
        return expression
    exact = Context(prec=_DIGITS)
    quotient = exact.divide(Decimal(value.numerator), Decimal(value.denominator))
    return str(value) if exact.flags[Inexact] else f"{quotient.normalize(exact):f}"


def _read_plain(text: str) -> Decimal | None:
    """Read a number without a sign; None where it is none."""
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    elif comma := _DECIMAL_COMMA.fullmatch(text):
        text = f"{comma[1]}.{comma[2]}"
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _read_value(expression: str) -> Fraction | None:
    """Compute a fraction, a power or a number times a power; None where it is none, or has too many digits."""
    sign = -1 if expression.startswith("-") else 1
    expression = expression.lstrip("-+")
    if len(expression) > _DIGITS:
        return None
    if power := _POWER.fullmatch(expression):
        factor, base = _read_plain(power["factor"] or "1"), _read_plain(power["base"])
        exponent = int(power["exponent"])
        if (
            factor is None
            or base is None
            or len(power["base"]) * abs(exponent) > _DIGITS
            or (exponent < 0 and not base)
        ):
            return None
        return sign * Fraction(factor) * Fraction(base) ** exponent
    over, _, under = expression.partition("/")
    numerator, denominator = _read_plain(over), _read_plain(under)
    if numerator is None or not denominator:
        return None
    return sign * Fraction(numerator) / Fraction(denominator)
