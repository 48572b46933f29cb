"""`penstock report` and `penstock watch`: what a run has written about itself, as a page and in a terminal.

recorded.py   reads the folder of a run, whole or cut short
charts.py     curves as SVG that fits any width
page.py       the page: report.html with its sections, style and script
terminal.py   a run on a terminal
live.py       the same again and again, while the run goes on
"""
