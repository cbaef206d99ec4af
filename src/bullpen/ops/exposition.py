"""Metrics as text in the format that Prometheus reads (version 0.0.4).

In: metrics of any part (`bullpen.ports.metrics`). Out: one text. Names stay exactly as given, also where Prometheus
would choose another ending. Metrics of one name from several parts are one family, as the format demands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from bullpen.ports.metrics import Metric, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def render(metrics: Iterable[Metric]) -> str:
    """The whole page."""
    families: dict[str, list[Metric]] = {}
    for metric in metrics:
        families.setdefault(metric.name, []).append(metric)
    lines: list[str] = []
    for name, parts in families.items():
        lines.append(f"# HELP {name} {parts[0].help.translate(_IN_HELP)}")
        lines.append(f"# TYPE {name} {parts[0].kind}")
        for part in parts:
            for sample in part.samples:
                lines.extend(_lines(name, sample) if part.kind == "histogram" else [_line(name, sample)])
    return "\n".join([*lines, ""])


def _line(name: str, sample: Sample) -> str:
    return f"{name}{_labels(sample.labels)} {_number(sample.value)}"


def _lines(name: str, sample: Sample) -> Iterable[str]:
    for bound, count in sample.buckets:
        yield f"{name}_bucket{_labels({**sample.labels, 'le': _number(bound)})} {count}"
    yield f"{name}_sum{_labels(sample.labels)} {_number(sample.value)}"
    yield f"{name}_count{_labels(sample.labels)} {sample.count}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{str(value).translate(_IN_LABEL)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) else repr(float(value))
