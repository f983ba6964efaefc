"""Whether the numbers of a refusal agree with each other and with the pool.

That they agree with the state at the decision is checked by brute force where that state can be seen:
`benchmarks.simulation.checks.check_refusal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAGE_TOKENS = 16
CODES = ("request_too_large", "pages_short", "queue_full", "deadline")
ANYTIME = ("not_ready", "draining")  # said without asking the engine: they have no numbers of pages


def wrong(refusal: Mapping[str, Any], pages_total: int) -> str:
    """A sentence for the first number that cannot be, "" for none. `pages_total` is the pool's size."""
    if refusal["code"] in ANYTIME:
        return ""
    code, needed, free = refusal["code"], refusal["pages_needed"], refusal["pages_free"]
    deficit, retry = refusal["page_deficit"], refusal["retry_after_ms"]
    against = pages_total if code == "request_too_large" else free
    checks = {
        "an unknown code": code in CODES,
        "another pool": refusal["pages_total"] == pages_total and refusal["page_tokens"] == PAGE_TOKENS,
        "more free pages than there are": 0 <= free <= pages_total,
        "no pages needed": needed >= 1,
        "a deficit that is not needed - free": deficit == max(0, needed - against),
        "a queue of negative length": refusal["queue_depth"] >= 0,
        "a time to retry that is none": retry is None or retry >= 1,
        "a time to retry what can never run": not (code == "request_too_large" and retry is not None),
        "pages short without a deficit": not (code in ("pages_short", "request_too_large") and deficit == 0),
        "a message without its numbers": str(needed) in refusal["message"].replace(",", ""),
    }
    broken = next((name for name, holds in checks.items() if not holds), "")
    return f"{broken}: {dict(refusal)}" if broken else ""
