"""Notebooks to pages: the only part of the package that knows jupyter, papermill and nbconvert.

    parameters   what a notebook takes, checked before anything is launched
    kernel       one notebook in one kernel process that never outlives the call
    report       every notebook, its page and the index
    render       an executed notebook -> HTML without any external request
    evidence     what a notebook asks for: a record, measured here, given, or published
    show         what a notebook displays: verdict, figure with table and text alternative, coverage
    widgets      the same figures, chosen by hand
    sweep        a grid of parameters, resumable
    readme       the generated block of README.md
    stories      the front page's three verdicts
    submission   what the overlap question asks to be handed in: required, raw, chapters, bundle

Importing this package imports none of them.
"""
