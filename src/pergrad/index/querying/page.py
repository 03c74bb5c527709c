"""Writes what queries find as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from pergrad.errors import IndexingError
from pergrad.reports.pictures import Shown

__all__ = ["Card", "Section", "write_page", "written_page"]

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: which samples made the model do this?</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
.cards { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
.card { border: 1px solid var(--line); border-radius: .4rem; padding: .6rem; overflow-wrap: anywhere; }
.card img, .query img { max-width: 100%; } img.sharp { image-rendering: pixelated; min-width: 5rem; }
.score { font-weight: 600; } .about { opacity: .75; font-size: .85rem; } p.text { margin: .3rem 0; }
</style></head><body>
<h1>{{ title }}: which samples made the model do this?</h1>
<p>Helpful samples lower the loss of a query when the model is trained on them; harmful ones raise it.
Scores of one query can be compared with each other; they are estimates, not proofs.
{%- if recall is not none %} Approximate search: recall {{ "%.3f"|format(recall) }}.{% endif %}</p>
{% macro preview(s) -%}
{% if s.uri %}<img src="{{ s.uri }}" alt="" width="{{ s.width }}"
{%- if s.has_pixels %} class="sharp"{% endif %}>
{%- elif s.excerpt %}<p class="text">{{ s.excerpt }}</p>{% endif %}
{%- endmacro %}
{% for section in sections %}
<section><h2>Query {{ section.number }}</h2><div class="query">{{ preview(section.shown) }}</div>
{% for kind, cards in (("Helpful", section.helpful), ("Harmful", section.harmful)) %}
<h3>{{ kind }}</h3><div class="cards">
{% for card in cards %}<div class="card">{{ preview(card.shown) }}
<div class="score">{{ card.score }}</div><div class="about">sample {{ card.index }}
{%- for name, value in card.about %} · {{ name }} {{ value }}{% endfor %}</div></div>
{% else %}<p>none</p>{% endfor %}</div>{% endfor %}</section>
{% endfor %}
</body></html>
"""


@dataclass(frozen=True)
class Card:
    """One match on the page."""

    index: int
    score: str
    shown: Shown
    about: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    """One query and its matches."""

    number: int
    shown: Shown
    helpful: tuple[Card, ...]
    harmful: tuple[Card, ...]


def written_page(title: str, sections: Sequence[Section], recall: float | None = None) -> str:
    """Returns the page; everything that comes from the data is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(_TEMPLATE)
    return template.render(title=title, sections=sections, recall=recall)


def write_page(path: Path, text: str) -> Path:
    """Writes the page and returns its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise IndexingError(f"cannot write the page {path}: {error.strerror}") from error
    return path
