"""What of a spec has an effect on processes of one host: what workers, LMCache or the gateway are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from kvroute.deploy.render.reach import CONFIG, LMCACHE, WORKER_ARGS, findings_for
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.fields import Verdict, dotted
from kvroute.deploy.spec.loading import Finding

MADE_OF: Final = (WORKER_ARGS, LMCACHE, CONFIG)
ALSO: Final = {"x-kvroute.l2.sizeGb", "spec.maxDeployTimeInSeconds"}
"""Fields that only starting something gives an effect."""
SAYS = "has no effect in up because it is a setting of containers or of Kubernetes"


def local_findings(document: Document, findings: Iterable[Finding]) -> Iterator[Finding]:
    """`findings`, where what is applied in general and has no effect here is noted with the reason."""
    findings = list(findings)
    rendered = [list(findings_for(target, document, findings)) for target in MADE_OF]
    for finding, *outcomes in zip(findings, *rendered, strict=True):
        if finding in outcomes or dotted(finding.path) in ALSO:
            yield finding
            continue
        # "applied, but ...": what is said of a field that does have an effect.
        but = [outcome for outcome in outcomes if outcome.text.startswith("applied")]
        yield but[0] if but else dataclasses.replace(finding, verdict=Verdict.NOTED, text=SAYS)
