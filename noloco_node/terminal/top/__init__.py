"""`top`: one node on a whole screen, live.

    picture.py    what is looked at: the node's views, when they came, and whether it is still there
    marks.py      curves, bars and gauges of characters; what stands for them where a terminal has no such characters
    lines.py      lines that fit: cut with an ellipsis, put side by side, rows of a screen handed out to its parts
    timeline.py   rounds as they happened, on an axis of time
    edges.py charts.py tables.py panels.py   the parts of the screen
    screen.py     the parts put together for a size: a picture in, lines out
    desk.py       what keys mean
    news.py       the same as lines, for a pipe
    watch.py      asks the node, over one connection
    terminal.py   the alternate screen, the keys, and everything as it was afterwards
    session.py    joins them: from the first picture to the last key

All but the last three are pure: no clock, no terminal, no node.
"""
