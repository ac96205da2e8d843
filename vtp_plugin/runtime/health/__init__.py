"""Ranks meet, compare what they were asked for, watch each other, and end with one line if one of them fails.

Words:
    statement: what a rank is about to do, for comparison.
    verdict: what rank 0 concludes from all statements (``CheckResult``).
    topic: part of the store for one kind of exchange (``Topic``).
    sign of life: what a rank writes now and then, and its neighbour looks for.
    attempt: what ranks do between two starts by the launcher; a run has one or several.
    redaction: what a rank hides from the ranks of other sites (``Redaction``).
"""
