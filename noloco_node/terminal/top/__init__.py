"""`top`: one node on a whole screen, live.

    glyphs.py          curves, bars and gauges of characters; what replaces them where a terminal has only ASCII
    layout.py          lines that fit: cut with an ellipsis, put side by side; a screen's rows divided between its parts
    header_footer.py charts.py tables.py activity.py   the parts of the screen
    screen.py          all parts for one screen size: a picture (terminal/picture.py) in, lines out
    keys.py            what each key does
    line_mode.py       the same as lines of text, for a pipe
    poller.py          asks the node, over one connection
    driver.py          the alternate screen and the keyboard; restores the terminal afterwards
    app.py             connects them, from the first picture to the last key

All but the last three are pure: no clock, no terminal, no node.
"""
