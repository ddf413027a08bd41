"""The page of a replay: one HTML file with which hardware is sized from a trace.

`choose` says what is measured, `cells` measures it side by side, `sharing` and `leaving` count what the trace itself
says, `timeline` puts a replay over time; `facts` gathers all of it as plain values. `pictures` draws them, `answer` and
`sections` put them into words and tables (`markup`), `write` makes a file of it.
"""
