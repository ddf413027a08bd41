"""The page of a replay: one HTML file with which hardware is sized from a trace.

`choose` says what is measured, `cells` measures it in parallel, `sharing` and `leaving` count what the trace itself says,
`facts` gathers all of it as plain values; `pictures` draws them, `markup`, `sections` and `sizing` make HTML of them.
"""
