"""`penstock report`: one HTML page of what a run has written about itself. Needs no torch.

recorded.py   reads the folder of a run, whole or cut short
charts.py     curves as SVG that fits any width
page.py       the page: report.html with its sections, style and script
"""
