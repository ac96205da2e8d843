"""The report as one page: what a command knows of a layout, a step or a trace, as data; and the page's template.

``report_page`` says what a page may hold. ``page.html``, ``page.css`` and ``page.js`` are the template, the looks, and
what the page does by itself; ``vtp_plugin.cli.page_sections`` fills them. A page loads nothing.

Words:
    page: one HTML file with everything in it.
    section: a part of the page with a heading, left out where its data are missing.
    bar: what the ranks that are alike hold in memory, beside what their device has.
    piece: a part of a bar, such as the weights.
"""
