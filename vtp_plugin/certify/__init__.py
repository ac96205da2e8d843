"""``certify``: which runs show that unequal stages compute what equal ones do, how they are judged, and the report.

Words:
    reference: the uniform run with which others are compared.
    tolerance: how far a number may lie from the reference's.
"""
