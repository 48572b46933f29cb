"""What a run writes about itself, while it runs and at its end.

metrics.py      the rows of metrics.jsonl, and the display
record.py       run.json and the timeline
throughput.py   model FLOPs and peak memory, for a row
slow_ranks.py   ranks that compute more slowly than predicted
profile.py      a trace of some steps
sample.py       what the trained model writes
trackers.py     TensorBoard, W&B, MLflow: each reads the rows in a process of its own (tracker_process.py)
"""
