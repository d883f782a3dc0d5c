"""Read verdicts in what a judge wrote: a score, or a yes or no. What can be read in two ways has no verdict."""

import re

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?:[.,]\d+)?|\.\d+)"
"""A number; a comma before three digits parts thousands, any other is that of decimals."""
_OTHER = "\ufffc"
"""Stands for a number of another scale, such as 80 % of scores from 1 to 10."""
_ALONE = re.compile(rf"(?<![\w.,])(?<!\w-)({_NUMBER}|{_OTHER})(?!\w)")

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\[\[([^\[\]]*)\]\]")
_MARKS = re.compile(r"\\(?:text|mathrm|mathbf)\b|</\w+>|[<*_`#|\"'\[\](){}$]")
"""Marks of Markdown, LaTeX, XML and JSON, which may stand between a label and its score."""
_LEGEND = re.compile(r"\([^()]*\d\s*=\s*[A-Za-z][^()]*\)")
"""What the ends of a scale mean: (1 = bad, 10 = good)."""
_ORDINAL = re.compile(r"\b\d+(?:st|nd|rd|th)\b", re.I)
_HYPHEN = re.compile(r"(?<=\d)\s*[-\u2013\u2014]\s*(?=\d)")

# How a scale is told: its end beside a score, both ends, or the number of its points.
_BOUND = re.compile(
    r"\b(?:max(?:imum)?|min(?:imum)?|highest|lowest|best|worst|top|full|perfect)\s+(?:possible\s+)?"
    rf"(?:score|rating|grade|points|marks)s?\s*(?:[:=]|is\b|of\b)?\s*{_NUMBER}",
    re.I,
)
_SCALE = re.compile(rf"\bscale\s*(?:from|of|between|:)?\s*({_NUMBER})\s*(?:to|and|[-\u2013\u2014])\s*({_NUMBER})", re.I)
_POINTS = re.compile(rf"({_NUMBER})(?:\s*(?:to|[-\u2013\u2014])\s*({_NUMBER}))?(?:[\s-]*point)?\s+scale\b", re.I)
_SPAN = re.compile(rf"(?<![\w.,])({_NUMBER})\s*(?:to|and|[-\u2013\u2014])\s*({_NUMBER})(?![\w%])", re.I)
_FRACTION = re.compile(
    rf"(?<![\w.,])({_NUMBER})\s*(?:points?|stars?|marks?)?\s*(?:/|\b(?:out\s+)?of\b)\s*({_NUMBER})(?!\w)", re.I
)
_DENOMINATOR = re.compile(rf"\s*[(]?(?:/|\b(?:out\s+)?of\b)\s*({_NUMBER})(?!\w)", re.I)
_REST = re.compile(rf"(?:/|\bout\s+of\b)\s*({_NUMBER})(?!\w)", re.I)
_PERCENT = re.compile(rf"({_NUMBER})\s*%")

# What names a score, and what may stand between the name and the number.
_FILLER = (
    r"(?:\s|[:=,>~\u2248]|-+(?!\.?\d)|(?:is|was|of|a|an|as|at|would|be|say|i|solid|only|just|about|given|to)\b)*"
    rf"({_NUMBER}|{_OTHER})(?!\w)(?!\s*(?:to|or|[+*=])\s*[\d{_OTHER}])"
)
_NAME = r"(?:score|rating|grade|verdict)s?"
_LABEL = (
    rf"(?:{_NAME}|(?:rate[ds]?|g[ia]ve[sn]?|giving)\s+(?:it|them|(?:this|that|the)(?:\s+[a-z]+)?)"
    r"|(?:deserves?|earns?|gets?|receives?)\s+an?)"
)
_STRONG = re.compile(rf"\b{_LABEL}\b{_FILLER}", re.I)
_MISSING = re.compile(rf"\b({_NAME}\s*[:=]\s*)(?:n/?a|none|null|unknown|unclear)\b", re.I)
_WEAK = re.compile(rf"\b(?:answer|result|overall|total|final|points|marks)\s*[:=]{_FILLER}", re.I)

_CHOICES = re.compile(r"\b(?:yes\s*(?:/|or)\s*no|true\s*(?:/|or)\s*false)\b", re.I)
_NEGATION = re.compile(r"n['\u2019]t\b|\bnever\b", re.I)
_GOES_ON = r"(?:the|it|its|this|that|these|those|because|since|as|there|he|she|they|i|we|you|but|and|or|is|was)\b"
"""What follows a "no" that is an answer, and not the beginning of "no error"."""
_WORD = re.compile(rf"\b(not\s+)?(yes|true|no|false)\b([ \t]+(?!{_GOES_ON})[a-z])?", re.I)
_ANSWER = re.compile(
    r"\b(?:verdict|answer|correct|result|judge?ment|decision)\s*(?:[:=]|is\b)\s*((?:not\s+)?(?:yes|true|no|false)\b)",
    re.I,
)


def cut_thinking(text: str) -> str:
    """Cut the thinking off a text: what stands before the last ``</think>``, or behind a ``<think>`` without one."""
    answer = text.rpartition("</think>")[2]
    return answer.partition("<think>")[0]


def read_score(text: str, low: float, high: float) -> float | None:
    """Read a score on the scale from ``low`` to ``high``; None where there is none, or where it is not clear.

    A score that is named (``Score: 8``, a key of JSON), boxed or told with its scale (``8/10``) goes before all other
    numbers. Else the answer must have one number alone. Two that differ, or one outside the scale, are no score.
    """
    named = []
    for match in _BOXED.finditer(text):
        denominator = _DENOMINATOR.match(text, match.end())
        boxed = (match[1] or match[2] or "") + (denominator[0] if denominator else "")
        named += _ALONE.findall(_mark_scales(boxed, low, high))
    plain = _mark_scales(text, low, high)
    named += _STRONG.findall(plain)
    numbers = named or _WEAK.findall(plain) or _ALONE.findall(plain)
    scores = {_read_number(number) for number in numbers}
    score = scores.pop() if len(scores) == 1 else None
    return score if score is not None and low <= score <= high else None


def read_boolean(text: str) -> bool | None:
    """Read a yes or no, a true or false; None where there is none, or where two differ.

    A word that is boxed, or named such as by ``Verdict:``, goes before all others. The "no" of "no error" is none.
    """
    plain = _MARKS.sub(" ", _NEGATION.sub(" not", _CHOICES.sub(" ", text)))
    boxed = [_MARKS.sub(" ", match[1] or match[2] or "") for match in _BOXED.finditer(text)]
    for parts in (boxed, _ANSWER.findall(plain), [plain]):
        words = [match for part in parts for match in _WORD.finditer(part)]
        verdicts = {
            (word.lower() in ("yes", "true")) != bool(negation)
            for negation, word, noun in (match.groups() for match in words)
            if not (word.lower() == "no" and noun)
        }
        if verdicts:
            return verdicts.pop() if len(verdicts) == 1 else None
    return None


def _read_number(text: str) -> float | None:
    """Read a number as people write it; None stands for one of another scale."""
    if text == _OTHER:
        return None
    is_parted = re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+", text)
    return float(text.replace(",", "" if is_parted else "."))


def _mark_scales(text: str, low: float, high: float) -> str:
    """Return a text without marks, in which scores stand alone: what tells this scale is left out, and a number of
    another scale is marked as such."""

    def spell(is_ours: bool, score: str = " ") -> str:
        return f" {score} " if is_ours else f" {_OTHER} "

    plain = _MARKS.sub(" ", _LEGEND.sub(" ", text.replace("\u2212", "-")))
    plain = _MISSING.sub(rf"\g<1> {_OTHER} ", plain)
    plain = _BOUND.sub(" ", _ORDINAL.sub(" ", plain))
    for scale in (_SCALE, _POINTS):
        plain = scale.sub(lambda match: spell(_is_scale(match.groups(), low, high)), plain)
    plain = _SPAN.sub(lambda match: " " if _is_scale(match.groups(), low, high) else match[0], plain)
    plain = _HYPHEN.sub(" to ", plain)
    plain = _FRACTION.sub(lambda match: spell(_read_number(match[2]) == high, f"score: {match[1]}"), plain)
    plain = _REST.sub(lambda match: spell(_read_number(match[1]) == high), plain)
    return _PERCENT.sub(lambda match: spell(high == 100, match[1]), plain)


def _is_scale(ends: tuple[str | None, ...], low: float, high: float) -> bool:
    """Tell whether two ends of a scale, or its last alone, are those from ``low`` to ``high``."""
    numbers = [_read_number(end) for end in ends if end]
    return numbers in ([low, high], [high])
