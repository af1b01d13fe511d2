from __future__ import annotations

import re

import pytest

from pointsman.report.page import paragraphs, unbroken


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("width explains 0 %; TTFT −34 % [−38, −30] and 12 %.", ["0 %", "−34 % [−38, −30]", "12 %"]),
        ("pointsman sweep --search run.seed=0,1 --out-dir x", ["--search", "--out-dir"]),
        ("jobs beats sjf: +0.286 [0.272, 0.298] in return", ["+0.286 [0.272, 0.298]"]),
        ("Trained for 196 updates, 200,704 decisions, 24 s.", ["24 s"]),
        ("a -- b, least-work, update-000004, 3 servers, it's 5 of 7", []),
    ],
)
def test_lines_do_not_break_within_options_times_and_intervals(text: str, whole: list[str]) -> None:
    marked = unbroken(text)
    assert re.findall(r'<span class="whole">(.*?)</span>', marked) == whole
    assert re.sub(r"</?span[^>]*>", "", marked).replace("&#x27;", "'") == text, "what is copied is the same"
    assert paragraphs([text]) == f"<p>{marked}</p>"


def test_text_is_escaped() -> None:
    assert unbroken("<b> 3 s") == '&lt;b&gt; <span class="whole">3 s</span>'
