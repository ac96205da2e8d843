"""Draws plans and schedules: SVG documents, lines of text, traces. Pure: no torch, no processes.

Each module answers one question: ``draw_pipeline`` (which ranks are there, and what crosses between stages and
modules), ``arrange`` (where does everything in that picture lie), ``draw_simulated_step`` (who computes when in a
simulated step), ``draw_rows`` (who does what when in a traced step, above its plan, and in layouts that a search
found), ``colours`` (which colour has what a rank does), ``svg`` (how is an element written).

Words:
    mark: a form with a meaning, which the legend explains.
    band: stages beside each other.
    row: the bands of one replica.
    frame: what surrounds the boxes of one stage in one row.
    box: one rank, or ranks that share it; in a timeline one compute.
    badge: the number of replicas that are like the one that is drawn.
    bracket: the finish of a plan.
    round: the way of a line round a band to the next one, or from the last stage back to the first.
"""
